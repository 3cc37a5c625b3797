"""Batched Levenberg-Marquardt for sums of Huber losses: many starts at once, in numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from depthlaw.scaling.laws import Array

# theta (S, K) -> residuals (S, m); the same -> d residual / d theta (S, m, K).
Residual = Callable[[Array], Array]

LAMBDA_START, LAMBDA_LOW, LAMBDA_HIGH = 1e-2, 1e-9, 1e9
PROBE = 0.1  # fraction of a step over which its second derivative is measured
BEND_LIMIT = 0.75
# Numbers of a Jacobian that are worked on at once (8 MB): what is between lies in memory that is used again, not asked
# for and given back.
AT_ONCE = 1_048_576
CALM = 3  # accepted steps in a row that must gain almost nothing


@dataclass(frozen=True)
class Minima:
    """Where each start ended: theta (S, K), objective (S,), converged (S,) and the number of steps of the slowest."""

    theta: Array
    objective: Array
    converged: Array
    steps: int


def huber(r: Array, delta: float) -> Array:
    """r^2 / 2 within delta, delta (|r| - delta / 2) beyond it."""
    size = np.abs(r)
    return np.where(size <= delta, 0.5 * r * r, delta * (size - 0.5 * delta))


def objective(r: Array, delta: float, weights: Array | float = 1.0) -> Array:
    """The SUM of Huber losses, times the rows' weights, over the last axis; infinite where one is not finite."""
    total = (weights * huber(r, delta)).sum(-1)
    return np.where(np.isfinite(total), total, np.inf)


def minimise(
    residual: Residual,
    jacobian: Residual,
    start: Array,
    low: Array,
    high: Array,
    delta: float,
    free: Array | None = None,
    weights: Array | None = None,
    max_steps: int = 300,
    tol: float = 1e-10,
) -> Minima:
    """Minimise sum_i w_i huber(r_i(theta), delta) from every start (S, K) inside the box [low, high] (K,).

    weights (S, m), not negative: each start's own row weights w, such as how often a resample drew each row; 1 if not
    given.

    Each step solves (J'VJ + lambda (J'WJ + diag J'WJ)) step = -J'psi, where psi = clip(r, +-delta), V = 1 for rows
    within delta and 0 beyond (the true curvature of Huber), W = psi / r (that of reweighted least squares, always a
    majorant). Small lambda is then Newton, which is what converges when delta is far below the residuals and the sum
    is nearly one of absolute values; large lambda is a short reweighted step. The step is then bent along the curved
    valleys that sums of exponentials have (geodesic acceleration, Transtrum and Sethna 2012, arXiv:1201.5885), its
    second derivative taken by one more evaluation. A parameter at its bound that wants to
    leave is held; `free` (S, K) false holds one where it starts. A start is done when CALM accepted steps in a row
    each gain less than `tol` of the objective or no step gains anything, and then leaves the batch. Starts whose
    Jacobians together would be larger than AT_ONCE go one group after another, which changes no result.
    """
    S, K = start.shape
    theta = np.clip(start, low, high)
    free = np.ones((S, K), dtype=bool) if free is None else free
    weights = np.ones((S, 1)) if weights is None else weights
    r = residual(theta[:1])
    at_once = max(1, AT_ONCE // (r.size * K))
    if at_once < S:
        parts = [
            minimise(residual, jacobian, theta[i], low, high, delta, free[i], weights[i], max_steps, tol)
            for i in (slice(first, first + at_once) for first in range(0, S, at_once))
        ]
        end = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ("theta", "objective", "converged")}
        return Minima(**end, steps=max(p.steps for p in parts))
    r = residual(theta) if S > 1 else r
    cost = objective(r, delta, weights)
    done = np.zeros(S, dtype=bool)
    lam, calm = np.full(S, LAMBDA_START), np.zeros(S, dtype=int)
    live = np.flatnonzero(np.isfinite(cost))
    r, w, J = r[live], weights[live], _transposed(jacobian(theta[live]))
    steps = 0
    while live.size and steps < max_steps:
        steps += 1
        here = theta[live]
        system = _System.at(r, J, w, here, low, high, free[live], lam[live], delta)
        v = np.clip(here + system.solve(r), low, high) - here
        bend = (residual(here + PROBE * v) - r) / PROBE - (v[:, None, :] @ J)[:, 0, :]
        step = v + system.bounded(0.5 * system.solve(2.0 / PROBE * bend), v)
        trial = np.clip(here + step, low, high)
        trial_r = residual(trial)
        trial_cost = objective(trial_r, delta, w)
        gain = cost[live] - trial_cost
        better = gain > 0.0
        small = gain <= tol * cost[live]
        theta[live[better]] = trial[better]
        cost[live[better]] = trial_cost[better]
        calm[live] = np.where(better & ~small, 0, np.where(better, calm[live] + 1, calm[live]))
        lam[live] = np.where(better, np.maximum(lam[live] / 5.0, LAMBDA_LOW), lam[live] * 4.0)
        finished = (calm[live] >= CALM) | (lam[live] > LAMBDA_HIGH) | (cost[live] <= 1e-30)
        done[live[finished]] = True
        keep = ~finished
        # Residuals and Jacobian follow only where the point moved.
        moved = keep & better
        r[better] = trial_r[better]
        if moved.any():
            J[moved] = _transposed(jacobian(trial[moved]))
        if finished.any():
            live, r, w, J = live[keep], r[keep], w[keep], J[keep]
    return Minima(theta, cost, done, steps)


def _transposed(J: Array) -> Array:
    """(s, m, K) -> (s, K, m), rows side by side in memory: the order in which the products below are fast."""
    return np.ascontiguousarray(J.swapaxes(1, 2))


def _product(J: Array, rows: Array) -> Array:
    """(s, K): the sum over rows of J (s, K, m) times rows (s, m)."""
    return np.asarray((J @ rows[:, :, None])[:, :, 0])


@dataclass(frozen=True)
class _System:
    """The damped normal equations of s starts, in coordinates where the majorant's diagonal is one."""

    J: Array  # (s, K, m)
    weight: Array  # majorant W times the rows' weights, (s, m)
    matrix: Array  # (s, K, K)
    scale: Array  # (s, K), zero where a parameter is held

    @staticmethod
    def at(
        r: Array, J: Array, w: Array, theta: Array, low: Array, high: Array, free: Array, lam: Array, delta: float
    ) -> _System:
        size = np.abs(r)
        inside = size <= delta
        majorant = w * np.where(inside, 1.0, delta / np.maximum(size, delta))
        gradient = _product(J, majorant * r)
        held = ~free | ((theta <= low) & (gradient > 0.0)) | ((theta >= high) & (gradient < 0.0))
        weight = w * inside + lam[:, None] * majorant
        diagonal, curvature = np.zeros(theta.shape), np.zeros((*theta.shape, theta.shape[1]))
        some = max(1, AT_ONCE // theta.size)
        for i in (slice(first, first + some) for first in range(0, r.shape[1], some)):
            part = J[:, :, i]
            diagonal += _product(part * part, majorant[:, i])
            curvature += (part * weight[:, None, i]) @ part.transpose(0, 2, 1)
        scale = 1.0 / np.sqrt(diagonal + 1e-14 * diagonal.max(-1, keepdims=True) + 1e-200)
        scale[held] = 0.0
        matrix = curvature * scale[:, :, None] * scale[:, None, :]
        K = theta.shape[1]
        matrix[:, np.arange(K), np.arange(K)] += np.where(held, 1.0, lam[:, None])
        return _System(J, majorant, matrix, scale)

    def solve(self, r: Array) -> Array:
        """-A^-1 J' W r for r (s, m): the step (s, K) that undoes these residuals. W r = psi for the real ones."""
        pull = _product(self.J, self.weight * r)
        return np.asarray(-self.scale * np.linalg.solve(self.matrix, (self.scale * pull)[:, :, None])[:, :, 0])

    def bounded(self, bend: Array, v: Array) -> Array:
        """The correction `bend`, or none where it is not small beside the step v it corrects."""
        free = np.maximum(self.scale, 1e-300)
        small = np.linalg.norm(bend / free, axis=1) <= BEND_LIMIT * np.linalg.norm(v / free, axis=1)
        return np.where((small & np.all(np.isfinite(bend), axis=1))[:, None], bend, 0.0)
