"""The best (L, d) of each topology as one budget's limit changes: what the optimum rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.platform.query import designs_of
from depthlaw.scaling.budgets import Limit, find_budget, parse_budgets
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.hardware import Hardware, Workload
from depthlaw.scaling.hardware import hardware as find_hardware
from depthlaw.scaling.table import Table, thinned
from depthlaw.scaling.tables import Tables
from depthlaw.scaling.training import FLOPS_BUDGET, MFU, SEQ_LEN, amount

if TYPE_CHECKING:
    import pandas as pd

ALWAYS = ("kv_bytes", "tpot")  # swept beside the budgets of the question, and the size
LIMITS = 16  # of each budget
NARROW = 1.1  # cells that use less than this factor apart of a budget say nothing of its change
DRAWS = 200  # of the law's, for the band
MOST_LOSSES = 20_000_000  # designs x draws of one band: 80 MB


def sweep_budgets(
    law: FittedLaw, budgets: Sequence[str], cells: pd.DataFrame, question: Mapping[str, Any]
) -> tuple[pd.DataFrame | None, str]:
    """(frame or None, what was not swept and why).

    One row for each budget, limit and topology that has a feasible design.

    Columns budget, unit, limit, asked (the limit of the question, NaN where it has none), topology, n_layers, d_model,
    loss, N, and L_low, L_high, d_low, d_high: 95 % of the optima under the law's draws, NaN without draws. Limits go in
    equal factors from the least that a cell trained here uses to the most, or to the limit of the question if that is
    more, but not beyond the designs that the law holds for; the question's other budgets hold. A train_flops budget
    from which D follows is not swept.
    """
    import pandas as pd

    asked = parse_budgets(budgets)
    names = list(dict.fromkeys([law.n_is, *(x.name for x in asked), *ALWAYS]))
    limits = [
        *asked,
        *(Limit(find_budget(name), np.inf, name) for name in names if name not in {x.name for x in asked}),
    ]
    training = amount(
        asked,
        question.get("tokens"),
        question.get("tokens_per_param"),
        question.get("seq_len") or int(law.context.get("seq_len", SEQ_LEN)),
        question.get("mfu") or MFU,
    )
    machine = question.get("hardware") or "h100"
    designs, _ = designs_of(law, *(question.get(k) for k in ("topologies", "layers", "rule", "widest", "vocab_size")))
    table = Tables(law, designs).table(
        tuple(limits),
        training,
        question.get("workload") or Workload(),
        machine if isinstance(machine, Hardware) else find_hardware(machine),
    )
    trained = _trained(table, cells)
    if not trained.size:
        return None, "no cell trained here is a design of the shape rule, so there is no range to sweep"
    parts, narrow = [], []
    for b, x in enumerate(table.limits):
        if x.name == FLOPS_BUDGET and training.flops is not None:
            continue
        uses = table.uses[b, trained]
        asked_for = min(x.limit, float(table.uses[b].max())) if np.isfinite(x.limit) else 0.0
        low, high = float(uses.min()), max(float(uses.max()), asked_for)
        if not 0.0 < low * NARROW < high:
            narrow.append(x.name)
            continue
        frame = _one(law, table, b, np.geomspace(low, high, LIMITS))
        known = x.limit if np.isfinite(x.limit) else np.nan
        parts.append(frame.assign(budget=x.name, unit=x.budget.unit, asked=known))
    if not parts:
        return None, "all cells trained here use the same of every budget, so there is no range to sweep"
    words = f"Of {', '.join(narrow)} the runs use about the same, so there is no range to sweep" if narrow else ""
    return pd.concat(parts, ignore_index=True), words


def _trained(table: Table, cells: pd.DataFrame) -> np.ndarray:
    """Rows of the table that were trained."""
    keys = set(zip(cells["topology"], cells["n_layers"], cells["d_model"], strict=True))
    found = zip((table.labels[t] for t in table.design), table.L.tolist(), table.d.tolist(), strict=True)
    return np.flatnonzero(np.fromiter((key in keys for key in found), bool, table.L.size))


def _one(law: FittedLaw, table: Table, b: int, limits: np.ndarray) -> pd.DataFrame:
    import pandas as pd

    others = np.all(np.delete(table.met(), b, axis=0), axis=0) & (table.uses[b] <= limits[-1])
    rows = []
    for label, own in table.by_topology(np.flatnonzero(others)):
        losses = _draws(law, table, label, own)
        for limit in limits:
            fits = table.uses[b, own] <= limit * (1.0 + 1e-9)
            if not fits.any():
                continue
            among = np.zeros(table.L.size, dtype=bool)
            among[own[fits]] = True
            i = table.best(among)
            row = {"limit": limit, "topology": label, "n_layers": int(table.L[i]), "d_model": int(table.d[i])}
            row |= {"loss": float(np.exp(table.log_loss[i])), "N": float(table.N[i])}
            ends = [np.nan] * 4
            if losses is not None:
                best = own[fits][losses[:, fits].argmin(axis=1)]
                ends = [*_ends(table.L[best]), *_ends(table.d[best])]
            rows.append(row | dict(zip(("L_low", "L_high", "d_low", "d_high"), ends, strict=True)))
    return pd.DataFrame(rows)


def _ends(values: np.ndarray) -> list[float]:
    return [float(v) for v in np.quantile(values, [0.025, 0.975], method="nearest")]


def _draws(law: FittedLaw, table: Table, label: str, own: np.ndarray) -> np.ndarray | None:
    """(b, m): ln loss of these designs under some of the law's draws, evenly taken."""
    if law.draws is None:
        return None
    few = max(1, min(DRAWS, MOST_LOSSES // max(1, own.size)))
    return thinned(law, -(-len(law.draws) // few)).log_loss_draws(label, *table.where(own))
