"""The best learning rate of one cell: the vertex of a parabola in ln lr where the rates tried allow one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from depthlaw.scaling.laws import Array, LawError

# Points within a factor 2 of the best rate are fitted, and always its two neighbours. With rates sqrt(2) apart and a
# noise of 0.4 % of the loss, ln lr was off by 0.14 to 0.16 with these and by 0.19 to 0.23 with three points (simulated
# bowls whose right side rises 1 to 2.6 times as fast as the left, as measured ones do). Further out it is no parabola.
REACH = float(np.log(2.0)) * (1.0 + 1e-9)
CLEAR = 2.0  # standard errors that the curvature must be above 0
Found = Literal["vertex", "flat", "bounded", "edge", "few_rates", "none"]


@dataclass(frozen=True)
class BestRate:
    """found says how the best rate is known; the numbers are NaN unless it is `vertex`.

    * vertex: the least of a parabola in ln lr. lr; ln_lr_sd, its standard error; loss there, in nats; loss_sd.
      Errors are NaN where nothing tells the noise: one seed a rate and three rates.
    * flat: losses around the best do not make a bowl that stands out of their noise.
    * bounded: beside the best lies a rate that diverged or was pruned. It bounds the best and has no loss to fit.
    * edge: the best is the smallest or the largest rate tried. few_rates: fewer than three were tried.
    * none: no rate finished.
    """

    found: Found
    lr: float = float("nan")
    ln_lr_sd: float = float("nan")
    loss: float = float("nan")
    loss_sd: float = float("nan")


def best_rate(tried: Mapping[float, Sequence[float]]) -> BestRate:
    """The best of the rates `tried`, {lr: final losses in nats of the seeds that finished}.

    A rate at which training diverged or was pruned has no losses (one that is not finite counts as none). The rate of
    least mean loss is the best tried, the smaller at a tie. The parabola c0 + c1 x + c2 x^2, x = ln(lr / best tried),
    goes by least squares through the mean losses within REACH, each weighted with its number of seeds; the vertex is
    x* = -c1 / (2 c2). With C the covariance of c, errors are propagated linearly: g'Cg with g = (0, -1, -2 x*) / (2 c2)
    for x*, and with (1, x*, x*^2) for the loss. The noise of one loss is that between seeds of these rates, pooled, and
    else that of the residuals of more than three points, which holds what is no parabola too. Seeds that are the same
    at every rate share part of it, so that the error of x* is, if anything, overstated.

    The loss at the vertex is not what a law should be fitted on. Rates a factor 2 apart, noise 0.006 nats: on bowls
    that rise as fast on both sides it is off by 0.006 nats and the least measured loss by 0.007, but where the right
    side rises 2.6 times as fast, as some measured ones do, by 0.013 and 0.009; rates a factor 4 apart, 0.27 and 0.03.
    Its ln lr is off by 0.14 at most where that of the best rate tried is off by 0.23.

    Raises LawError for a rate that is not positive.
    """
    if bad := [lr for lr in tried if not lr > 0.0]:
        raise LawError(f"a learning rate is {bad[0]}; it must be positive")
    losses = {lr: v[np.isfinite(v)] for lr in sorted(tried) for v in [np.asarray(tried[lr], dtype=np.float64)]}
    rates = list(losses)
    finished = [lr for lr in rates if losses[lr].size]
    if not finished:
        return BestRate("none")
    best = min(finished, key=lambda lr: (float(losses[lr].mean()), lr))
    at = rates.index(best)
    if len(rates) < 3:
        return BestRate("few_rates")
    if at in (0, len(rates) - 1):
        return BestRate("edge")
    if not losses[rates[at - 1]].size or not losses[rates[at + 1]].size:
        return BestRate("bounded")
    near = [k for k, lr in enumerate(rates) if abs(k - at) <= 1 or abs(np.log(lr / best)) <= REACH]
    used = [rates[k] for k in near if losses[rates[k]].size]
    return _vertex(best, np.log(np.array(used) / best), [losses[lr] for lr in used])


def _vertex(best: float, x: Array, losses: list[Array]) -> BestRate:
    """x (m,): ln(lr / best) of each rate; the losses of its seeds."""
    seeds = np.array([v.size for v in losses], dtype=np.float64)
    y = np.array([v.mean() for v in losses])
    powers = np.stack([np.ones_like(x), x, x * x], axis=1)
    inverse = np.linalg.inv(powers.T @ (seeds[:, None] * powers))
    c = inverse @ powers.T @ (seeds * y)
    variance = _noise_variance(losses, y - powers @ c, seeds)
    at = -c[1] / (2.0 * c[2]) if c[2] > 0.0 else np.inf
    if not x[0] < at < x[-1] or c[2] < CLEAR * np.sqrt(np.nan_to_num(variance) * inverse[2, 2]):
        return BestRate("flat")
    of_at = np.array([0.0, -1.0, -2.0 * at]) / (2.0 * c[2])
    of_loss = np.array([1.0, at, at * at])
    at_sd, loss_sd = (float(np.sqrt(variance * g @ inverse @ g)) for g in (of_at, of_loss))
    return BestRate("vertex", float(best * np.exp(at)), at_sd, float(c[0] + 0.5 * c[1] * at), loss_sd)


def _noise_variance(losses: list[Array], residual: Array, seeds: Array) -> float:
    """Of one loss, nats^2; NaN where neither several seeds nor more than three rates tell it."""
    freedom = float(np.sum(seeds - 1.0))
    if freedom:
        return float(sum(np.sum((v - v.mean()) ** 2) for v in losses)) / freedom
    if residual.size > 3:
        return float(np.sum(seeds * residual**2)) / (residual.size - 3)
    return float("nan")
