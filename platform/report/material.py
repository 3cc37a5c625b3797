"""What a report is drawn from: the store's trials and cells, the law, what it answers, and what lacks in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from depthlaw.archs.errors import TopologyError
from depthlaw.archs.topologies import topology
from depthlaw.platform.observations import law_rows
from depthlaw.platform.query import fit, optimum
from depthlaw.platform.report.sweeps import sweep_budgets
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.store_cells import cells as cells_of
from depthlaw.scaling.answer import Infeasible, Optimum
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import LawError
from depthlaw.scaling.optimum import OptimumError
from depthlaw.scaling.rolling import groups, rolling_origin
from depthlaw.scaling.rows import Rows, read_rows
from depthlaw.scaling.training import FLOPS_BUDGET

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[str], None]
# What of a question can leave no design; without any of it an empty lattice is the store's doing and not the asker's.
OF_DESIGNS = ("tokens", "tokens_per_param", "topologies", "layers", "rule", "widest", "vocab_size")


@dataclass
class Material:
    """cells: as `Store.cells`, with `size`, the number of the group of sizes that each is in, and `N_size`, the
    geometric mean of its backbone parameters; trials: those of the cells, with the same two columns.

    no_law, no_answer, no_sweep: why that is not there, "" where it is. held_out: rolling origin, one row a run with
    topology, N, size, observed, predicted, lower and upper. swept: see `sweep_budgets`. planned: trials of the plans
    without an outcome. diagnostics: the tables of `diagnose` by name. remarks: what a reader must know of the above.
    """

    store: str
    trials: pd.DataFrame
    cells: pd.DataFrame
    planned: int = 0
    experiments: tuple[str, ...] = ()
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
        return sorted({*self.trials["topology"], *(self.law.topologies if self.law else ())})

    @property
    def sizes(self) -> list[int]:
        return sorted(set(self.cells["size"]))


def gather(
    store: Store,
    law: FittedLaw | None,
    budgets: Sequence[str],
    experiment: str | None,
    asked: Mapping[str, Any],
    progress: Progress,
) -> Material:
    """asked: the other arguments of `optimum`. What the store cannot give is said in words; what the caller got wrong
    (a budget, the hardware, an experiment) raises as `optimum` does."""
    progress("reading the trials")
    m = _read(store, experiment)
    if m.cells["recipe_hash"].nunique() > 1:
        m.no_law = m.no_answer = (
            f"the store holds {m.cells['recipe_hash'].nunique()} recipes (data, batch, optimiser or schedule differ), "
            f"whose losses do not compare: choose one of {', '.join(m.experiments)} with --experiment"
        )
        m.cells = m.cells.iloc[:0]
        return m
    from depthlaw.platform.report.depth import read_tables

    m.diagnostics = read_tables(store, m.trials)
    rows = _rows(m)
    _law(m, store, law, rows, experiment, progress)
    if m.law is not None and rows is not None:
        progress("predicting each size from the smaller ones")
        m.held_out = _held_out(rows, m.law)
    if m.law is not None:
        _answer(m, m.law, budgets, asked, progress)
    m.unreadable = dict(store.unreadable_parts)
    return m


def _read(store: Store, experiment: str | None) -> Material:
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
        store=str(store.path),
        trials=trials,
        cells=cells.reset_index(drop=True),
        planned=len(planned - set(trials["trial"])),
        experiments=tuple(wanted),
    )


def _geometric_mean(values: pd.Series) -> float:
    import numpy as np

    return float(np.exp(np.log(values.astype(float)).mean()))


def _rows(m: Material) -> Rows | None:
    """The rows of a fit; None, with the reason in `no_law`, where there is none."""
    if m.cells.empty:
        m.no_law = m.no_answer = "the store has no trial with an outcome yet"
        return None
    try:
        return read_rows(m.cells)
    except LawError as error:
        m.no_law = m.no_answer = str(error)
        return None


def _law(
    m: Material, store: Store, law: FittedLaw | None, rows: Rows | None, experiment: str | None, progress: Progress
) -> None:
    if law is None and rows is not None:
        progress("choosing and fitting a law; `depthlaw fit` once and --law skip this")
        try:
            law_rows(store, experiment)
            law = fit(store, "auto", pooling="auto", experiment=experiment)
        except (LawError, StoreError) as error:
            m.no_law = m.no_answer = str(error)
    elif law is not None:
        m.no_law = m.no_answer = ""
        if rows is None or rows.digest() != law.rows_hash:
            now = 0 if rows is None else len(rows.N)
            m.remarks.append(
                f"The law was not fitted on the cells shown here: it rests on {len(law.rows_used)} rows, and this "
                f"store has {now}. Points and curves need not belong together; `depthlaw fit` makes a law of this store"
            )
    m.law = law


def _held_out(rows: Rows, law: FittedLaw) -> pd.DataFrame:
    """One row a run of a size that was predicted from the smaller ones; empty where no size could be."""
    import numpy as np
    import pandas as pd

    parts = []
    for one in rolling_origin(rows, law.law, law.pooling):
        of = {"topology": rows.topology[one.rows], "N": rows.N[one.rows], "size": one.N}
        observed = rows.loss[one.rows]
        middle, half = np.log(observed) - one.error, 1.96 * one.sd * law.inflation
        ends = {"lower": np.exp(middle - half), "upper": np.exp(middle + half)}
        parts.append(pd.DataFrame({**of, "observed": observed, "predicted": np.exp(middle), **ends}))
    columns = ["topology", "N", "size", "observed", "predicted", "lower", "upper"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def _answer(m: Material, law: FittedLaw, budgets: Sequence[str], asked: Mapping[str, Any], progress: Progress) -> None:
    """Without a budget the question is about the largest size that was trained, on the most tokens."""
    question = dict(asked)
    if not question.get("topologies"):
        question["topologies"], unknown = _installed(law.topologies)
        if unknown:
            m.remarks.append(
                f"No topology of this installation is named {', '.join(unknown)}: of it there is no answer under "
                "budgets, for its parameters and times are not known. Install the package that has it"
            )
        if not question["topologies"]:
            m.no_answer = m.no_sweep = "none of the law's topologies is installed here, so designs cannot be counted"
            return
    given = bool(budgets) or any(asked.get(name) is not None for name in OF_DESIGNS)
    largest = law.ranges[""]
    if not budgets:
        budgets = [f"{law.n_is}<={largest['N'][1]:.0f}"]
        m.question = "No budget was given, so the question is the largest size that was trained. "
    trained = any(text.replace(" ", "").startswith(FLOPS_BUDGET + "<") for text in budgets)
    if not trained and question.get("tokens") is None and question.get("tokens_per_param") is None:
        question["tokens"] = largest["D"][1]
        m.question += "No amount of training was given, so it is the most tokens of any cell. "
    progress("finding the optimum")
    try:
        m.answer = optimum(law, budgets, **question)
    except Infeasible as no:
        m.no_answer = str(no)
    except OptimumError as error:
        if given:
            raise
        m.no_answer = m.no_sweep = str(error)
        return
    progress("finding the optimum under other budgets")
    m.swept, m.no_sweep = sweep_budgets(law, budgets, m.cells, question)


def _installed(labels: Sequence[str]) -> tuple[list[str], list[str]]:
    known, unknown = [], []
    for label in labels:
        try:
            topology(label)
        except TopologyError:
            unknown.append(label)
        else:
            known.append(label)
    return known, unknown
