"""What a report is drawn from: trials and cells or a table's rows, the law, what it answers, what lacks in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from depthlaw.platform.bundled import Bundled
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.store_cells import cells as cells_of
from depthlaw.scaling.answer import Optimum
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import FitRefusedError, LawError
from depthlaw.scaling.rolling import groups
from depthlaw.scaling.rows import Rows, read_rows
from depthlaw.scaling.units import format_quantity

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Material:
    """cells: as `Store.cells`, with `size`, the number of the group of sizes that each is in, and `N_size`, the
    geometric mean of its N as `counted`; trials: those of the cells, with the same two columns.

    A table has no trials, and the rows of a fit for cells, with topology, N by its name, tokens, n_layers, d_model,
    val_loss and train_flops alone. table: its columns as they were named, None for a store.

    no_law, no_answer, no_sweep: why that is not there, "" where it is. held_out: rolling origin, one row a run with
    topology, N, size, observed, predicted, lower and upper. swept: see `sweep_budgets`. planned: trials of the plans
    without an outcome. at_rate_of_base_shape: cells of one rate that a search at another shape found. diagnostics: the
    tables of `diagnose` by name. remarks: what a reader must know of the above.
    """

    source: str
    trials: pd.DataFrame
    cells: pd.DataFrame
    planned: int = 0
    at_rate_of_base_shape: int = 0
    experiments: tuple[str, ...] = ()
    table: Mapping[str, str] | None = None
    counted: str = "backbone_params"
    rows: Rows | None = None
    bundled: Bundled | None = None
    law: FittedLaw | None = None
    no_law: str = ""
    answer: Optimum | None = None
    no_answer: str = ""
    question: str = ""
    held_out: pd.DataFrame | None = None
    swept: pd.DataFrame | None = None
    no_sweep: str = ""
    diagnostics: dict[str, pd.DataFrame] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @property
    def topologies(self) -> list[str]:
        """In one order for the whole report: each keeps its colour and its marker."""
        return sorted({*self.trials["topology"], *self.cells["topology"], *(self.law.topologies if self.law else ())})

    @property
    def title(self) -> str:
        return self.bundled.name if self.bundled else ", ".join(self.experiments) or self.source

    @property
    def parameters(self) -> str:
        """What N counts, in two words."""
        return self.counted.replace("_", " ").replace("params", "parameters")

    def span(self) -> str:
        """The least and the most N of the cells, in words."""
        return f"{span(self.cells[self.counted])} {self.parameters}"

    @property
    def sizes(self) -> list[int]:
        return sorted(set(self.cells["size"]))


def rows_of_table(frame: pd.DataFrame, columns: Mapping[str, str], name: str) -> Material:
    """The rows that a fit reads, in its order. Raises LawError for a column that is not there or holds no numbers."""
    import pandas as pd

    nothing = pd.DataFrame({"topology": []})
    try:
        rows = read_rows(frame, columns)
    except FitRefusedError as error:
        cells = pd.DataFrame(columns=["topology", "backbone_params", "val_loss", "train_flops", "size"])
        return Material(name, nothing, cells, table=columns, no_law=str(error), no_answer=str(error))
    counted = rows.columns.n_is
    cells = pd.DataFrame(
        {"topology": rows.topology, counted: rows.N, "tokens": rows.D, "n_layers": rows.L, "d_model": rows.d}
    ).assign(val_loss=rows.loss, train_flops=6.0 * rows.N * rows.D, n_diverged=0, n_pruned=0, size=groups(rows.N))
    cells["N_size"] = cells.groupby("size")[counted].transform(_geometric_mean)
    return Material(name, nothing, cells, table=columns, counted=counted, rows=rows)


def span(counts: pd.Series) -> str:
    low, high = (format_quantity(float(v), "count") for v in (counts.min(), counts.max()))
    return low if low == high else f"{low} to {high}"


def cells_of_store(store: Store, experiment: str | None) -> Material:
    trials, plans = store.trials(), store.experiments()
    wanted = [experiment] if experiment else plans
    planned: set[str] = set()
    for name in wanted:
        try:
            planned |= {row["trial"] for row in store.plan(name)}
        except StoreError:
            if experiment:
                raise
    if experiment:
        trials = trials[trials["trial"].isin(planned)].reset_index(drop=True)
    cells = cells_of(trials)
    for frame in (trials, cells):
        frame["size"], frame["N_size"] = 0, float("nan")
    known = cells["backbone_params"].notna()
    if known.any():
        number = groups(cells.loc[known, "backbone_params"].to_numpy(float))
        cells = cells[known].assign(size=number)
        cells["N_size"] = cells.groupby("size")["backbone_params"].transform(_geometric_mean)
        by_N = cells.drop_duplicates("backbone_params").set_index("backbone_params")
        for name in ("size", "N_size"):
            trials[name] = trials["backbone_params"].map(by_N[name])
    return Material(
        source=str(store.path),
        trials=trials,
        cells=cells.reset_index(drop=True),
        planned=len(planned - set(trials["trial"])),
        experiments=tuple(wanted),
    )


def _geometric_mean(values: pd.Series) -> float:
    import numpy as np

    return float(np.exp(np.log(values.astype(float)).mean()))


def rows_of_cells(m: Material) -> Rows | None:
    """The rows of a fit; None, with the reason in `no_law`, where there is none."""
    if m.cells.empty:
        m.no_law = m.no_answer = "the store has no trial with an outcome yet"
        return None
    try:
        return read_rows(m.cells)
    except LawError as error:
        m.no_law = m.no_answer = str(error)
        return None
