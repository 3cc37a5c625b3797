"""A whole store into few files, while others read and write it.

    STORE/merged/steps-ID.parquet      rows of many trials: experiment, topology, trial, step, name, value, attempt, and
                                       the part that each came from
    STORE/merged/trials-ID.parquet     rows of many attempts

Nothing is deleted before what replaces it was read back whole, and a row that is there twice counts once: killed at any
moment, the store answers as before. What could not be read stays where it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.store_files import LocalFiles
from depthlaw.platform.store_layout import Reader, StepFolder
from depthlaw.platform.store_parts import from_bytes, last_rows, schema, to_bytes
from depthlaw.platform.store_s3 import S3Files
from depthlaw.platform.store_view import LABELS, merged_slices, placed

if TYPE_CHECKING:
    import pyarrow as pa

ROWS = 4_000_000  # of a merged file, about: what one holds in memory twice


@dataclass(frozen=True)
class Compacted:
    files_before: int
    files_after: int
    left: int  # trials whose steps stay as they are: running now, or without an outcome of their last attempt


def compact(store: Store) -> Compacted:
    """Merges what has ended. One process at a time: another waits for it. Raises StoreError."""
    files = store._files
    with store.lease(".compaction"):
        reader = Reader(files)
        before = _count(files)
        left = _compact_steps(store, reader)
        _compact_trials(reader)
        reader.warn()
        return Compacted(before, _count(files), left)


def _compact_steps(store: Store, reader: Reader) -> int:
    rows = store.attempts()
    ended = dict(rows.groupby("trial")["attempt"].max())
    running = {held.trial for held in store.running()}
    small = [(key, table) for key, table in reader.merged("steps") if len(table) < ROWS / 2]
    slices: dict[StepFolder, list[pa.Table]] = {}
    for key, table in small:
        for labels, part in merged_slices(key, table):
            slices.setdefault(labels._replace(key=""), []).append(part)
    folders: dict[StepFolder, StepFolder] = {}
    left = set()
    for folder in reader.step_folders():
        last = max((part.attempt for part in reader.step_parts(folder)), default=-1)
        # An attempt without a row could be given again, if its steps were not seen as parts.
        if folder.trial in running or last > ended.get(folder.trial, -1):
            left.add(folder.trial)
        elif last >= 0:
            folders[folder._replace(key="")] = folder
    if folders or len(small) > 1:
        for table, done in _batches(reader, slices, folders):
            _write(reader.files, "steps", table)
            for folder, keys in done:
                for key in keys:  # the oldest first, so that the one that wins goes last
                    reader.files.delete(key)
                reader.files.remove_empty(folder.key)
        for key, _ in small:
            reader.files.delete(key)
    return len(left)


def _batches(
    reader: Reader, slices: dict[StepFolder, list[pa.Table]], folders: dict[StepFolder, StepFolder]
) -> Iterator[tuple[pa.Table, list[tuple[StepFolder, list[str]]]]]:
    """Merged tables of about ROWS rows, each with the folders that went into it and the keys of their parts."""
    import pyarrow as pa

    tables: list[pa.Table] = []
    done: list[tuple[StepFolder, list[str]]] = []
    for labels in sorted({*slices, *folders}):
        parts = slices.get(labels, [])
        if labels in folders:
            found = reader.step_tables(folders[labels])
            parts = parts + [placed(part, table) for part, table in found]
            done.append((folders[labels], [part.key for part, _ in found]))
        if parts:
            table = last_rows(parts, per_attempt=True)
            for at, label in enumerate(LABELS):
                table = table.add_column(at, label, pa.array([getattr(labels, label)] * len(table), pa.string()))
            tables.append(table.cast(schema("merged")))
        if sum(map(len, tables)) >= ROWS:
            yield pa.concat_tables(tables), done
            tables, done = [], []
    if tables:
        yield pa.concat_tables(tables), done


def _compact_trials(reader: Reader) -> None:
    import pyarrow as pa

    merged, parts = reader.merged("trials"), reader.trial_tables()
    if parts or len(merged) > 1:
        rows = pa.concat_tables([table for _, table in [*merged, *parts]])
        last = {}  # the place of each row: in a part and merged too, if an earlier compaction was killed
        for place, key in enumerate(zip(*(rows[c].to_pylist() for c in ("trial", "attempt", "status")), strict=True)):
            last[key] = place
        _write(reader.files, "trials", rows.take([last[key] for key in sorted(last)]))
        for key in [*(key for key, _ in merged), *(part.key for part, _ in parts)]:
            reader.files.delete(key)


def _write(files: LocalFiles | S3Files, kind: str, table: pa.Table) -> None:
    key = f"merged/{kind}-{secrets.token_hex(8)}.parquet"
    files.write(key, to_bytes(table))
    try:
        whole = from_bytes(files.read(key), "merged" if kind == "steps" else "trials").num_rows == len(table)
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise StoreError(f"{files.root}/{key} cannot be read back; nothing was deleted")


def _count(files: LocalFiles | S3Files) -> int:
    reader = Reader(files)
    parts = sum(len(reader.step_parts(folder)) for folder in reader.step_folders())
    return parts + len(files.listing("trials")[1]) + len(files.listing("merged")[1])
