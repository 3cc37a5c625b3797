"""What a store holds of what was planned, and how long the rest will take. Only reads."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from depthlaw.platform.plan import SETTLED
from depthlaw.platform.show import duration
from depthlaw.platform.store import Store, StoreError
from depthlaw.scaling.units import format_quantity

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

RECENT = 50  # trials whose speed counts: a machine's load changes


def status_rows(store: Store, experiment: str | None = None) -> list[dict[str, Any]]:
    """One row per cell that was planned or run, the cells without a trial included; what is not known is None.

    n_planned is what is expected, n_trials what was found, n_running those of a live lease. trial: the id of the
    finished one of lowest val_loss, whose weights `keep_checkpoints: best` leaves.
    """
    import pandas as pd

    from depthlaw.platform.store_cells import CELL, best_trials

    planned = pd.DataFrame(_planned(store, experiment), columns=["trial", "backbone_params", *CELL])
    numbers = [name for name in planned if name not in ("trial", "recipe_hash", "topology")]
    # Without a plan the columns would have no type, and would not merge.
    planned = planned.astype(dict.fromkeys(numbers, "int64"))
    planned["running"] = planned["trial"].isin([held.trial for held in store.running()])
    cell = [*CELL, "backbone_params"]
    expected = planned.groupby(cell).agg(n_planned=("trial", "size"), n_running=("running", "sum")).reset_index()
    cells = expected.merge(store.cells(experiment), how="outer", on=cell)
    best = best_trials(_trials(store, experiment))
    cells = cells.merge(best[[*CELL, "trial"]], how="left", on=CELL)
    counts = [name for name in cells if name.startswith("n_") and name != "n_layers"]
    cells[counts] = cells[counts].fillna(0).astype(int)
    cells["backbone_params"] = cells["backbone_params"].astype("Int64")
    cells = cells.sort_values(["backbone_params", "topology", "n_layers", "tokens"])
    rows: list[dict[str, Any]] = json.loads(cells.to_json(orient="records", double_precision=15))
    return rows


def _trials(store: Store, experiment: str | None) -> pd.DataFrame:
    """The trials that have ended, of one plan or all."""
    trials = store.trials()
    return (
        trials if experiment is None else trials[trials["trial"].isin([one["trial"] for one in store.plan(experiment)])]
    )


def _planned(store: Store, experiment: str | None) -> list[dict[str, Any]]:
    """The trials of one plan, or of all that can be read, each once."""
    if experiment:
        plans = [store.plan(experiment)]
    else:
        plans = []
        for name in store.experiments():
            try:
                plans.append(store.plan(name))
            except StoreError:
                warnings.warn(f"left out plan {name!r} of {store.path}, which cannot be read", stacklevel=3)
    return list({trial["trial"]: trial for one in plans for trial in one}.values())


def status_table(store: Store, experiment: str | None = None) -> Table:
    from rich.table import Table

    columns = [
        "topology", "L", "d", "backbone", "tokens", "expected", "found", "finished", "diverged", "pruned", "oom",
        "failed", "running", "best lr", "parabola", "val loss", "bits/byte", "best trial",
    ]  # fmt: skip
    table = Table(title=str(store.path), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left", no_wrap=True)
    for r in status_rows(store, experiment):
        kinds = ("n_planned", "n_trials", "n_finished", "n_diverged", "n_pruned", "n_oom", "n_failed", "n_running")
        table.add_row(
            r["topology"], str(r["n_layers"]), str(r["d_model"]), f"{r['backbone_params']:,}",
            format_quantity(r["tokens"], "count"),
            *(str(r[name]) for name in kinds),
            "-" if r["lr"] is None else f"{r['lr']:g}",
            _vertex_words(r),
            "-" if r["val_loss"] is None else f"{r['val_loss']:.4f}",
            "-" if r["bits_per_byte"] is None else f"{r['bits_per_byte']:.4f}",
            r["trial"] or "-",
        )  # fmt: skip
    trials = _trials(store, experiment)
    stopped = trials[trials["status"] != "finished"]
    reasons = [
        f"{t.topology} {t.n_layers} x {t.d_model} at lr {t.lr:g}: {t.status}, {t.reason}" for t in stopped.itertuples()
    ]
    table.caption_justify = "left"
    table.caption = "\n".join(reasons[:20] + ([f"and {len(reasons) - 20} more"] if len(reasons) > 20 else []))
    return table


def _vertex_words(cell: dict[str, Any]) -> str:
    """The rate at the vertex with its relative error, `?` where nothing tells the noise; else why there is none."""
    if cell["lr_found"] != "vertex":
        return "-" if cell["lr_found"] in (None, "none") else str(cell["lr_found"])
    error = "?" if cell["vertex_ln_lr_sd"] is None else f"{100 * cell['vertex_ln_lr_sd']:.2g}%"
    return f"{cell['vertex_lr']:.3g}+-{error}"


@dataclass(frozen=True)
class TimeLeft:
    """What is still to run of a plan. Seconds are None as long as nothing has been measured."""

    trials: int  # planned
    settled: int  # of them finished, diverged, pruned or out of memory
    running: int  # of the others: a live lease
    flops: float  # planned
    flops_left: float  # without what running trials have done
    trial_seconds: float | None  # left, if one trial ran at a time as fast as now
    seconds: float | None  # left, with as many at once as are running now; None too if none is

    def text(self) -> str:
        head = f"{self.settled} of {self.trials} trials settled, {self.running} running"
        if self.trials == self.settled:
            return head
        share = f"; {self.flops_left / self.flops:.0%} of the FLOPs left" if self.flops else ""
        if self.trial_seconds is None:
            return f"{head}{share}, time not known: no trial's speed has been measured yet"
        if self.seconds is None:
            return f"{head}{share}, about {duration(self.trial_seconds)} one trial at a time; nothing is running"
        return f"{head}{share}, about {duration(self.seconds)} with {self.running} at once"


def time_left(store: Store, experiment: str | None = None) -> TimeLeft:
    """Time left from exact FLOPs and from the speed of trials, finished and running.

    A trial's speed is its FLOPs over its wall time, validation included. Where trials of the same topology and shape
    were measured it is theirs, for small models reach fewer FLOPs a second than large ones; else that of all.
    """
    planned = {trial["trial"]: trial for trial in _planned(store, experiment) if "train_flops" in trial}
    statuses, rows = store.statuses(), store.trials()
    open_ = {trial: spec for trial, spec in planned.items() if statuses.get(trial) not in SETTLED}
    running = {held.trial: held.owner for held in store.running() if held.trial in open_}
    measured = [(_shape(row), row["done"], row["wall_s"]) for row in _measured(rows, planned)]
    left = {trial: float(spec["train_flops"]) for trial, spec in open_.items()}
    for trial, owner in running.items():
        done = planned[trial]["train_flops"] * min(1.0, owner.get("step", 0) / planned[trial]["steps"])
        left[trial] -= done
        if done:
            measured.append((_shape(planned[trial]), done, owner["wall_s"]))
    seconds = {trial: _seconds(flops, _shape(planned[trial]), measured) for trial, flops in left.items()}
    total = sum(seconds.values()) if measured or not left else None
    at_once = None
    if total is not None and running:
        at_once = max(total / len(running), *(seconds[trial] for trial in running))
    flops = float(sum(spec["train_flops"] for spec in planned.values()))
    settled = len(planned) - len(open_)
    return TimeLeft(len(planned), settled, len(running), flops, sum(left.values()), total, at_once)


def _measured(rows: pd.DataFrame, planned: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The trials that ended last, with the FLOPs that they did; of the plan if it has any."""
    rows = rows[rows["wall_s"].gt(0) & rows["steps_done"].gt(0) & rows["steps"].gt(0)]
    own = rows[rows["trial"].isin(list(planned))]
    rows = (rows if own.empty else own).sort_values("ended_at").tail(RECENT)
    return list(rows.assign(done=rows["train_flops"] * rows["steps_done"] / rows["steps"]).to_dict("records"))


def _shape(trial: dict[str, Any]) -> tuple[Any, ...]:
    return trial["topology"], trial["n_layers"], trial["d_model"]


def _seconds(flops: float, shape: tuple[Any, ...], measured: list[tuple[tuple[Any, ...], float, float]]) -> float:
    like = [m for m in measured if m[0] == shape] or measured
    done = sum(m[1] for m in like)
    return flops * sum(m[2] for m in like) / done if done else 0.0
