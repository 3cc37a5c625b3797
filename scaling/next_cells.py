"""Which cells to run next: those that make the best shape at a target size most certain for a compute budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import Array, LawError

# Gain is divided by FLOPs to each of these powers in turn and the best design kept: by 1 a budget goes to many small
# runs, by 0 to the few that tell most whatever they cost.
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_CELLS = 40
SHAPES_A_RUNG = 4
PASSES = 5  # of exchanges; two or three are usual
STEP = 1e-5  # of the numerical derivative of ln R_opt; it is linear, or nearly so, in the unknowns


class NextCellsError(ValueError):
    """A next sweep that cannot be designed: one line with the value and what is allowed."""


@dataclass(frozen=True)
class Cell:
    """One run that could be made. N: the law's count of its parameters; ratio: of the sweep, tokens for each backbone
    parameter of the shape's Pre-LN model; tokens: D; flops: of its training."""

    topology: str
    n_layers: int
    d_model: int
    N: float
    ratio: float
    tokens: float
    flops: float


@dataclass(frozen=True)
class NextCells:
    """The cells chosen, in the order in which they were, and what they are expected to bring.

    sd_before, sd_after: standard deviation of ln R_opt, the best d_model / n_layers, at `target` parameters, by
    topology; linearised about the law, whose form and scatter are taken as true at every size. sd_ladder, ladder_flops:
    the same for the plain alternative, see `ladder`, and what it takes; None and 0 where compute pays for no rung.
    """

    cells: tuple[Cell, ...]
    target: float
    compute: float
    flops: float
    sd_before: dict[str, float]
    sd_after: dict[str, float]
    sd_ladder: dict[str, float] | None
    ladder_flops: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def choose_cells(
    law: FittedLaw, candidates: Sequence[Cell], compute: float, target: float, most: int = MOST_CELLS
) -> NextCells:
    """At most `most` of the candidates, each once and together at most `compute` FLOPs, for the least mean variance of
    ln R_opt at N = target over the topologies that the candidates have.

    A c-optimal design, chosen greedily: with C the covariance of the unknowns (K, K), g the derivative of ln R_opt of a
    topology and j that of a run's ln loss with respect to them, and s^2 the variance of a run about the law, one more
    run changes C to C - C j j' C / (s^2 + j' C j) and the variance g' C g by -(g' C j)^2 / (s^2 + j' C j) (Fedorov
    1972). The run of largest gain, divided by a power of its FLOPs, is taken until none is left that can be paid for;
    then each is exchanged for a better one as long as there is any.

    Raises NextCellsError if the law has no best shape or no candidate can be paid for.
    """
    labels = tuple(dict.fromkeys(c.topology for c in candidates))
    cheapest = min((c.flops for c in candidates), default=np.inf)
    if cheapest > compute:
        raise NextCellsError(
            f"compute {compute:.3g} FLOPs pays for no run: the cheapest of {len(candidates)} candidates takes "
            f"{cheapest:.3g}"
        )
    g, j = _goals(law, labels, target), _sensitivities(law, candidates)
    C, flops = np.array(law.covariance), np.array([c.flops for c in candidates])
    problem = _Problem(j, g, flops, law.log_rms**2, compute, most)
    rows, end = min((problem.greedy(C, power) for power in POWERS), key=lambda found: np.sum(_sd(found[1], g) ** 2))
    rows, end = problem.exchanged(rows, end)
    plain = ladder(candidates, compute)
    return NextCells(
        cells=tuple(candidates[i] for i in rows),
        target=target,
        compute=compute,
        flops=float(flops[rows].sum()),
        sd_before=_named(labels, _sd(C, g)),
        sd_after=_named(labels, _sd(end, g)),
        sd_ladder=expected_sd(law, plain, labels, target) if plain else None,
        ladder_flops=sum(c.flops for c in plain),
    )


def expected_sd(law: FittedLaw, cells: Sequence[Cell], labels: Sequence[str], target: float) -> dict[str, float]:
    """Standard deviation of ln R_opt at N = target after these further runs, by topology: information adds,
    C_after^-1 = C^-1 + sum j j' / s^2."""
    j = _sensitivities(law, cells)
    after = np.linalg.inv(np.linalg.inv(np.array(law.covariance)) + j.T @ j / law.log_rms**2)
    return _named(labels, _sd(after, _goals(law, labels, target)))


def ladder(candidates: Sequence[Cell], compute: float) -> list[Cell]:
    """The plain alternative: D nearest to 20 N, sizes 4x apart from the largest that can be paid for down, and at each
    for every topology four shapes spread evenly over its candidates, as many whole rungs as compute allows."""
    ratio = min({c.ratio for c in candidates}, key=lambda r: abs(np.log(r / 20.0)), default=0.0)
    rungs: dict[int, dict[str, list[Cell]]] = {}
    for c in sorted(candidates, key=lambda c: c.d_model / c.n_layers):
        if c.ratio == ratio:
            rungs.setdefault(round(np.log2(c.tokens / c.ratio)), {}).setdefault(c.topology, []).append(c)
    chosen: list[Cell] = []
    last = np.inf
    for size in sorted(rungs, reverse=True):
        rung = [of[k] for of in rungs[size].values() for k in _even(len(of), SHAPES_A_RUNG)]
        if size <= last - 2 and sum(c.flops for c in (*chosen, *rung)) <= compute:
            chosen, last = chosen + rung, size
    return chosen


def _even(count: int, wanted: int) -> list[int]:
    """At most `wanted` of `count` positions, evenly from the first to the last."""
    return sorted({round(k * (count - 1) / (wanted - 1)) for k in range(wanted)})


@dataclass(frozen=True)
class _Problem:
    """Sensitivities of the candidates j (M, K), goals g (T, K), FLOPs (M,), variance of a run, and the two limits."""

    j: Array
    g: Array
    flops: Array
    noise: float
    compute: float
    most: int

    def greedy(self, C: Array, power: float) -> tuple[list[int], Array]:
        """(rows of the candidates taken, covariance after them)."""
        rows: list[int] = []
        while len(rows) < self.most:
            i = self.best(C, rows, power)
            if i is None:
                break
            rows.append(i)
            C = self.moved(C, i, 1.0)
        return rows, C

    def exchanged(self, rows: list[int], C: Array) -> tuple[list[int], Array]:
        """Each row in turn replaced by the affordable candidate of largest gain, itself included, until none is."""
        for _ in range(PASSES):
            before = list(rows)
            for old in before:
                rest = [i for i in rows if i != old]
                without = self.moved(C, old, -1.0)
                new = self.best(without, rest, 0.0)
                if new is not None and new != old:
                    rows, C = [*rest, new], self.moved(without, new, 1.0)
            if rows == before:
                break
        return rows, C

    def best(self, C: Array, taken: list[int], power: float) -> int | None:
        """The candidate of largest gain / FLOPs^power that is not taken and can still be paid for."""
        free = self.flops <= self.compute - self.flops[taken].sum()
        free[taken] = False
        rows = np.flatnonzero(free)
        if not rows.size:
            return None
        v = self.j[rows] @ C
        spread = self.noise + np.einsum("mk,mk->m", v, self.j[rows])
        gain = np.mean((v @ self.g.T) ** 2, axis=1) / spread
        return int(rows[np.argmax(gain / self.flops[rows] ** power)])

    def moved(self, C: Array, i: int, sign: float) -> Array:
        """The covariance with run i added (sign 1) or taken away again (-1)."""
        v = C @ self.j[i]
        return np.asarray(C - np.outer(v, v) / (sign * self.noise + v @ self.j[i]))


def _goals(law: FittedLaw, labels: Sequence[str], target: float) -> Array:
    """(T, K): derivative of ln R_opt at N = target with respect to the unknowns, by central differences."""
    theta, g = np.array(law.theta), np.empty((len(labels), len(law.theta)))
    for t, label in enumerate(labels):
        if law.best_ratio(label, target) is None:
            raise NextCellsError(
                f"law {law.law!r} has no best shape to make certain: fit law shape, then design for it"
            )
        for k in range(theta.size):
            ends = []
            for step in (STEP, -STEP):
                moved = replace(law, theta=tuple((theta + step * (np.arange(theta.size) == k)).tolist()))
                ends.append(np.log(np.asarray(moved.best_ratio(label, target), float)))
            g[t, k] = (ends[0] - ends[1]) / (2.0 * STEP)
    return g


def _sensitivities(law: FittedLaw, cells: Sequence[Cell]) -> Array:
    """(M, K): derivative of each run's ln loss."""
    j = np.empty((len(cells), len(law.theta)))
    topology = np.array([c.topology for c in cells])
    N, D, L, d = np.array([(c.N, c.tokens, c.n_layers, c.d_model) for c in cells], dtype=float).reshape(-1, 4).T
    for label in law.topologies:
        own = topology == label
        j[own] = law.sensitivity(label, N[own], D[own], L[own], d[own])
    if unknown := set(topology.tolist()) - set(law.topologies):
        raise LawError(f"the law was not fitted on {', '.join(sorted(unknown))}; it knows {', '.join(law.topologies)}")
    return j


def _sd(C: Array, g: Array) -> Array:
    return np.asarray(np.sqrt(np.einsum("tk,kl,tl->t", g, C, g)))


def _named(labels: Sequence[str], values: Array) -> dict[str, float]:
    return dict(zip(labels, values.tolist(), strict=True))
