"""The metrics store: a folder or a bucket that keeps every step and every outcome of every trial, in Parquet.

    STORE/store.json                                     marker, with the schema version
    STORE/steps/experiment=E/topology=T/trial=HASH/part-ATTEMPT-SEQUENCE.parquet
                                                         rows of (step, name, value, attempt)
    STORE/trials/HASH-ATTEMPT-STATUS.parquet             one row
    STORE/plans/EXPERIMENT.json                          the trials that an experiment asks for
    STORE/leases/HASH-ATTEMPT.json                       who runs it now
    STORE/merged/                                        what `store_compact` made of the parts of many trials
    STORE/checkpoints/HASH/                              what the running trial resumes from

Any number of processes may write and read at once, without locks: a part appears whole or not at all. Names are
percent-encoded, so pyarrow, duckdb and polars read `steps/` as a hive layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthlaw.platform.store_files import StoreError, decode, encode
from depthlaw.platform.store_layout import Reader, step_folder, step_part, trial_part
from depthlaw.platform.store_lease import Held, Lease, highest, hold, running
from depthlaw.platform.store_open import MARKER, check_is_store, files_at, local_folder, make
from depthlaw.platform.store_parts import (
    STATUSES,
    STEP_COLUMNS,
    TRIAL_COLUMNS,
    is_whole,
    last_rows,
    schema,
    steps_table,
    to_bytes,
    trial_table,
)

if TYPE_CHECKING:
    import pandas as pd

PATIENCE_S = 20.0  # how long a bucket that does not answer is asked again

__all__ = ["STATUSES", "STEP_COLUMNS", "TRIAL_COLUMNS", "Store", "StoreError"]


class Store:
    """Opens a store that exists; `Store.create` makes one. Cheap to open and safe to pickle.

    Parts that cannot be read (truncated, empty, foreign, written by a newer depthlaw) never fail a query: they are
    left out with a warning that names them, and counted in `unreadable`.
    """

    def __init__(self, path: str | Path, patience_s: float = PATIENCE_S) -> None:
        """`path` is a folder or s3://bucket/prefix; one that does not answer is asked again for `patience_s`.

        Raises StoreError if there is no store there, or a newer depthlaw wrote it.
        """
        self._files = files_at(path, patience_s)
        self.path = self._files.root  # a Path, or the address of a bucket
        self.unreadable_parts: dict[str, str] = {}  # key -> reason, over all queries of this object
        check_is_store(self._files, path)

    @classmethod
    def create(cls, path: str | Path) -> Store:
        """Makes a store, or opens the one that is there. Raises StoreError as opening does, or if it cannot write."""
        make(files_at(path, PATIENCE_S))
        return cls(path)

    @classmethod
    def find(cls, path: str | Path) -> Store | None:
        """The store at `path`; None if there is none. Raises StoreError as opening one does."""
        return cls(path) if files_at(path, PATIENCE_S).exists(MARKER) else None

    @property
    def unreadable(self) -> int:
        """How many files the queries of this object left out."""
        return len(self.unreadable_parts)

    @property
    def local_folder(self) -> Path:
        """Where a running sweep keeps what is no result: see `store_open`."""
        return local_folder(self._files)

    def checkpoint_dir(self, trial: str) -> Path:
        """Where the trial may keep checkpoints. Only the path: nothing is made."""
        return self.local_folder / "checkpoints" / encode(trial, "trial")

    def write_steps(
        self,
        experiment: str,
        topology: str,
        trial: str,
        attempt: int,
        sequence: int,
        rows: Iterable[tuple[int, str, float]],
    ) -> None:
        """Commits rows of (step, name, value) as one part. NaN and infinities are data. No rows, no part.

        Committing the same part again is fine. Raises StoreError if a different one has this attempt and sequence, if a
        row is not valid or the disk refuses.
        """
        key = step_part(step_folder(experiment, topology, trial), attempt, sequence)
        table = steps_table(rows, attempt)
        if not len(table):
            return
        data = to_bytes(table)
        if self._files.exists(key) and self._files.read(key) != data:
            raise StoreError(
                f"trial {trial} attempt {attempt} has a different part {sequence} already: is the trial running twice? "
                "Take a new attempt from next_attempt"
            )
        self._files.write(key, data)

    def write_trial(self, row: Mapping[str, Any]) -> None:
        """Commits the outcome of one attempt. Columns as in `TRIAL_COLUMNS`; those left out are null.

        One attempt may leave several rows if their statuses differ; `trials` chooses. Raises StoreError naming unknown,
        missing or badly typed columns, for a bad status or a val_loss that contradicts it, or if the disk refuses.
        """
        table = trial_table(row)
        # The status is in the name too, so that `statuses` need not decode every part.
        self._files.write(trial_part(row["trial"], row["attempt"], row["status"]), to_bytes(table))

    def next_attempt(self, trial: str) -> int:
        """One more than any attempt that left a row, a step part or a lease, readable or not; 0 for a new trial."""
        return max(self._unused_attempt(trial), highest(self._files, trial) + 1)

    def _unused_attempt(self, trial: str) -> int:
        reader = Reader(self._files)

        def used() -> list[int]:
            # Merged steps are of attempts that have a row.
            found = [number for name, number, _ in reader.merged_trials() if name == trial]
            found += [part.attempt for part in reader.trial_parts() if part.trial == trial]
            for folder in reader.step_folders(trial):
                found += [part.attempt for part in reader.step_parts(folder)]
            return found

        return max(reader.consistent(used), default=-1) + 1

    def lease(self, trial: str, waiting: Callable[[str], None] = lambda owner: None) -> AbstractContextManager[Lease]:
        """The right to run the trial's next attempt, for as long as the context lasts: see `store_lease`.

        Waits while another process has it, and calls `waiting` with that one's name first.
        """
        return hold(self._files, trial, lambda: self._unused_attempt(trial), waiting)

    def running(self) -> list[Held]:
        """The leases whose owners are alive: the trials that are running now, on whatever machine."""
        return running(self._files)

    def compact(self, trial: str) -> int:
        """Merges the step parts of a trial that has ended into one for each experiment. Returns how many files went.

        The merged rows replace the last part in one rename, and then the earlier parts go. Killed in between, both are
        there and the reading view drops the copies. The merged part has the name of the last one in it, so what is
        written later still wins. Unreadable parts stay. Raises StoreError.
        """
        reader = Reader(self._files)
        removed = 0
        for folder in reader.step_folders(trial):
            parts = reader.step_tables(folder)
            if len(parts) > 1:
                merged = last_rows([table for _, table in parts], per_attempt=True)
                self._files.write(parts[-1][0].key, to_bytes(merged))
                for part, _ in parts[:-1]:
                    self._files.delete(part.key)
                removed += len(parts) - 1
        self._report(reader)
        return removed

    def attempts(self) -> pd.DataFrame:
        """Every row of every attempt, columns as in `TRIAL_COLUMNS`, sorted by trial and attempt.

        Whole-number columns that may be null are float64, NaN for null, whether or not a null is there.
        """
        import pyarrow as pa

        reader = Reader(self._files)
        found = reader.consistent(lambda: [*reader.merged("trials"), *reader.trial_tables()])
        table = pa.concat_tables([schema("trials").empty_table(), *(table for _, table in found)])
        self._report(reader)
        maybe_null = [name for name, kind in TRIAL_COLUMNS.items() if kind == "int64?"]
        frame: pd.DataFrame = table.to_pandas().astype(dict.fromkeys(maybe_null, "float64"))
        key = ["trial", "attempt", "status"]  # a row can be in its part and merged, if a compaction was killed
        return frame.drop_duplicates(key, keep="last").sort_values(key, ignore_index=True)

    def trials(self) -> pd.DataFrame:
        """One row per trial: its last finished attempt, or its last attempt if none finished.

        A finished attempt is a complete measurement. What comes after it (a second sweep that was stopped, a repeat
        that lost its node) says nothing about the loss, so it must not turn a result into a gap.
        """
        frame = self.attempts()
        ranked = frame.assign(finished=frame["status"] == "finished").sort_values(["finished", "attempt", "status"])
        last = ranked.drop_duplicates("trial", keep="last").drop(columns="finished")
        return last.sort_values(["experiment", "topology", "trial"], ignore_index=True)

    def statuses(self) -> dict[str, str]:
        """Trial -> the status that `trials` shows. Cheap: goes by file names, and leaves out truncated parts."""
        reader = Reader(self._files)

        def outcomes() -> list[tuple[str, int, str]]:
            found = list(reader.merged_trials())
            for part, data in reader.trial_bytes():
                if is_whole(data):
                    found.append((part.trial, part.attempt, part.status))
                else:
                    reader.problems.setdefault(part.key, "empty or not a whole Parquet file")
            return found

        best: dict[str, tuple[bool, int, str]] = {}
        for trial, attempt, status in reader.consistent(outcomes):
            rank = (status == "finished", attempt, status)
            best[trial] = max(rank, best.get(trial, rank))
        self._report(reader)
        return {trial: status for trial, (_, _, status) in best.items()}

    def steps(
        self,
        trial: str | None = None,
        experiment: str | None = None,
        topology: str | None = None,
        names: str | Collection[str] | None = None,
    ) -> pd.DataFrame:
        """The measurements: trial, experiment, topology, step, name, value, attempt; sorted by trial, step, name.

        One row per (trial, step, name): the last attempt's, and within an attempt the one written last. So an attempt
        that resumes from a checkpoint replaces the steps it repeats and keeps those before. The filters select from
        that view and do not change which row wins. Every metric of a large store is a lot of memory: give `names`.
        """
        from depthlaw.platform.store_view import view

        reader = Reader(self._files)
        chosen = None if names is None else [names] if isinstance(names, str) else list(names)
        table = reader.consistent(lambda: view(reader, trial, experiment, topology, chosen))
        self._report(reader)
        frame: pd.DataFrame = table.to_pandas()
        return frame

    def write_plan(self, experiment: str, trials: Iterable[Mapping[str, Any]]) -> None:
        """Commits what an experiment asks for: for each trial its hash (`trial`) and the columns of its cell.

        It replaces the experiment's earlier plan; trials that another experiment ran already are in it all the same.
        """
        data = json.dumps({"experiment": experiment, "trials": list(trials)}, sort_keys=True).encode()
        self._files.write(f"plans/{encode(experiment, 'experiment')}.json", data)

    def plan(self, experiment: str) -> list[dict[str, Any]]:
        """The trials of an experiment's plan. Raises StoreError naming the experiments that there are."""
        try:
            text = self._files.read(f"plans/{encode(experiment, 'experiment')}.json")
        except OSError:
            text = b""
        try:
            data = json.loads(text)
        except ValueError:
            known = ", ".join(self.experiments()) or "none"
            raise StoreError(f"store {self.path} has no experiment {experiment!r}; it has {known}") from None
        return list(data["trials"])

    def experiments(self) -> list[str]:
        """Names of the experiments with a plan, sorted."""
        _, names = self._files.listing("plans")
        return sorted(decode(name.removesuffix(".json")) for name in names if name.endswith(".json"))

    def cells(self, experiment: str | None = None) -> pd.DataFrame:
        """One row per (recipe, topology, shape, tokens) with the loss at its best lr, for all or for one experiment.

        Nothing is dropped where training broke. The columns are described at `store_cells.cells`. Raises StoreError
        for an experiment that has no plan.
        """
        from depthlaw.platform.store_cells import cells

        trials = self.trials()
        if experiment is not None:
            trials = trials[trials["trial"].isin([t["trial"] for t in self.plan(experiment)])]
        return cells(trials)

    def _report(self, reader: Reader) -> None:
        self.unreadable_parts.update(reader.problems)
        reader.warn()
