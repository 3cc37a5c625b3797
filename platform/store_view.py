"""The reading view of the steps: which row counts, over parts and merged files alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from depthlaw.platform.store_layout import Reader, StepFolder, StepPart, in_threads
from depthlaw.platform.store_parts import PLACE, STEP_COLUMNS, last_rows, schema

if TYPE_CHECKING:
    import pyarrow as pa

LABELS = ("experiment", "topology", "trial")


def view(
    reader: Reader, trial: str | None, experiment: str | None, topology: str | None, names: Sequence[str] | None
) -> pa.Table:
    """One row per (trial, step, name), as `Store.steps` promises: its columns, its order."""
    import pyarrow as pa
    import pyarrow.compute as pc

    empty = schema("steps").append(pa.field("folder", pa.int32()))
    for column in PLACE:
        empty = empty.append(pa.field(column, pa.int32()))
    chosen = None if names is None else pa.array(names, pa.string())
    folders: list[StepFolder] = []
    sources: dict[str, list[tuple[int, StepFolder | pa.Table]]] = {}
    for folder, source in _sources(reader, trial):
        sources.setdefault(folder.trial, []).append((len(folders), source))
        folders.append(folder)
    # Every folder of a trial is read: its last attempt may belong to another experiment than the one asked for.
    wanted = {f.trial for f in folders if experiment in (None, f.experiment) and topology in (None, f.topology)}

    def of_one_trial(found: list[tuple[int, StepFolder | pa.Table]]) -> pa.Table:
        tables = [empty.empty_table()]
        for number, source in found:
            parts = [placed(part, t) for part, t in reader.step_tables(source)] if _is_folder(source) else [source]
            for table in parts:
                if chosen is not None:
                    table = table.filter(pc.is_in(table["name"], chosen))
                folder = pa.repeat(pa.scalar(number, pa.int32()), len(table))
                tables.append(table.append_column("folder", folder).select(empty.names).cast(empty))
        return last_rows(tables)

    found = in_threads(of_one_trial, [sources[name] for name in sorted(wanted)])
    table = pa.concat_tables([empty.empty_table(), *found])
    for at, label in enumerate(("trial", "experiment", "topology")):
        texts = pa.array([getattr(f, label) for f in folders], pa.string())
        table = table.add_column(at, label, texts.take(table["folder"].combine_chunks()))
    for label, value in (("experiment", experiment), ("topology", topology)):
        if value is not None:
            table = table.filter(pc.equal(table[label], value))
    return table.drop_columns(["folder", *PLACE])


def _is_folder(source: StepFolder | pa.Table) -> bool:
    return isinstance(source, StepFolder)


def _sources(reader: Reader, trial: str | None) -> Iterator[tuple[StepFolder, StepFolder | pa.Table]]:
    """Where rows of each trial and experiment are: slices of merged tables, and folders of parts."""
    for key, table in reader.merged("steps"):
        for labels, rows in merged_slices(key, table):
            if trial in (None, labels.trial):
                yield labels, rows
    for folder in reader.step_folders(trial):
        yield folder, folder


def merged_slices(key: str, table: pa.Table) -> Iterator[tuple[StepFolder, pa.Table]]:
    """A merged table by its labels, in the order of its rows, without copying them."""
    import numpy as np

    if not len(table):
        return
    new = np.zeros(len(table), bool)
    new[0] = True
    for label in LABELS:
        codes = table[label].combine_chunks().dictionary_encode().indices.to_numpy()
        new[1:] |= codes[1:] != codes[:-1]
    begins = np.flatnonzero(new)
    values = {label: table[label].take(begins).to_pylist() for label in LABELS}
    rows = table.select([*STEP_COLUMNS, *PLACE])
    for k, (begin, end) in enumerate(zip(begins, [*begins[1:], len(table)], strict=True)):
        yield StepFolder(*(values[label][k] for label in LABELS), key), rows.slice(begin, end - begin)


def placed(part: StepPart, table: pa.Table) -> pa.Table:
    """The rows of a part with the part's place in the order of writing."""
    import pyarrow as pa

    for column, value in zip(PLACE, (part.attempt, part.sequence), strict=True):
        table = table.append_column(
            pa.field(column, pa.int32(), nullable=False), pa.repeat(pa.scalar(value, pa.int32()), len(table))
        )
    return table
