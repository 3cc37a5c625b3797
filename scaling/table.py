"""Every design of a question with its predicted loss and what it uses, and what the law's draws say of the least."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event

import numpy as np

from depthlaw.scaling.answer import Candidate
from depthlaw.scaling.budgets import Limit
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import Array

DESIGNS_AT_ONCE = 8192  # times 1000 draws in single precision: 33 MB
MOST_LOSSES = 1_000_000_000  # designs x draws, some ten seconds; beyond it only every k-th draw counts
MOST_THREADS = 4  # each holds DESIGNS_AT_ONCE x draws


@dataclass(frozen=True)
class Table:
    """All M designs, topology after topology: `design` numbers their topology, uses (B, M), the rest (M,).

    N is the count that the law takes, backbone parameters or all. tpot in seconds and kv in bytes are there whether or
    not they are budgets.
    """

    labels: tuple[str, ...]
    limits: tuple[Limit, ...]
    design: Array
    L: Array
    d: Array
    N: Array
    backbone: Array
    params: Array
    D: Array
    log_loss: Array
    tpot: Array
    kv: Array
    uses: Array

    def met(self) -> Array:
        """(B, M): which budgets each design meets."""
        return np.asarray(self.uses <= np.array([x.limit for x in self.limits])[:, None])

    def best(self, among: Array) -> int:
        """The design of least loss; of equal ones that with fewer parameters, then fewer layers, then the first."""
        rows = np.flatnonzero(among)
        least = rows[self.log_loss[rows] == self.log_loss[rows].min()]
        return int(least[np.lexsort((least, self.L[least], self.params[least]))[0]])

    def by_topology(self, rows: Array) -> list[tuple[str, Array]]:
        """(label, those of the rows that are its designs), for each topology that has any."""
        split = [(label, rows[self.design[rows] == t]) for t, label in enumerate(self.labels)]
        return [(label, own) for label, own in split if own.size]

    def where(self, rows: Array) -> tuple[Array, Array, Array, Array]:
        """(N, D, L, d) of designs, as the law takes them."""
        return self.N[rows], self.D[rows], self.L[rows], self.d[rows]


@dataclass(frozen=True)
class Wins:
    """share (M,): in what share of the `draws` bootstrap draws each design has the least loss of all that are feasible.

    Losses are compared in single precision: two designs within about 1e-6 of each other may swap a win.
    """

    share: Array
    draws: int

    def by_topology(self, table: Table) -> dict[str, float]:
        """The same summed over each topology's designs, largest first."""
        sums = dict.fromkeys(table.labels, 0.0)
        for label, own in table.by_topology(np.arange(table.L.size)):
            sums[label] += float(self.share[own].sum())
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def beyond(law: FittedLaw, table: Table, rows: Array) -> Array:
    """(2, rows): by what factor the N and the d/L of a design lie past those fitted for its topology, 1 within them."""
    factors = np.ones((2, rows.size))
    for label, own in table.by_topology(rows):
        at = np.isin(rows, own)
        N, _, L, d = table.where(rows[at])
        for k, (name, value) in enumerate((("N", N), ("R", d / L))):
            low, high = law.ranges[label][name]
            factors[k, at] = np.maximum(1.0, np.maximum(low / value, value / high))
    return factors


def candidates(law: FittedLaw, table: Table, rows: Sequence[int] | Array, wins: Wins | None = None) -> list[Candidate]:
    """The designs in these rows of the table, in the same order, each with its prediction interval."""
    rows = np.asarray(rows, dtype=np.int64)
    lower, upper = np.empty(rows.size), np.empty(rows.size)
    for label, own in table.by_topology(rows):
        at = np.isin(rows, own)
        lower[at], upper[at] = law.interval(label, *table.where(rows[at]))
    past = beyond(law, table, rows)
    return [
        Candidate(
            topology=table.labels[table.design[i]],
            n_layers=int(table.L[i]),
            d_model=int(table.d[i]),
            ratio=float(table.d[i] / table.L[i]),
            backbone_params=int(table.backbone[i]),
            params=int(table.params[i]),
            tokens=float(table.D[i]),
            loss=float(np.exp(table.log_loss[i])),
            lower=float(lower[k]),
            upper=float(upper[k]),
            tpot_s=float(table.tpot[i]),
            kv_bytes=float(table.kv[i]),
            uses={x.name: float(table.uses[b, i]) for b, x in enumerate(table.limits)},
            share=None if wins is None else float(wins.share[i]),
            size_beyond=float(past[0, k]),
            ratio_beyond=float(past[1, k]),
        )
        for k, i in enumerate(rows.tolist())
    ]


def thinned(law: FittedLaw, every: int) -> FittedLaw:
    """The law with every k-th of its draws."""
    if law.draws is None or every == 1:
        return law
    some = law.draws[::every].astype("<f8")
    return replace(law, draws_base64=base64.b64encode(some.tobytes()).decode("ascii"))


class Stopped(Exception):  # noqa: N818  what the caller wished
    """Nobody waits for the answer any more."""


def count_wins(law: FittedLaw, table: Table, feasible: Array, stop: Event | None = None) -> Wins | None:
    """Who has the least loss under each draw of the law's parameters; None if the law carries no draws.

    Every feasible design is evaluated under every draw, so no design that could win is missed. Raises Stopped soon
    after `stop` is set, by whoever asked from another thread.
    """
    if law.draws is None:
        return None
    from concurrent.futures import ThreadPoolExecutor

    rows = np.flatnonzero(feasible)
    every = max(1, -(-rows.size * len(law.draws) // MOST_LOSSES))
    law = thinned(law, every)

    def least(label: str, some: Array) -> tuple[Array, Array]:
        if stop is not None and stop.is_set():
            raise Stopped
        losses = law.log_loss_draws(label, *table.where(some))
        first = losses.argmin(axis=1)
        return losses[np.arange(first.size), first], some[first]

    split = [
        (label, own[i : i + DESIGNS_AT_ONCE])
        for label, own in table.by_topology(rows)
        for i in range(0, own.size, DESIGNS_AT_ONCE)
    ]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS)) as threads:
        losses, designs = (np.stack(x) for x in zip(*threads.map(least, *zip(*split, strict=True)), strict=True))
    winner = designs[losses.argmin(axis=0), np.arange(losses.shape[1])]
    return Wins(np.bincount(winner, minlength=table.L.size) / winner.size, winner.size)
