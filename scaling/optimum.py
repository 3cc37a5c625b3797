"""The design of least predicted loss under budgets, by exact enumeration of a lattice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from depthlaw.scaling.answer import Infeasible, Optimum
from depthlaw.scaling.budgets import Budget, Limit, parse_budgets
from depthlaw.scaling.design import Design
from depthlaw.scaling.doubts import sought
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.found import RELAX, Found
from depthlaw.scaling.hardware import PRESETS, Hardware, Workload
from depthlaw.scaling.hardware import hardware as find_hardware
from depthlaw.scaling.laws import Array
from depthlaw.scaling.laws import law as find_law
from depthlaw.scaling.table import Table, candidates
from depthlaw.scaling.tables import Tables
from depthlaw.scaling.training import MFU, SEQ_LEN, Amount, OptimumError, amount
from depthlaw.scaling.units import counted

__all__ = ["Design", "Found", "Infeasible", "Optimum", "OptimumError", "Prepared", "optimise"]


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
        timed = any(self.tables.timed(x.budget, training, workload, on) for x in limits)
        return Found(self.law, table, met, feasible, table.best(feasible), richer, training, workload, on, timed)

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
    only = f" (only {sought(law)} are considered, the one size of this law)" if find_law(law.law).one_size else ""
    return Infeasible(
        f"no design of {table.L.size} meets {alone}{trained}; nearest by smallest worst use / limit: "
        f"{near.topology} with {counted(near.n_layers, 'layer')} of width {near.d_model}, {', '.join(used)}. Relax "
        f"{' or '.join(conflict)}, or allow other shapes{only}",
        conflict,
        near,
        {name: float(ratios[b, nearest]) for b, name in enumerate(names)},
        int(table.L.size),
    )
