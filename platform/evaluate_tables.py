"""What was evaluated, as tables: Parquet that joins the store's trials, JSON, and a line a model and task to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

FILE = "evaluation.parquet"
TYPES = {
    "trial": "object", "topology": "object", "n_layers": "int64", "d_model": "int64", "task": "object",
    "group": "object", "status": "object", "source": "object", "reason": "object", "examples": "Int64",
    "tokens": "Int64", "bytes": "Int64", "nll_nats": "float64", "std_error": "float64", "bits_per_byte": "float64",
    "truncated": "Int64", "seq_len": "Int64",
}  # fmt: skip
CAUTION = (
    "zero-shot with this project's own templates, completion tokens only: compare with figures of this command; "
    "nats per token only between models of one tokenizer, bits per byte between all"
)


class EvaluateError(ValueError):
    """What is asked for cannot be evaluated. One line: what, and what to do."""


def table_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a model and task; a figure of a missing task is null."""
    import pandas as pd

    return pd.DataFrame(rows, columns=list(TYPES)).astype(TYPES)


def write_table(frame: pd.DataFrame, folder: Path) -> Path:
    """Raises EvaluateError if the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(folder / FILE, index=False)
    except OSError as error:
        raise EvaluateError(f"cannot write the table to {folder}: {error}") from error
    return folder / FILE


def as_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """For JSON: null where a figure is not defined."""
    import pandas as pd

    return [
        {name: None if pd.isna(value) else value for name, value in row.items()} for row in frame.to_dict("records")
    ]


COLUMNS = {
    "trial": "trial", "topology": "model", "n_layers": "L", "d_model": "d", "task": "task", "group": "group",
    "examples": "examples", "tokens": "tokens", "nll_nats": "nats/token", "std_error": "+-",
    "bits_per_byte": "bits/byte",
    "truncated": "truncated", "status": "status",
}  # fmt: skip
FORMATS = {"nll_nats": ".4f", "std_error": ".4f", "bits_per_byte": ".4f", "examples": ",", "tokens": ","}


def task_table(frame: pd.DataFrame) -> Table:
    """A line a model and task; a dash for what is missing."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, title in COLUMNS.items():
        left = name in ("trial", "topology", "task", "group", "status")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in as_rows(frame):
        table.add_row(*("-" if row[n] is None else format(row[n], FORMATS.get(n, "")) for n in COLUMNS))
    return table


def notes(frame: pd.DataFrame) -> list[str]:
    """What must be said beside the figures: how to read them, what is missing and why, what was cut."""
    missing = frame[frame["status"] == "missing"].drop_duplicates("task")
    said = [f"{task} is missing: {reason}" for task, reason in zip(missing["task"], missing["reason"], strict=True)]
    cut = frame[frame["truncated"].fillna(0) > 0]
    if len(cut):
        lengths = ", ".join(map(str, sorted(set(cut["seq_len"]))))
        said.append(
            f"truncated: examples longer than the model's seq_len ({lengths} tokens); their context is cut on the "
            "left, and a long completion is scored in pieces of half that length"
        )
    return [CAUTION, *said]
