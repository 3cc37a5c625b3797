"""Plain tables of runs, for laws of sweeps that were trained elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".parquet")


class TableError(ValueError):
    """A table that cannot be read, or columns that are not written as NAME=COLUMN. One line for a person."""


def is_table(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.is_dir()


def no_experiment(table: Path | str, experiment: str | None) -> None:
    """Raises TableError if an experiment of a table is asked for."""
    if experiment:
        raise TableError(f"{table} is a table, which has no experiments: leave --experiment out")


def no_columns(source: str, columns: Mapping[str, str]) -> None:
    """Raises TableError if columns are named of what is no table of the caller's own."""
    if columns:
        raise TableError(f"{source} has its own columns: leave --column out, which is for a table of yours")


def read_table(path: Path) -> pd.DataFrame:
    """A CSV file with a header, or a Parquet file. Raises TableError if it is not there or is not one."""
    import pandas as pd

    try:
        return pd.read_parquet(path) if path.suffix.lower() == ".parquet" else pd.read_csv(path)
    except OSError as error:
        raise TableError(f"cannot read the table {path}: {error.strerror or error}") from error
    except ValueError as error:  # pandas and pyarrow derive theirs from it
        reason = str(error).strip().splitlines()[0]
        raise TableError(f"{path} is not a table ({reason}): write a .csv with a header or a .parquet") from error


def parse_columns(given: Sequence[str]) -> dict[str, str]:
    """`tokens=TOK` -> {"tokens": "TOK"}. Raises TableError for anything else and for a name given twice."""
    columns: dict[str, str] = {}
    for text in given:
        name, equals, column = text.partition("=")
        if not (name and equals and column):
            raise TableError(f"column is {text!r}; write NAME=COLUMN, such as tokens=TOK, or topology=@pre_ln")
        if name in columns:
            raise TableError(f"column {name!r} is given twice: {columns[name]} and {column}")
        columns[name] = column
    return columns
