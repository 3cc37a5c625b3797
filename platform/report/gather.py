"""Puts together what a report is drawn from: reads the runs, fits their law if none is given, and asks it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from depthlaw.platform.bundled import Bundled
from depthlaw.platform.observations import at_rate_of_base_shape, law_rows
from depthlaw.platform.query import fit, installed, optimum
from depthlaw.platform.report.material import Material, cells_of_store, rows_of_cells, rows_of_table
from depthlaw.platform.report.sweeps import sweep_budgets
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.tables import TableError, is_table, read_table
from depthlaw.scaling.answer import Infeasible
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.law_file import load_law
from depthlaw.scaling.laws import FitRefusedError, LawError
from depthlaw.scaling.optimum import OptimumError
from depthlaw.scaling.rolling import rolling_origin
from depthlaw.scaling.rows import Rows
from depthlaw.scaling.training import FLOPS_BUDGET

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[str], None]
FITTING = "choosing and fitting a law; `depthlaw fit` once and --law skip this"
# What of a question can leave no design; without any of it an empty lattice is the store's doing and not the asker's.
OF_DESIGNS = ("tokens", "tokens_per_param", "topologies", "layers", "rule", "widest", "vocab_size")


def gather(
    runs: Store | pd.DataFrame | Bundled,
    law: FittedLaw | None,
    budgets: Sequence[str],
    experiment: str | None,
    asked: Mapping[str, Any],
    progress: Progress,
    columns: Mapping[str, str] | None = None,
    name: str = "",
) -> Material:
    """asked: the other arguments of `optimum`; columns, name: of a table. What the runs cannot give is said in words;
    what the caller got wrong (a budget, the hardware, an experiment, a column) raises as `optimum` and `fit` do."""
    if isinstance(runs, Bundled):
        opened = read_table(runs.runs) if is_table(runs.runs) else Store(runs.runs)
        m = gather(opened, law or load_law(runs.law), budgets, experiment, asked, progress, None, runs.runs.name)
        return replace(m, bundled=runs)
    if isinstance(runs, Store):
        return _of_store(runs, law, budgets, experiment, asked, progress)
    progress("reading the table")
    m = rows_of_table(runs, columns or {}, name)
    if law is not None and m.rows is not None and law.n_is != m.counted:
        raise TableError(
            f"the law's N is {law.n_is} and the table's is {m.counted}: fit a law to this table, or say with --column "
            f"where it has {law.n_is}"
        )
    if law is None and m.rows is not None:
        progress(FITTING)
        try:
            law = fit(runs, "auto", pooling="auto", columns=columns)
        except FitRefusedError as error:
            m.no_law = m.no_answer = str(error)
    _ask(m, law, budgets, asked, progress)
    return m


def _of_store(
    store: Store,
    law: FittedLaw | None,
    budgets: Sequence[str],
    experiment: str | None,
    asked: Mapping[str, Any],
    progress: Progress,
) -> Material:
    progress("reading the trials")
    m = cells_of_store(store, experiment)
    if m.cells["recipe_hash"].nunique() > 1:
        m.no_law = m.no_answer = (
            f"the store holds {m.cells['recipe_hash'].nunique()} recipes (data, batch, optimiser or schedule differ), "
            f"whose losses do not compare: choose one of {', '.join(m.experiments)} with --experiment"
        )
        m.cells = m.cells.iloc[:0]
        return m
    from depthlaw.platform.report.depth import read_tables

    m.diagnostics = read_tables(store, m.trials)
    m.at_rate_of_base_shape = at_rate_of_base_shape(store, m.trials, m.cells[m.cells["n_lrs"] == 1])
    m.rows = rows_of_cells(m)
    if law is None and m.rows is not None:
        progress(FITTING)
        try:
            law_rows(store, experiment)
            law = fit(store, "auto", pooling="auto", experiment=experiment)
        except (LawError, StoreError) as error:
            m.no_law = m.no_answer = str(error)
    _ask(m, law, budgets, asked, progress)
    m.unreadable = dict(store.unreadable_parts)
    return m


def _ask(
    m: Material, law: FittedLaw | None, budgets: Sequence[str], asked: Mapping[str, Any], progress: Progress
) -> None:
    """What the law says: how far off it is on held-out sizes, and which design is best."""
    m.law = law
    if law is None:
        return
    m.no_law = m.no_answer = ""
    if m.rows is None or m.rows.digest() != law.rows_hash:
        now, here = 0 if m.rows is None else len(m.rows.N), "store" if m.table is None else "table"
        m.remarks.append(
            f"The law was not fitted on the cells shown here: it rests on {len(law.rows_used)} rows, and this "
            f"{here} has {now}. Points and curves need not belong together; `depthlaw fit` makes a law of this {here}"
        )
    if m.rows is not None:
        progress("predicting each size from the smaller ones")
        m.held_out = _held_out(m.rows, law)
    _answer(m, law, budgets, asked, progress)


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
        question["topologies"], unknown = installed(law)
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
