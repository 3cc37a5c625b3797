"""What is inside a part: the two schemas, rows to Parquet bytes and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from depthlaw.platform.store_files import StoreError

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
STATUSES = ("finished", "diverged", "pruned", "oom", "failed", "stopped")

# Column -> type; a type that ends in "?" may be null: not known, or not reached by a trial that ended early.
STEP_COLUMNS = {"step": "int64", "name": "string", "value": "float64", "attempt": "int32"}
TRIAL_COLUMNS = {
    "trial": "string",  # content hash of everything that changes the trial's numbers
    "attempt": "int32",
    "recipe_hash": "string",  # of what must be equal for two losses to compare
    "experiment": "string",
    "topology": "string",
    "n_layers": "int64",
    "d_model": "int64",
    "n_heads": "int64",
    "n_kv_heads": "int64",
    "d_ff": "int64",
    "vocab_size": "int64",
    "seq_len": "int64",
    "lr": "float64",
    "tokens": "int64",  # planned
    "tokens_done": "int64?",
    "tokens_per_param": "float64?",
    "seed": "int64",
    "batch_tokens": "int64?",
    "steps": "int64?",
    "steps_done": "int64?",
    "backbone_params": "int64?",
    "embedding_params": "int64?",
    "params": "int64?",
    "train_flops": "float64?",  # of its own steps: a wsd trunk is in one row only; passes 2**63 at 400M parameters
    "wall_s": "float64?",
    "train_s": "float64?",  # inside steps only
    "peak_memory_bytes": "int64?",
    "status": "string",
    "reason": "string?",
    "val_loss": "float64?",  # nats per token; only of finished trials
    "bits_per_byte": "float64?",
    "last_val_loss": "float64?",  # nats per token, wherever the trial ended
    "val_tokens": "int64?",
    "data_fingerprint": "string?",
    "code_commit": "string?",
    "numerics_version": "string?",
    "epochs": "float64?",
    "device": "string?",
    "versions": "string?",  # JSON
    "spec": "string?",  # JSON: the full trial spec
    "started_at": "timestamp?",  # UTC
    "ended_at": "timestamp?",  # UTC
}
# A file of `merged/` has the rows of many step parts, each with the part that it came from.
PLACE = ("part_attempt", "part_sequence")
MERGED_COLUMNS = {
    **dict.fromkeys(("experiment", "topology", "trial"), "string"),
    **STEP_COLUMNS,
    **dict.fromkeys(PLACE, "int32"),
}


@cache
def schema(kind: str) -> pa.Schema:
    """The explicit schema of a `steps` or `trials` part, or of `merged` steps."""
    import pyarrow as pa

    columns = {"steps": STEP_COLUMNS, "trials": TRIAL_COLUMNS, "merged": MERGED_COLUMNS}[kind]
    types = {
        "string": pa.string(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "timestamp": pa.timestamp("us", "UTC"),
    }
    fields = [pa.field(name, types[t.rstrip("?")], nullable=t.endswith("?")) for name, t in columns.items()]
    return pa.schema(fields, metadata={"schema_version": str(SCHEMA_VERSION), "kind": kind})


def steps_table(rows: Iterable[tuple[int, str, float]], attempt: int) -> pa.Table:
    """Raises StoreError naming the first row that is not (whole step, name, number)."""
    import pyarrow as pa

    steps, names, values = [], [], []
    for row in rows:
        try:
            step, name, value = row
            if not isinstance(name, str) or not name:
                raise TypeError
            # Not int() and float(): they would cut a step of 1.5 and take the text "2.0".
            steps.append(step.__index__())
            names.append(name)
            values.append(value.__float__())
        except (TypeError, ValueError, AttributeError):
            raise StoreError(
                f"step row {row!r}: it must be (step, name, value), a whole number, text and a number"
            ) from None
    try:
        return pa.table([steps, names, values, [attempt] * len(steps)], schema=schema("steps"))
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        raise StoreError(f"step rows do not fit the store: {error}") from None


def trial_table(row: Mapping[str, Any]) -> pa.Table:
    """One row; columns that are left out are null.

    Raises StoreError naming unknown, missing or badly typed columns, a bad status, or a val_loss that contradicts it.
    """
    import pyarrow as pa

    unknown = sorted(str(name) for name in row if name not in TRIAL_COLUMNS)
    if unknown:
        raise StoreError(f"unknown trial columns {', '.join(unknown)}; the columns are {', '.join(TRIAL_COLUMNS)}")
    missing = [name for name, t in TRIAL_COLUMNS.items() if not t.endswith("?") and row.get(name) is None]
    if missing:
        raise StoreError(f"a trial row needs {', '.join(missing)}")
    _check_outcome(row["status"], row.get("val_loss"))
    arrays: list[pa.Array] = []
    for field in schema("trials"):
        value, kind = row.get(field.name), TRIAL_COLUMNS[field.name].rstrip("?")
        try:
            arrays.append(pa.array([None if value is None else _exactly(value, kind)], field.type))
        except (pa.ArrowException, AttributeError, TypeError, ValueError, OverflowError):
            raise StoreError(f"trial column {field.name} is {value!r}; it must be {_EXPECTED[kind]}") from None
    return pa.table(arrays, schema=schema("trials"))


_EXPECTED = {
    "string": "text",
    "int32": "a whole number",
    "int64": "a whole number",
    "float64": "a number",
    "timestamp": "a datetime with a time zone",
}


def _exactly(value: Any, kind: str) -> Any:
    """The value, or an exception: pyarrow alone would cut 1.5 to 1, call a naive time UTC and refuse 10**20 FLOPs."""
    if isinstance(value, bool) or (isinstance(value, str) != (kind == "string")):
        raise TypeError
    if kind.startswith("int"):
        return value.__index__()
    if kind == "float64":
        return float(value)
    if kind == "timestamp" and value.tzinfo is None:
        raise TypeError
    return value


def _check_outcome(status: Any, val_loss: Any) -> None:
    if status not in STATUSES:
        raise StoreError(f"status is {status!r}; it must be one of {', '.join(STATUSES)}")
    if status != "finished" and val_loss is not None:
        raise StoreError(
            f"val_loss is {val_loss!r} for a {status} trial; only finished ones have it: use last_val_loss"
        )
    try:
        known = math.isfinite(val_loss)
    except TypeError:
        known = False
    if status == "finished" and not known:
        raise StoreError(f"val_loss is {val_loss!r} for a finished trial; it must be finite, else the trial diverged")


def last_rows(tables: list[pa.Table], per_attempt: bool = False) -> pa.Table:
    """The rows of one trial that count: one per (step, name), the highest attempt's, and of those the last in order.

    The order is that of the parts where the rows have their PLACE, and then that of the tables. per_attempt=True keeps
    one per (step, name, attempt) instead. Sorted by step, name and attempt.
    """
    import numpy as np
    import pyarrow as pa

    table = pa.concat_tables(tables)
    if not len(table):
        return table
    encoded = table["name"].combine_chunks().dictionary_encode()
    rank = np.argsort(np.argsort(encoded.dictionary.to_numpy(zero_copy_only=False)))
    name = rank[encoded.indices.to_numpy()]
    step, attempt = table["step"].to_numpy(), table["attempt"].to_numpy()
    place = [table[column].to_numpy() for column in reversed(PLACE) if column in table.column_names]
    order = np.lexsort((*place, attempt, name, step))  # stable: at equal keys the order of writing stays
    keys = [step, name, attempt] if per_attempt else [step, name]
    superseded = np.logical_and.reduce([key[order][1:] == key[order][:-1] for key in keys])
    return table.take(pa.array(order[np.append(~superseded, True)]))


def to_bytes(table: pa.Table) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    if table.schema.names == list(TRIAL_COLUMNS) and len(table) == 1:
        # One row: statistics and encodings only make it slow to open (5000 parts: 2 s so, 6 s with the defaults).
        options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    else:
        texts = [field.name for field in table.schema if field.type == pa.string()]
        options = {"compression": "zstd", "use_dictionary": texts}
    pq.write_table(table, sink, write_page_checksum=True, **options)
    return bytes(sink.getvalue())


def from_bytes(data: bytes, kind: str) -> pa.Table:
    """Raises ValueError saying why the bytes are not a part of this kind: truncated, empty, foreign or newer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not data:
        raise ValueError("empty file")
    try:
        table = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"not a whole Parquet file: {str(error).splitlines()[0]}") from None
    found = (table.schema.metadata or {}).get(b"schema_version", b"").decode(errors="replace")
    if not found.isdecimal():
        raise ValueError("not written by depthlaw: no schema_version")
    if int(found) > SCHEMA_VERSION:
        raise ValueError(f"schema_version {found} is newer than {SCHEMA_VERSION}: upgrade depthlaw")
    expected = schema(kind)
    if not table.schema.equals(expected):
        raise ValueError(f"its columns are not those of {kind}")
    return table


def is_whole(data: bytes) -> bool:
    """Starts and ends as a Parquet file does: enough to tell a truncated part, without decoding it."""
    return len(data) > 12 and data[:4] == data[-4:] == b"PAR1"
