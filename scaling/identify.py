"""What the data of a fit cannot answer, and which runs would."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from depthlaw.scaling.laws import Array, Centre
from depthlaw.scaling.laws.base import SAME_SIZE
from depthlaw.scaling.lm import minimise
from depthlaw.scaling.pooling import Layout, Problem
from depthlaw.scaling.rows import Rows

NEXT_SIZE = float(np.log(1.3))  # a gap in sorted N that starts another size
SHAPES, RATIO_SPAN = 4, float(np.log(4.0))
EDGE = 0.05  # this close to an end of the fitted range of ln(d / L), as a fraction of it, counts as its edge
CHI2_95 = 3.841  # 95 % point of chi-squared, one degree of freedom
CLEARLY = 10.0  # standard errors beyond which no profile is needed
WHOSE = "{topology}"

ADVICE = {
    "size": "run at least two more sizes, 4x apart",
    "tokens": "run other amounts of training at the same sizes, say D/N of 5, 20 and 80",
    "path": "run other ratios at the same sizes, say D/N of 5, 20 and 80",
    "shape": f"run at least {SHAPES} shapes (n_layers, d_model) a size whose d/L spans a factor 4 or more",
}
# Where the sweep varies what it should, but the noise hides the effect.
NOISE_ADVICE = {
    "size": "run sizes further apart, or more seeds",
    "tokens": "run amounts of training further apart, or more seeds",
    "path": "run ratios D/N further apart, or more seeds",
    "shape": "run shapes further from the best d/L, more of them, or more seeds",
    "": "run more cells or more seeds",
}


def causes(rows: Rows, layout: Layout) -> dict[str, str]:
    """Unknowns that no fit of these rows can know, by the design of the sweep alone: {name: why, and what to run}."""
    why = {t: dict(_lacks(rows, t)) for t in rows.topologies}
    found: dict[str, str] = {}
    for k, name in enumerate(layout.names):
        owners = [(t, p) for t, of in enumerate(layout.index) for p in np.flatnonzero(of == k)]
        needs = layout.parameters[owners[0][1]].needs
        # A shared unknown is known as soon as one topology's rows can tell it.
        lacking = [[n for n in _expand(needs) if n in why[rows.topologies[t]]] for t, _ in owners]
        if lacking and all(lacking):
            topology = rows.topologies[owners[0][0]]
            # What is said of a topology's own unknown does not name it, so that of several it is said once.
            whose = "its topology" if name.endswith(f"[{topology}]") else topology
            found[name] = "; ".join(why[topology][n] for n in lacking[0]).replace(WHOSE, whose)
    return found


def edges(rows: Rows, problem: Problem, theta: Array, centre: Centre) -> Iterator[tuple[str, str]]:
    """(unknown, or empty where no single one says it; in words) for each best d/L at or past the d/L that were run.

    Nothing is said where one d/L was run, for that is all edge. Taken at the middle size of the topologies that share
    the unknown. theta (K,).
    """
    layout = problem.layout
    by_ratio = next((k for k, p in enumerate(layout.parameters) if p.relative_to == "ratio"), None)
    seen: set[str] = set()
    for t, topology in enumerate(rows.topologies):
        unknown = "" if by_ratio is None else layout.names[layout.index[t, by_ratio]]
        if unknown in seen:
            continue
        shared = bool(unknown) and "[" not in unknown
        of = np.ones(rows.N.size, dtype=bool) if shared else rows.topology == topology
        size = float(np.exp(np.log(rows.N[of]).mean()))
        p, n = layout.natural(theta[None], t)[:, 0], np.array([np.log(size / centre.N0)])
        best = problem.law.best_ln_ratio(p, n, centre)
        if best is None:
            return
        ratio = rows.d[of] / rows.L[of]
        low, high, at = np.log(ratio.min()), np.log(ratio.max()), float(best[0])
        margin = EDGE * (high - low)
        if low + margin < at < high - margin or low == high:
            continue
        seen |= {unknown} - {""}
        past, side, advice = (
            (at < low, f"smallest fitted ({ratio.min():.3g})", "narrower and deeper")
            if at < low + margin
            else (at > high, f"largest fitted ({ratio.max():.3g})", "wider and shallower")
        )
        yield (
            unknown,
            f"the best d/L of {'all topologies' if shared else topology}, {np.exp(at):.3g} at N {size:.3g}, is "
            f"{'past' if past else 'at'} the {side}: run {advice} shapes",
        )


def path(rows: Rows) -> str:
    """How D follows N where it does so in every run, as text; empty where the sweep has several D/N."""
    n, y = np.log(rows.N), np.log(rows.D)
    if np.ptp(n) < SAME_SIZE:
        return ""
    power, _ = np.polyfit(n - n.mean(), y, 1)
    off = y - y.mean() - power * (n - n.mean())
    if np.ptp(off) >= SAME_SIZE:
        return ""
    factor, drift = np.exp(y.mean() - n.mean()), power - 1.0
    bend = f" (N/{np.exp(n.mean()):.3g})^{drift:.2f}" if abs(drift) >= 0.005 else ""
    return (
        f"every run has D = {factor:.3g} N{bend} within x{np.exp(np.ptp(off)):.2f}: "
        "the law holds along this path of N and D, and size and tokens cannot be told apart off it"
    )


def _expand(needs: tuple[str, ...]) -> tuple[str, ...]:
    # What drifts with size takes enough shapes at two sizes, not only both kinds of variation somewhere.
    return (*needs, "drift") if "shape" in needs and "size" in needs else needs


def _lacks(rows: Rows, topology: str) -> Iterator[tuple[str, str]]:
    """(kind of variation that the topology's runs lack, in words why and what to run, with WHOSE for its name)."""
    of = rows.topology == topology
    n, y, ratio = np.log(rows.N[of]), np.log(rows.D[of]), np.log(rows.d[of] / rows.L[of])
    if np.ptp(n) < SAME_SIZE:
        yield "size", f"all runs of {WHOSE} have about one size, N {_span(rows.N[of])}: {ADVICE['size']}"
    if np.ptp(y) < SAME_SIZE:
        yield "tokens", f"all runs of {WHOSE} have about one D, {_span(rows.D[of])}: {ADVICE['tokens']}"
    elif text := path(rows):
        yield "path", f"{text}; {ADVICE['path']}"
    order = np.argsort(n, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(n[order]) > NEXT_SIZE) + 1)
    shapes = [len(set(zip(rows.L[of][g].tolist(), rows.d[of][g].tolist(), strict=True))) for g in groups]
    good = [g for g, s in zip(groups, shapes, strict=True) if s >= SHAPES and np.ptp(ratio[g]) >= RATIO_SPAN]
    if not good:
        yield (
            "shape",
            f"{WHOSE} has at most {max(shapes)} shapes a size, d/L spanning a factor "
            f"{np.exp(max(np.ptp(ratio[g]) for g in groups)):.2g} at most: {ADVICE['shape']}",
        )
    elif len(good) < 2 and np.ptp(n[good[0]]) < SAME_SIZE:
        yield "drift", f"{WHOSE} has enough shapes at one size only: {ADVICE['shape']}, at two sizes or more"


def _span(v: Array) -> str:
    return f"{v.min():.3g} to {v.max():.3g}"


def profile(
    problem: Problem, theta: Array, cost: float, covariance: Array, scale2: float, delta: float, skip: set[str]
) -> dict[str, str]:
    """Unknowns whose profile likelihood is flat: {name: why, and what to run}.

    Each unknown is moved by its `known` distance both ways, all others are fitted again, and 2 (rise of the
    objective) / scale2 is compared with 3.84. One whose linearised standard error is already under a tenth of that
    distance is taken as known without a refit. theta (K,), covariance (K, K).
    """
    names, known = problem.layout.names, problem.known()
    error = np.sqrt(np.diag(covariance))
    suspects = [k for k in range(len(names)) if names[k] not in skip and error[k] * CLEARLY > known[k]]
    if not suspects:
        return {}
    low, high = problem.ranges("bounds")
    which = np.repeat(suspects, 4)
    start = np.repeat(theta[None], which.size, 0)
    at = np.arange(which.size)
    shift = known[which] * np.tile([1.0, 1.0, -1.0, -1.0], len(suspects))
    # The first of each pair moves the others along the valley, the second leaves them where they are.
    valley = covariance[which] / np.diag(covariance)[which][:, None] * shift[:, None]
    start += np.where((at % 2 == 0)[:, None], valley, 0.0)
    start[at, which] = theta[which] + shift
    free = np.ones_like(start, dtype=bool)
    free[at, which] = False
    ends = minimise(problem.residual, problem.jacobian, start, low, high, delta, free, max_steps=60)
    rise = 2.0 * (ends.objective.reshape(-1, 2, 2).min(-1).min(-1) - cost) / scale2
    found = {}
    for k, by in zip(suspects, rise, strict=True):
        if by < CHI2_95:
            p = problem.layout.parameters[int(np.argwhere(problem.layout.index == k)[0, 1])]
            far = f"by a factor {np.exp(known[k]):.2g}" if p.positive else f"by {known[k]:.2g}"
            need = p.needs[-1] if p.needs else ""
            found[names[k]] = (
                f"moving it {far} changes the fit by less than its noise (flat profile likelihood): "
                f"{NOISE_ADVICE[need]}"
            )
    return found


def spread(r: Array, delta: float, unknowns: int) -> tuple[float, float]:
    """(scale of the deviance, variance factor of the parameters) of a Huber fit with residuals r (m,).

    With psi = clip(r, +-delta) and share the fraction within delta: sum psi^2 / (m - K) / share, the same / share
    again (Huber 1981, chapter 7); for a large delta both are the residual variance. Floored at rounding noise.
    """
    psi2 = float(np.sum(np.clip(r, -delta, delta) ** 2)) / max(r.size - unknowns, 1)
    share = max(float(np.mean(np.abs(r) <= delta)), 1.0 / r.size)
    return max(psi2 / share, 1e-16), max(psi2 / share**2, 1e-16)
