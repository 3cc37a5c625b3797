"""Whether everything in a store can be read and adds up. Only reads."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from depthlaw.platform.plan import SETTLED
from depthlaw.platform.store import Store
from depthlaw.platform.store_files import decode
from depthlaw.platform.store_layout import Reader
from depthlaw.platform.store_parts import PLACE
from depthlaw.platform.store_view import merged_slices
from depthlaw.scaling.units import counted

STALE_S = 600.0  # a temporary file this old is no writer's any more
COMPACT = "; `depthlaw store compact` removes the copies"


class Problem(NamedTuple):
    path: str  # within the store
    reason: str


@dataclass(frozen=True)
class Checked:
    parts: int
    step_rows: int
    trials: int
    problems: list[Problem]  # sorted by path


def check(store: Store) -> Checked:
    """Reads every byte: what cannot be read, what is there twice, what belongs to nothing, what was left over."""
    files, reader, found = store._files, Reader(store._files), list[Problem]()
    row_files, parts, losses = defaultdict[tuple[str, int, str], list[str]](list), 0, defaultdict[str, set[float]](set)

    def row(key: str, trial: str, attempt: int, status: str, val_loss: float | None) -> None:
        row_files[trial, attempt, status].append(key)
        if val_loss is not None:
            losses[trial].add(val_loss)

    columns = ("trial", "attempt", "status", "val_loss")
    for key, table in reader.merged("trials"):
        parts += 1
        for values in zip(*(table[name].to_pylist() for name in columns), strict=True):
            row(key, *values)
    for part, table in reader.trial_tables():
        parts += 1
        values = tuple(table[name][0].as_py() for name in columns)
        row(part.key, *values)
        if values[:3] != (part.trial, part.attempt, part.status):
            found.append(Problem(part.key, f"its row is of trial {values[0]}, attempt {values[1]}, {values[2]}"))
    for (trial, attempt, status), keys in row_files.items():
        if len(keys) > 1:
            found.append(
                Problem(keys[-1], f"the row of {trial}, attempt {attempt}, {status} is also in {keys[0]}{COMPACT}")
            )
    for trial, values_of in losses.items():
        if len(values_of) > 1:
            told = " and ".join(f"{loss:.6g}" for loss in sorted(values_of))
            found.append(Problem("trials", f"{trial} finished more than once, at different losses: {told}"))

    planned = {trial["trial"] for name in _plans(store, found) for trial in store.plan(name)}
    known = {trial for trial, _, _ in row_files} | {part.trial for part in reader.trial_parts()} | planned
    known |= {held.trial for held in store.running()}
    merged_parts, step_rows = set(), 0
    for key, table in reader.merged("steps"):
        parts += 1
        step_rows += len(table)
        for labels, rows in merged_slices(key, table):
            places = set(zip(*(rows[name].to_pylist() for name in PLACE), strict=True))
            merged_parts |= {(labels[:3], *place) for place in places}
            if labels.trial not in known:
                found.append(Problem(key, f"steps of trial {labels.trial}, which has no row and is in no plan"))
    for folder in reader.step_folders():
        if folder.trial not in known:
            found.append(Problem(folder.key, "steps of a trial that has no row and is in no plan"))
        for part, table in reader.step_tables(folder):
            parts += 1
            step_rows += len(table)
            if (folder[:3], part.attempt, part.sequence) in merged_parts:
                found.append(Problem(part.key, f"its rows are also in a merged file{COMPACT}"))
            elif (doubled := _doubled(table)) is not None:
                found.append(Problem(part.key, doubled))

    found += [Problem(key, reason) for key, reason in reader.problems.items()]
    found += [
        Problem(key, "unfinished temporary file of a writer that was killed: delete it")
        for key in files.hidden(STALE_S)
    ]
    statuses = store.statuses()
    for name in _names(store.local_folder / "checkpoints"):
        if statuses.get(decode(name)) in SETTLED:
            found.append(Problem(f"checkpoints/{name}", "checkpoint of a trial that has ended: delete it"))
    return Checked(parts, step_rows, len({trial for trial, _, _ in row_files}), sorted(set(found)))


def _plans(store: Store, found: list[Problem]) -> list[str]:
    """The experiments whose plan can be read."""
    good = []
    for name in store.experiments():
        try:
            hashes = [trial["trial"] for trial in store.plan(name)]
        except (ValueError, KeyError, TypeError):
            found.append(Problem(f"plans/{name}.json", "not a plan; the experiment's sweep writes it again"))
        else:
            good.append(name)
            if len(set(hashes)) < len(hashes):
                found.append(Problem(f"plans/{name}.json", f"{len(hashes) - len(set(hashes))} trials are in it twice"))
    return good


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def _doubled(table: object) -> str | None:
    """A measurement that one attempt committed twice in one part, to other values."""
    frame = table.to_pandas()  # type: ignore[attr-defined]
    distinct = frame.drop_duplicates()
    twice = distinct[distinct.duplicated(["step", "name", "attempt"])]
    if twice.empty:
        return None
    return f"{len(twice)} measurements are in it twice, such as {twice.iloc[0]['name']} of step {twice.iloc[0]['step']}"


def report(checked: Checked) -> str:
    lines = [f"{problem.path}: {problem.reason}" for problem in checked.problems]
    parts, rows = counted(checked.parts, "part"), counted(checked.step_rows, "step row")
    problems = counted(len(lines), "problem") if lines else "no problems"
    return "\n".join([*lines, f"{parts}, {rows}, {counted(checked.trials, 'trial')}: {problems}"])


def to_json(store: Store, checked: Checked) -> str:
    problems = [problem._asdict() for problem in checked.problems]
    return json.dumps({"store": str(store.path), **checked.__dict__, "problems": problems})
