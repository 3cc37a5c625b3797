"""The best design under budgets and what follows from it, each part when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from threading import Event

import numpy as np

from depthlaw.scaling import answer as words
from depthlaw.scaling.answer import BudgetUse, Candidate, NearTies, Optimum
from depthlaw.scaling.doubts import doubts
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.hardware import Hardware, Workload
from depthlaw.scaling.laws import Array
from depthlaw.scaling.pareto import front
from depthlaw.scaling.table import Table, Wins, beyond, candidates, count_wins
from depthlaw.scaling.training import FLOPS_BUDGET, Amount

RELAX = 1.1  # a budget is priced by what 10 % more of it would bring
CONTENDERS = 20  # designs listed with the share of draws that they win


@dataclass(frozen=True)
class Found:
    """The best design and all that budgets rule out, before any bootstrap draw is looked at: the parts of an Optimum,
    each worked out when asked for. met (B, M), feasible (M,); best is a row of the table. timed: whether a budget
    counts the time of a pass."""

    law: FittedLaw
    table: Table
    met: Array
    feasible: Array
    best: int
    richer: Table | None
    training: Amount
    workload: Workload
    hardware: Hardware
    timed: bool

    def uses(self) -> tuple[BudgetUse, ...]:
        return tuple(_use(self.table, self.met, b, self.best, self.richer) for b in range(len(self.table.limits)))

    def winners(self) -> list[int]:
        """Rows: the best design of each topology that has a feasible one, best first."""
        table = self.table
        own = [self.feasible & (table.design == t) for t in range(len(table.labels))]
        best = [table.best(among) for among in own if among.any()]
        return sorted(best, key=lambda i: (table.log_loss[i], table.params[i], table.L[i], i))

    def near_ties(self) -> NearTies:
        table, rows = self.table, np.flatnonzero(self.feasible)
        ties = rows[table.log_loss[rows] <= table.log_loss[self.best] + self.law.log_rms]
        return NearTies(
            count=int(ties.size),
            noise=self.law.log_rms,
            n_layers=(int(table.L[ties].min()), int(table.L[ties].max())),
            d_model=(int(table.d[ties].min()), int(table.d[ties].max())),
            topologies=tuple(dict.fromkeys(table.labels[t] for t in table.design[ties])),
        )

    def trade_offs(self) -> Array:
        """Rows on the front of loss, tpot and KV memory, best loss first."""
        table, rows = self.table, np.flatnonzero(self.feasible)
        return np.asarray(rows[front(np.stack([table.log_loss[rows], table.tpot[rows], table.kv[rows]], -1))])

    def beyond(self, rows: Array) -> Array:
        """(rows,): by what factor they lie past the runs; see `Candidate`."""
        return np.asarray(beyond(self.law, self.table, rows).max(axis=0))

    def flags(self) -> tuple[str, ...]:
        table, best = self.table, self.best
        flags = doubts(self.law, table, best)
        if self.timed:
            where = (table.labels[table.design[best]], int(table.L[best]), int(table.d[best]))
            flags += self.hardware.doubts(*where, self.workload)
        return tuple(flags)

    def wins(self, stop: Event | None = None) -> Wins | None:
        """What the law's draws say, and whether it may be given up; see `count_wins`."""
        return count_wins(self.law, self.table, self.feasible, stop)

    def candidates(self, rows: Sequence[int] | Array, wins: Wins | None = None) -> tuple[Candidate, ...]:
        return tuple(candidates(self.law, self.table, rows, wins))

    def contenders(self, wins: Wins | None) -> tuple[Candidate, ...]:
        return self.candidates(_contenders(self.table, wins), wins)

    def optimum(self) -> Optimum:
        law, wins = self.law, self.wins()
        return Optimum(
            best=self.candidates([self.best], wins)[0],
            budgets=self.uses(),
            per_topology=self.candidates(self.winners(), wins),
            near_ties=self.near_ties(),
            contenders=self.contenders(wins),
            topology_shares={} if wins is None else wins.by_topology(self.table),
            draws=0 if wins is None else wins.draws,
            pareto=self.candidates(self.trade_offs(), wins),
            flags=self.flags(),
            training=self.training.words,
            considered=int(self.feasible.size),
            feasible=int(self.feasible.sum()),
            workload=asdict(self.workload),
            hardware=asdict(self.hardware),
            law={"law": law.law, "pooling": law.pooling, "status": law.status, "rows_hash": law.rows_hash},
            interval=words.interval_words(law),
            mfu=self.training.mfu,
            seq_len=self.training.seq_len,
        )


def _contenders(table: Table, wins: Wins | None) -> Array:
    """The designs that win most draws, most first; of equal ones that of less predicted loss."""
    if wins is None:
        return np.array([], dtype=np.int64)
    some = np.flatnonzero(wins.share)
    return some[np.lexsort((table.log_loss[some], -wins.share[some]))][:CONTENDERS]


def _use(table: Table, met: Array, b: int, best: int, richer: Table | None) -> BudgetUse:
    """What budget b leaves at the best design and what 10 % more of it would bring."""
    x, others = table.limits[b], np.all(np.delete(met, b, axis=0), axis=0)
    follows = richer is not None and x.name == FLOPS_BUDGET
    if richer is not None and follows:
        # The other budgets are judged at the longer training, this one at its raised limit.
        more = np.all(np.delete(richer.met(), b, axis=0), axis=0) & (richer.uses[b] <= RELAX * x.limit)
        reached = richer.log_loss[more].min() if more.any() else np.inf
    else:
        reached = table.log_loss[others & (table.uses[b] <= RELAX * x.limit)].min()
    binds = bool(reached < table.log_loss[best])
    better = table.uses[b, others & (table.log_loss < table.log_loss[best])]
    return BudgetUse(
        name=x.name,
        unit=x.budget.unit,
        describe=x.budget.describe,
        text=x.text,
        use=float(table.uses[b, best]),
        limit=x.limit,
        binds=binds,
        price=float(np.exp(reached) - np.exp(table.log_loss[best])) if binds else 0.0,
        next_limit=float(better.min()) if better.size and not follows else None,
    )
