"""Which parts a store holds and what is in them: names first, bytes only where asked for."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from depthlaw.platform.store_files import LocalFiles, StoreError, decode, encode
from depthlaw.platform.store_parts import STATUSES, from_bytes

if TYPE_CHECKING:
    import pyarrow as pa

    from depthlaw.platform.store_s3 import S3Files

_STEP_PART = re.compile(r"part-(\d+)-(\d+)\.parquet", re.ASCII)
_TRIAL_PART = re.compile(rf"(.+)-(\d+)-({'|'.join(STATUSES)})\.parquet", re.ASCII)
_MERGED = re.compile(r"(steps|trials)-[0-9a-f]{16}\.parquet", re.ASCII)
_FOREIGN = "not a part of a store"
_TRIES = [False] * 9 + [True]  # the last one takes a part that is listed and not there for one that cannot be read
_READERS = 2  # threads: they overlap waiting for the disk; more only contend for the interpreter
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class StepFolder(NamedTuple):
    """Where one trial of one experiment keeps its step parts."""

    experiment: str
    topology: str
    trial: str
    key: str


class StepPart(NamedTuple):
    """Parts compare in the order in which they were written: the rows of a later one win within an attempt."""

    attempt: int
    sequence: int
    key: str


class TrialPart(NamedTuple):
    trial: str
    attempt: int
    status: str
    key: str


def step_folder(experiment: str, topology: str, trial: str) -> str:
    """The key of the folder. Raises StoreError for a name that cannot be part of one."""
    labels = (("experiment", experiment), ("topology", topology), ("trial", trial))
    return "/".join(["steps", *(f"{label}={encode(text, label)}" for label, text in labels)])


def step_part(folder: str, attempt: int, sequence: int) -> str:
    return f"{folder}/part-{_count('attempt', attempt)}-{_count('sequence', sequence)}.parquet"


def trial_part(trial: str, attempt: int, status: str) -> str:
    return f"trials/{encode(trial, 'trial')}-{_count('attempt', attempt)}-{status}.parquet"


def _count(what: str, value: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= value < 2**31:
        raise StoreError(f"{what} is {value!r}; it must be a whole number from 0")
    return value.__index__()


class Reader:
    """One query's look at the files. What cannot be read goes to `problems` (key -> reason) and fails no query."""

    def __init__(self, files: LocalFiles | S3Files) -> None:
        self.files = files
        self.problems: dict[str, str] = {}
        self._last = True

    def consistent(self, read: Callable[[], _Result]) -> _Result:
        """What `read` finds, tried again where parts were moved into a merged file under it.

        Such a file is whole before any of its parts goes: if no new one has come, nothing was missed.
        Raises StoreError if that happens again and again.
        """
        for last in _TRIES:
            before, self.problems, self._last = self.files.listing("merged"), {}, last
            with contextlib.suppress(FileNotFoundError):
                found = read()
                if self.files.listing("merged") == before:
                    return found
        raise StoreError(f"{self.files.root} is being compacted again and again: try later")

    def merged(self, kind: str) -> list[tuple[str, pa.Table]]:
        """(key, table) of the merged files of `steps` or `trials` that can be read."""
        folders, names = self.files.listing("merged")
        self._foreign("merged", folders + [name for name in names if not _MERGED.fullmatch(name)])
        keys = [f"merged/{name}" for name in names if (match := _MERGED.fullmatch(name)) and match[1] == kind]
        schema_kind = "merged" if kind == "steps" else "trials"
        tables = [(key, self._decode(key, self._bytes(key), schema_kind)) for key in keys]
        return [(key, table) for key, table in tables if table is not None]

    def merged_trials(self) -> Iterator[tuple[str, int, str]]:
        """(trial, attempt, status) of every merged row."""
        for _, table in self.merged("trials"):
            columns = (table[name].to_pylist() for name in ("trial", "attempt", "status"))
            yield from zip(*columns, strict=True)

    def trial_parts(self) -> list[TrialPart]:
        folders, names = self.files.listing("trials")
        self._foreign("trials", folders)
        parts = []
        for name in names:
            if match := _TRIAL_PART.fullmatch(name):
                parts.append(TrialPart(decode(match[1]), int(match[2]), match[3], f"trials/{name}"))
            else:
                self._foreign("trials", [name])
        return parts

    def step_folders(self, trial: str | None = None) -> Iterator[StepFolder]:
        """All of them, or those of one trial: an experiment that takes up another's trial has a folder of its own."""
        for experiment, experiment_key in self._partitions("steps", "experiment"):
            for topology, topology_key in self._partitions(experiment_key, "topology"):
                if trial is None:
                    for name, key in self._partitions(topology_key, "trial"):
                        yield StepFolder(experiment, topology, name, key)
                elif self.files.has_folder(key := f"{topology_key}/trial={encode(trial, 'trial')}"):
                    yield StepFolder(experiment, topology, trial, key)

    def step_parts(self, folder: StepFolder) -> list[StepPart]:
        """In the order of writing."""
        folders, names = self.files.listing(folder.key)
        self._foreign(folder.key, folders)
        parts = []
        for name in names:
            if match := _STEP_PART.fullmatch(name):
                parts.append(StepPart(int(match[1]), int(match[2]), f"{folder.key}/{name}"))
            else:
                self._foreign(folder.key, [name])
        return sorted(parts)

    def step_tables(self, folder: StepFolder) -> list[tuple[StepPart, pa.Table]]:
        """The parts that can be read, in the order of writing."""
        # A part that vanishes between the listing and the read went into a later one, which may be newer than the
        # listing: then only a fresh look has all rows. In order, so that the part merged into is read after the others.
        for last in _TRIES:
            self._last = last
            with contextlib.suppress(FileNotFoundError):
                parts = [(part, self._bytes(part.key)) for part in self.step_parts(folder)]
                tables = [(part, self._decode(part.key, data, "steps")) for part, data in parts]
                return [(part, table) for part, table in tables if table is not None]
        raise AssertionError("the last try takes what is there")

    def trial_bytes(self) -> list[tuple[TrialPart, bytes]]:
        """Every trial part with what is in it: nothing, and a problem, if it cannot be read."""
        parts = self.trial_parts()
        return list(zip(parts, in_threads(lambda part: self._bytes(part.key), parts), strict=True))

    def trial_tables(self) -> list[tuple[TrialPart, pa.Table]]:
        """The parts that can be read."""
        # Not decoded in threads: parts this small would contend for the interpreter more than they gain.
        tables = [(part, self._decode(part.key, data, "trials")) for part, data in self.trial_bytes()]
        return [(part, table) for part, table in tables if table is not None]

    def warn(self) -> None:
        """Says once what was left out, naming the caller of the store's method."""
        if self.problems:
            shown = [f"{key} ({reason})" for key, reason in sorted(self.problems.items())]
            more = f" and {len(shown) - 10} more" if len(shown) > 10 else ""
            text = f"left out what cannot be read in {self.files.root}: {', '.join(shown[:10])}{more}"
            warnings.warn(text, stacklevel=4)

    def _bytes(self, key: str) -> bytes:
        """Nothing, and a problem, if it cannot be read. Raises FileNotFoundError where another look may help."""
        try:
            return self.files.read(key)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not self._last:
                raise
            self.problems[key] = error.strerror or str(error)
            return b""

    def _decode(self, key: str, data: bytes, kind: str) -> pa.Table | None:
        try:
            return from_bytes(data, kind)
        except ValueError as error:
            self.problems.setdefault(key, str(error))
            return None

    def _partitions(self, parent: str, label: str) -> Iterator[tuple[str, str]]:
        """(decoded value, key) of the folders `label=value` in `parent`."""
        folders, names = self.files.listing(parent)
        self._foreign(parent, names)
        for name in folders:
            found, _, value = name.partition("=")
            if found == label and value:
                yield decode(value), f"{parent}/{name}"
            else:
                self._foreign(parent, [name])

    def _foreign(self, parent: str, names: list[str]) -> None:
        self.problems.update({f"{parent}/{name}": _FOREIGN for name in names})


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(function, items))
