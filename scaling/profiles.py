"""Profile likelihood intervals of what people read off a law: its exponents and its best shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from depthlaw.scaling.bootstrap import weight_variance
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.identify import spread
from depthlaw.scaling.laws import Array
from depthlaw.scaling.lm import minimise, objective
from depthlaw.scaling.pooling import Problem
from depthlaw.scaling.student import student_quantile

EXPONENTS = ("alpha", "beta")
# How far the quantity is moved, in its linearised standard errors; beyond the last the profile counts as flat. One
# known to no better than a factor 100 counts as not bounded, and is not moved further.
FAR = math.log(100.0)
MULTIPLES = np.array([0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0])
STIFF = 100.0  # curvature of the spring that moves the quantity, beside that of the likelihood
INNER = 1e-3  # the spring's residual stays below this fraction of delta, where Huber is a square
STEPS, TOL = 150, 1e-6  # of one refit
DIFFERENCE = 1e-6  # of a numerical gradient


@dataclass(frozen=True)
class Target:
    """A positive quantity. name: `alpha`, or `best d/L[hc]`. value: its logarithm, theta (S, K) -> (S,)."""

    name: str
    value: Callable[[Array], Array]


def targets(problem: Problem, fitted: FittedLaw) -> list[Target]:
    """Every alpha and beta of the law, positive in all laws, and each topology's best d / L at the largest size."""
    found = []
    for k, name in enumerate(fitted.names):
        if name.partition("[")[0] in EXPONENTS:
            found.append(Target(name, lambda theta, k=k: theta[:, k]))  # type: ignore[misc]
    n = np.array([np.log(fitted.ranges[""]["N"][1] / fitted.N0)])
    for t, topology in enumerate(fitted.topologies):
        if fitted.best_ratio(topology, fitted.N0) is None:
            continue

        def best(theta: Array, t: int = t) -> Array:
            found = problem.law.best_ln_ratio(problem.layout.natural(theta, t), n, fitted.centre)
            assert found is not None
            return np.asarray(found[..., 0])

        found.append(Target(f"best d/L[{topology}]", best))
    return found


def gradient(target: Target, theta: Array) -> Array:
    """d value / d theta (S, K), by central differences: exact to rounding for the linear ones."""
    K = theta.shape[1]
    steps = DIFFERENCE * np.eye(K)
    ends = [target.value((theta[:, None, :] + sign * steps).reshape(-1, K)).reshape(-1, K) for sign in (1.0, -1.0)]
    return np.asarray((ends[0] - ends[1]) / (2.0 * DIFFERENCE))


def intervals(problem: Problem, fitted: FittedLaw, run: Array) -> dict[str, tuple[float, float]]:
    """{name: (low, high)}, 95 %, in the quantity's own unit: where twice the rise of the objective over its scale is
    below the square of Student's t quantile with m - K degrees of freedom.

    run (m,) numbers each row's run. A likelihood takes rows as independent; where a run has several, the quantile is
    multiplied by the ratio of the quantity's standard errors with and without that assumption (`_clustering`), if
    above 1, and has as many degrees of freedom as runs less one.

    Each quantity is pulled away from its best value by a spring, all unknowns are fitted again, and the point (value
    reached, rise of the data's own objective) lies on the profile whatever the spring's strength. An end is 0 or inf
    where the profile never rises so far: the data do not bound the quantity on that side.
    """
    theta = np.array([fitted.theta])
    r = problem.residual(theta)[0]
    m, K, G = r.size, theta.shape[1], int(run.max()) + 1
    quantile = student_quantile(0.975, min(m - K, G - 1))
    scale2, _ = spread(r, fitted.delta, K)
    robust = _clustering(problem, fitted, run, scale2) if m > G else np.zeros((K, K))
    found = {}
    for target in targets(problem, fitted):
        g = gradient(target, theta)[0]
        usual = float(g @ np.array(fitted.covariance) @ g)
        wider = np.sqrt(max(1.0, float(g @ robust @ g) / usual)) if usual > 0.0 else 1.0
        found[target.name] = _interval(problem, fitted, target, theta, quantile * float(wider), scale2)
    return found


def _clustering(problem: Problem, fitted: FittedLaw, run: Array, scale2: float) -> Array:
    """(K, K): covariance of theta with runs and not rows independent, C U'U C / scale2^2 with C the usual one and U the
    scores J psi summed over each run (Liang and Zeger 1986), times the small-sample factor of the bootstrap."""
    theta, C = np.array([fitted.theta]), np.array(fitted.covariance)
    psi = np.clip(problem.residual(theta)[0], -fitted.delta, fitted.delta)
    scores = np.zeros((int(run.max()) + 1, C.shape[0]))
    np.add.at(scores, run, psi[:, None] * problem.jacobian(theta)[0])
    half = scores @ C / scale2
    return np.asarray(half.T @ half) * weight_variance(run, C.shape[0])


def _interval(
    problem: Problem, fitted: FittedLaw, target: Target, theta: Array, critical: float, scale2: float
) -> tuple[float, float]:
    low, high = problem.ranges("bounds")
    covariance = np.array(fitted.covariance)
    g, at = gradient(target, theta)[0], float(target.value(theta)[0])
    variance = float(g @ covariance @ g)
    if variance == 0.0:  # held by a bound so that nothing can move it
        return 0.0, float("inf")
    shift = np.clip(np.sqrt(variance) * np.concatenate([-MULTIPLES, MULTIPLES]), -FAR, FAR)
    goal = at + shift
    # Two starts a goal: moved along the valley of the linearised fit, and not moved at all.
    valley = theta + shift[:, None] * (covariance @ g) / variance
    start = np.concatenate([np.clip(valley, low, high), np.repeat(theta, shift.size, 0)])
    # The spring is one more row: residual soft * (value - goal), with a weight that gives it its curvature.
    soft = INNER * fitted.delta / np.abs(shift).max() / 2.0
    weights = np.ones((start.shape[0], problem.observed.size + 1))
    weights[:, -1] = STIFF * scale2 / variance / soft**2

    def residual(th: Array) -> Array:
        # Each start has its own goal: found again by the goal's number, which travels as one more, held, unknown.
        pull = soft * (target.value(th[:, :-1]) - goal[th[:, -1].astype(int)])
        return np.concatenate([problem.residual(th[:, :-1]), pull[:, None]], 1)

    def jacobian(th: Array) -> Array:
        J = np.concatenate([problem.jacobian(th[:, :-1]), soft * gradient(target, th[:, :-1])[:, None, :]], 1)
        return np.concatenate([J, np.zeros((*J.shape[:2], 1))], 2)

    number = np.tile(np.arange(shift.size, dtype=np.float64), 2)[:, None]
    start = np.concatenate([start, number], 1)
    free = np.ones_like(start, dtype=bool)
    free[:, -1] = False
    low, high = np.append(low, 0.0), np.append(high, shift.size)
    found = minimise(residual, jacobian, start, low, high, fitted.delta, free, weights, STEPS, TOL)
    better = np.argmin(found.objective.reshape(2, -1), axis=0)
    ends = found.theta.reshape(2, shift.size, -1)[better, np.arange(shift.size), :-1]
    rise = objective(problem.residual(ends), fitted.delta) - objective(problem.residual(theta), fitted.delta)
    # A refit that ran out of steps rose too far: nothing follows from it, which leaves the end further out or open.
    reached = found.converged.reshape(2, -1)[better, np.arange(shift.size)]
    root = np.where(reached, np.sqrt(np.maximum(2.0 * rise / scale2, 0.0)), 0.0)
    value = target.value(ends)
    return (
        math.exp(_crossing(value[shift < 0], root[shift < 0], at, critical, -np.inf)),
        math.exp(_crossing(value[shift > 0], root[shift > 0], at, critical, np.inf)),
    )


def _crossing(value: Array, root: Array, at: float, critical: float, flat: float) -> float:
    """Where the root of the deviance, outwards from 0 at `at`, first reaches the critical value; else `flat`."""
    beyond = np.flatnonzero((root >= critical) & (np.abs(value - at) < FAR))
    if not beyond.size:
        return flat
    j = int(beyond[0])
    v0, r0 = (at, 0.0) if j == 0 else (float(value[j - 1]), float(root[j - 1]))
    return v0 + (float(value[j]) - v0) * (critical - r0) / (float(root[j]) - r0)
