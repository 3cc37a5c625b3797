"""The design of least predicted loss under budgets, by exact enumeration of a lattice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from threading import Event

import numpy as np

from depthlaw.scaling import answer as words
from depthlaw.scaling.answer import BudgetUse, Candidate, Infeasible, NearTies, Optimum
from depthlaw.scaling.budgets import Budget, Limit, parse_budgets
from depthlaw.scaling.design import Design
from depthlaw.scaling.doubts import doubts
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.hardware import PRESETS, Hardware, Workload
from depthlaw.scaling.hardware import hardware as find_hardware
from depthlaw.scaling.laws import Array
from depthlaw.scaling.pareto import front
from depthlaw.scaling.table import Table, Wins, candidates, count_wins
from depthlaw.scaling.tables import Tables
from depthlaw.scaling.training import FLOPS_BUDGET, MFU, SEQ_LEN, Amount, OptimumError, amount

__all__ = ["Design", "Found", "Infeasible", "Optimum", "OptimumError", "Prepared", "optimise"]

RELAX = 1.1  # a budget is priced by what 10 % more of it would bring
CONTENDERS = 20  # designs listed with the share of draws that they win


def optimise(
    law: FittedLaw,
    designs: Sequence[Design],
    budgets: str | Sequence[str | Limit] = (),
    *,
    tokens: float | None = None,
    tokens_per_param: float | None = None,
    workload: Workload | None = None,
    hardware: Hardware | str | None = None,
    seq_len: int = SEQ_LEN,
    mfu: float = MFU,
) -> Optimum:
    """Minimise the predicted loss over all shapes of all `designs` with every budget's use <= its limit.

    designs: one topology over a lattice each. Training: `tokens` is D for every design, `tokens_per_param` makes D that
    multiple of a design's TOTAL parameters; with neither, D is what a `train_flops` budget pays for, and without such
    a budget 20 tokens per parameter. seq_len: tokens of a training sequence, for FLOPs; mfu: share of its peak that a
    device reaches in training, for device_hours. Equal losses go to fewer parameters, then fewer layers, then the
    design named first. workload defaults to 4096 tokens of context at batch 1 in 2-byte numbers on one device, hardware
    (an object, a preset's name or a .json path) to the h100 preset; the answer repeats all of these.

    Raises Infeasible (no design meets the budgets), OptimumError (the question), BudgetError (a budget), LawError (a
    topology that the law was not fitted on), HardwareError (the hardware).
    """
    return (
        Prepared(law, designs)
        .find(
            budgets,
            tokens=tokens,
            tokens_per_param=tokens_per_param,
            workload=workload,
            hardware=hardware,
            seq_len=seq_len,
            mfu=mfu,
        )
        .optimum()
    )


class Prepared:
    """The designs of `optimise`, for many questions about one law: what these have in common is worked out once."""

    def __init__(self, law: FittedLaw, designs: Sequence[Design]) -> None:
        self.law, self.tables = law, Tables(law, designs)

    def find(
        self,
        budgets: str | Sequence[str | Limit] = (),
        *,
        tokens: float | None = None,
        tokens_per_param: float | None = None,
        workload: Workload | None = None,
        hardware: Hardware | str | None = None,
        seq_len: int = SEQ_LEN,
        mfu: float = MFU,
    ) -> Found:
        """The design of least loss; arguments and errors are those of `optimise`."""
        limits = parse_budgets(budgets)
        workload, on = workload or Workload(), _machine(hardware)
        training = amount(limits, tokens, tokens_per_param, seq_len, mfu)
        table = self.tables.table(limits, training, workload, on)
        met = table.met()
        feasible = np.all(met, axis=0)
        if not feasible.any():
            raise _infeasible(self.law, table, met, training)
        richer = None
        if training.flops is not None:  # more of this budget also trains every design for longer
            richer = self.tables.table(limits, training.relaxed(RELAX), workload, on)
        return Found(self.law, table, met, feasible, table.best(feasible), richer, training, workload, on)

    def span(
        self,
        budget: Budget,
        *,
        tokens: float | None = None,
        tokens_per_param: float | None = None,
        workload: Workload | None = None,
        hardware: Hardware | str | None = None,
        seq_len: int = SEQ_LEN,
        mfu: float = MFU,
    ) -> tuple[float, float] | None:
        """The least and the most that any design uses of a budget, of what is positive and finite; None of nothing.

        Arguments are those of `find`; without an amount of training D is 20 tokens per parameter.
        """
        training = amount((), tokens, tokens_per_param, seq_len, mfu)
        uses = self.tables.use(budget, training, workload or Workload(), _machine(hardware))
        uses = uses[(uses > 0.0) & (uses < np.inf)]
        return (float(uses.min()), float(uses.max())) if uses.size else None


def _machine(given: Hardware | str | None) -> Hardware:
    return given if isinstance(given, Hardware) else find_hardware(given) if given else PRESETS["h100"]


@dataclass(frozen=True)
class Found:
    """The best design and all that budgets rule out, before any bootstrap draw is looked at: the parts of an Optimum,
    each worked out when asked for. met (B, M), feasible (M,); best is a row of the table."""

    law: FittedLaw
    table: Table
    met: Array
    feasible: Array
    best: int
    richer: Table | None
    training: Amount
    workload: Workload
    hardware: Hardware

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

    def flags(self) -> tuple[str, ...]:
        table, best = self.table, self.best
        flags = doubts(self.law, table, best)
        if any(x.budget.unit == "seconds" for x in table.limits):
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
            interval=words.LINEARISED if law.draws is None else words.BOOTSTRAP,
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


def _infeasible(law: FittedLaw, table: Table, met: Array, training: Amount) -> Infeasible:
    limits = table.limits
    names = [x.name for x in limits]
    sets = (c for size in range(1, len(limits) + 1) for c in combinations(range(len(limits)), size))
    conflict = tuple(names[b] for b in next(c for c in sets if not np.all(met[list(c)], axis=0).any()))
    ratios = table.uses / np.array([x.limit for x in limits])[:, None]
    worst = np.where(np.isnan(ratios), np.inf, ratios).max(axis=0)
    nearest = table.best(worst == worst.min())
    near = candidates(law, table, [nearest])[0]
    used = [f"{x.name} {x.show(float(table.uses[b, nearest]))} of {x.show(x.limit)}" for b, x in enumerate(limits)]
    alone = f"{conflict[0]} alone" if len(conflict) == 1 else f"{' and '.join(conflict)} together"
    trained = (
        f" with {training.words}" if any(limits[names.index(name)].budget.of_training for name in conflict) else ""
    )
    return Infeasible(
        f"no design of {table.L.size} meets {alone}{trained}; nearest by smallest worst use / limit: "
        f"{near.topology} with {near.n_layers} layers of width {near.d_model}, {', '.join(used)}. Relax "
        f"{' or '.join(conflict)}, or allow other shapes",
        conflict,
        near,
        {name: float(ratios[b, nearest]) for b, name in enumerate(names)},
        int(table.L.size),
    )
