"""The least objective of a problem from many starts: where they are drawn, and how they come down together."""

from __future__ import annotations

import numpy as np

from depthlaw.scaling.laws import Array
from depthlaw.scaling.lm import Minima, minimise
from depthlaw.scaling.pooling import Problem

# Starts first come down at a delta that most residuals are within: the sum is then nearly one of squares, and has none
# of the kinks that it has at a delta far below the residuals. Four rounds of so many steps, merged after each.
ROUGH_DELTA, ROUGH_STEPS, ROUGH_TOL = 1e-2, (15, 15, 30, 200), 1e-3
BETWEEN = 1e-3  # a smaller delta is approached by way of this one
LEAST_DELTA = 1e-3
# Starts whose objectives are so near relative to each other, and whose unknowns are all so near relative to the range
# that starts are drawn from, are on the way to the same minimum.
NEAR_OBJECTIVE, NEAR = 0.1, 0.5


def latin_hypercube(problem: Problem, starts: int, seed: int) -> Array:
    """(starts, K) points in the start ranges: each unknown's range cut into `starts` equal parts, one point in each."""
    low, high = problem.ranges("start")
    rng = np.random.default_rng(seed)
    cells = np.stack([rng.permutation(starts) for _ in low], -1)
    return np.asarray(low + (high - low) * (cells + rng.random(cells.shape)) / starts)


def search(problem: Problem, begin: Array, delta: float | None) -> tuple[Minima, float]:
    """Where each of the starts `begin` (S, K) ends, and the delta that was fitted with: `clip` of a rough fit if None.

    A start that has come near another on the way goes on with it, and ends where that one ends.
    """
    low, high = problem.ranges("bounds")
    start_low, start_high = problem.ranges("start")
    theta, of = begin, np.arange(len(begin))
    for steps in ROUGH_STEPS:
        at = max(ROUGH_DELTA, delta or 0.0)
        rough = minimise(problem.residual, problem.jacobian, theta, low, high, at, max_steps=steps, tol=ROUGH_TOL)
        keep, group = _merge(rough, NEAR * (start_high - start_low))
        theta, of = rough.theta[keep], group[of]
    if delta is None:
        delta = max(LEAST_DELTA, clip(problem.residual(theta[:1])[0]))
    if delta < BETWEEN:
        theta = minimise(problem.residual, problem.jacobian, theta, low, high, BETWEEN, tol=ROUGH_TOL).theta
    ends = minimise(problem.residual, problem.jacobian, theta, low, high, delta)
    return Minima(ends.theta[of], ends.objective[of], ends.converged[of], ends.steps), delta


def clip(r: Array) -> float:
    """1.345 standard deviations of r (m,), as far as half of it tells: Huber is then 95 % as good as least squares."""
    return 1.345 * 1.4826 * float(np.median(np.abs(r - np.median(r))))


def _merge(ends: Minima, near: Array) -> tuple[Array, Array]:
    """(G,) the start of least objective of each group, the best first; (S,) the group of each start."""
    group = np.full(ends.objective.size, -1)
    keep: list[int] = []
    for i in np.argsort(ends.objective, kind="stable"):
        if group[i] < 0:
            same = (group < 0) & (ends.objective <= (1.0 + NEAR_OBJECTIVE) * ends.objective[i])
            same &= np.all(np.abs(ends.theta - ends.theta[i]) <= near, axis=1)
            group[same] = len(keep)
            keep.append(int(i))
    return np.array(keep), group
