"""The design of least predicted loss under budgets, by exact enumeration of a lattice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np

from depthlaw.scaling.answer import BudgetUse, Candidate, Infeasible, NearTies, Optimum
from depthlaw.scaling.budgets import BudgetError, Limit, parse_budgets
from depthlaw.scaling.design import Design
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.hardware import PRESETS, Hardware, Workload
from depthlaw.scaling.hardware import hardware as find_hardware
from depthlaw.scaling.laws import Array, LawError

__all__ = ["Design", "Infeasible", "Optimum", "OptimumError", "optimise"]

TOKENS_PER_PARAM = 20.0
RELAX = 1.1  # a budget is priced by what 10 % more of it would bring
Z_95 = 1.96
EDGE = 0.05  # this close to an end of the fitted range of ln R, as a fraction of it, counts as its edge


class OptimumError(ValueError):
    """A question that cannot be asked: one line with the value and what is allowed."""


def optimise(
    law: FittedLaw,
    designs: Sequence[Design],
    budgets: Sequence[str | Limit] = (),
    *,
    tokens: float | None = None,
    tokens_per_param: float | None = None,
    workload: Workload | None = None,
    hardware: Hardware | str | None = None,
) -> Optimum:
    """Minimise the predicted loss over all shapes of all `designs` with every budget's use <= its limit.

    designs: one topology over a lattice each. Training: `tokens` is D for every design, `tokens_per_param` (20 unless
    given) makes D that multiple of a design's TOTAL parameters. Equal losses go to fewer parameters, then fewer layers,
    then the design named first. workload defaults to 4096 tokens of context at batch 1 in 2-byte numbers, hardware
    (an object, a preset's name or a .json path) to the h100 preset; the answer repeats both.

    Raises Infeasible (no design meets the budgets), OptimumError (the question), BudgetError (a budget), LawError (a
    topology that the law was not fitted on), HardwareError (the hardware).
    """
    limits = parse_budgets(budgets)
    workload = workload or Workload()
    machine = hardware if isinstance(hardware, Hardware) else find_hardware(hardware) if hardware else PRESETS["h100"]
    if tokens is not None and tokens_per_param is not None:
        raise OptimumError(f"tokens {tokens:g} and tokens_per_param {tokens_per_param:g} are both given: keep one")
    if tokens is None and tokens_per_param is None:
        tokens_per_param = TOKENS_PER_PARAM
    for name, value in (("tokens", tokens), ("tokens_per_param", tokens_per_param)):
        if value is not None and not 0.0 < value < float("inf"):
            raise OptimumError(f"{name} is {value}; it must be positive and finite")
    if not designs:
        raise OptimumError("no design to choose from: give at least one topology")

    table = _table(law, designs, limits, tokens, tokens_per_param, workload, machine)
    met = table.uses <= np.array([x.limit for x in limits])[:, None]  # (B, M)
    feasible = np.all(met, axis=0)
    if not feasible.any():
        raise _infeasible(law, table, limits, met)
    best = table.best(feasible)
    uses = []
    for b, x in enumerate(limits):
        others = np.all(np.delete(met, b, axis=0), axis=0)
        relaxed = others & (table.uses[b] <= RELAX * x.limit)
        price = float(np.exp(table.log_loss[relaxed].min()) - np.exp(table.log_loss[best]))
        binds = bool(table.log_loss[relaxed].min() < table.log_loss[best])
        better = table.uses[b, others & (table.log_loss < table.log_loss[best])]
        uses.append(
            BudgetUse(
                name=x.name,
                unit=x.budget.unit,
                text=x.text,
                use=float(table.uses[b, best]),
                limit=x.limit,
                binds=binds,
                price=price if binds else 0.0,
                next_limit=float(better.min()) if better.size else None,
            )
        )
    winners = [
        table.best(feasible & (table.design == t)) for t in range(len(designs)) if feasible[table.design == t].any()
    ]
    order = sorted(winners, key=lambda i: (table.log_loss[i], table.params[i], table.L[i], i))
    flags = _flags(law, table, best)
    if any(x.budget.unit == "seconds" for x in limits):
        where = (table.labels[table.design[best]], int(table.L[best]), int(table.d[best]))
        flags += machine.doubts(*where, workload)
    ties = np.flatnonzero(feasible & (table.log_loss <= table.log_loss[best] + law.log_rms))
    return Optimum(
        best=_candidate(law, table, best, limits),
        budgets=tuple(uses),
        per_topology=tuple(_candidate(law, table, i, limits) for i in order),
        near_ties=NearTies(
            count=int(ties.size),
            noise=law.log_rms,
            n_layers=(int(table.L[ties].min()), int(table.L[ties].max())),
            d_model=(int(table.d[ties].min()), int(table.d[ties].max())),
            topologies=tuple(dict.fromkeys(table.labels[t] for t in table.design[ties])),
        ),
        flags=tuple(flags),
        training=f"D = {tokens:.4g} tokens" if tokens else f"D = {tokens_per_param:g} tokens per parameter (total)",
        considered=int(feasible.size),
        feasible=int(feasible.sum()),
        workload=asdict(workload),
        hardware=asdict(machine),
        law={"law": law.law, "pooling": law.pooling, "status": law.status, "rows_hash": law.rows_hash},
    )


@dataclass(frozen=True)
class _Table:
    """All M designs, topology after topology: `design` numbers their topology, uses (B, M), the rest (M,)."""

    labels: tuple[str, ...]
    design: Array
    L: Array
    d: Array
    N: Array
    params: Array
    D: Array
    log_loss: Array
    uses: Array

    def best(self, among: Array) -> int:
        rows = np.flatnonzero(among)
        least = rows[self.log_loss[rows] == self.log_loss[rows].min()]
        return int(least[np.lexsort((least, self.L[least], self.params[least]))[0]])


def _table(
    law: FittedLaw,
    designs: Sequence[Design],
    limits: tuple[Limit, ...],
    tokens: float | None,
    tokens_per_param: float | None,
    workload: Workload,
    machine: Hardware,
) -> _Table:
    parts = []
    for t, design in enumerate(designs):
        if design.label not in law.topologies:
            raise LawError(
                f"the law was not fitted on topology {design.label!r}; it knows {', '.join(law.topologies)}: "
                "ask for these, or add runs of it and fit again"
            )
        counts = (design.n_layers, design.d_model, design.backbone_params, design.params)
        L, d, N, P = (np.atleast_1d(v) for v in np.broadcast_arrays(*counts))
        if not L.size:
            raise OptimumError(f"topology {design.label!r} has an empty lattice: widen its ranges of layers and widths")
        D = np.full(L.size, float(tokens)) if tokens is not None else float(tokens_per_param or 0.0) * P
        uses = np.empty((len(limits), L.size))
        for b, x in enumerate(limits):
            used = np.asarray(x.budget.use(design, workload, machine), dtype=np.float64)
            if used.shape not in ((), (1,), (L.size,)):
                raise BudgetError(
                    f"budget {x.name!r} returned shape {used.shape} for {L.size} designs of {design.label!r}; "
                    "its function must return one value for each design"
                )
            uses[b] = used
        parts.append((np.full(L.size, t), L, d, N, P, D, law.log_loss(design.label, N, D, L, d), uses))
    return _Table(
        tuple(x.label for x in designs), *(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))
    )


def _candidate(law: FittedLaw, table: _Table, i: int, limits: tuple[Limit, ...]) -> Candidate:
    topology = table.labels[table.design[i]]
    where = (table.N[i], table.D[i], table.L[i], table.d[i])
    sd = float(np.hypot(law.log_rms, law.log_sd(topology, *where)))
    y = float(table.log_loss[i])
    return Candidate(
        topology=topology,
        n_layers=int(table.L[i]),
        d_model=int(table.d[i]),
        ratio=float(table.d[i] / table.L[i]),
        backbone_params=int(table.N[i]),
        params=int(table.params[i]),
        tokens=float(table.D[i]),
        loss=float(np.exp(y)),
        lower=float(np.exp(y - Z_95 * sd)),
        upper=float(np.exp(y + Z_95 * sd)),
        uses={x.name: float(table.uses[b, i]) for b, x in enumerate(limits)},
    )


def _infeasible(law: FittedLaw, table: _Table, limits: tuple[Limit, ...], met: Array) -> Infeasible:
    names = [x.name for x in limits]
    sets = (c for size in range(1, len(limits) + 1) for c in combinations(range(len(limits)), size))
    conflict = tuple(names[b] for b in next(c for c in sets if not np.all(met[list(c)], axis=0).any()))
    ratios = table.uses / np.array([x.limit for x in limits])[:, None]
    worst = np.where(np.isnan(ratios), np.inf, ratios).max(axis=0)
    nearest = table.best(worst == worst.min())
    near = _candidate(law, table, nearest, limits)
    used = [f"{x.name} {x.show(float(table.uses[b, nearest]))} of {x.show(x.limit)}" for b, x in enumerate(limits)]
    alone = f"{conflict[0]} alone" if len(conflict) == 1 else f"{' and '.join(conflict)} together"
    return Infeasible(
        f"no design of {table.L.size} meets {alone}; nearest by smallest worst use / limit: {near.topology} with "
        f"{near.n_layers} layers of width {near.d_model}, {', '.join(used)}. Relax {' or '.join(conflict)}, or allow "
        "other shapes",
        conflict,
        near,
        {name: float(ratios[b, nearest]) for b, name in enumerate(names)},
        int(table.L.size),
    )


def _flags(law: FittedLaw, table: _Table, i: int) -> list[str]:
    """What to doubt about design i, in plain words."""
    t = table.design[i]
    topology, own = table.labels[t], table.design == t
    fitted = law.ranges[topology]
    flags = []
    for name, what, value in (("N", "N (backbone parameters)", table.N[i]), ("D", "D (tokens)", table.D[i])):
        flags += _outside(f"{what} {value:.3g}", float(value), *fitted[name], name)
    ratio, (low, high) = float(table.d[i] / table.L[i]), fitted["R"]
    outside = _outside(f"R = d/L {ratio:.3g}", ratio, low, high, "R")
    flags += outside
    margin = EDGE * np.log(high / low)
    if not outside and min(np.log(ratio / low), np.log(high / ratio)) <= margin:
        flags.append(f"R = d/L {ratio:.3g} is at the edge of the fitted range {low:.3g} to {high:.3g}")
    for name, values in (("n_layers", table.L), ("d_model", table.d)):
        least, most = values[own].min(), values[own].max()
        if values[i] in (least, most) and least < most:
            side = "smallest" if values[i] == least else "largest"
            if values[i] == 1:
                flags.append(f"{name} 1 is the smallest there is: under these budgets the law sees no gain in more")
            else:
                flags.append(f"{name} {values[i]} is the {side} that was tried: a wider range may hold a better design")
    if law.best_ratio(topology, float(table.N[i])) is None:
        flags.append(f"law {law.law!r} does not see shape: all designs of one N and D are the same to it")
    return flags + law.doubts_about(topology)


def _outside(shown: str, value: float, low: float, high: float, name: str) -> list[str]:
    if value > high:
        return [f"{shown} is {value / high:.3g}x above the largest {name} fitted ({high:.3g})"]
    if value < low:
        return [f"{shown} is {low / value:.3g}x below the smallest {name} fitted ({low:.3g})"]
    return []
