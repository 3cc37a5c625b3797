"""A folder for as long as a process works in it, which the next one removes if that process was killed."""

from __future__ import annotations

import fcntl
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def own_folder(root: Path) -> Iterator[Path]:
    # The lock lives as long as this process: who can take it knows that the folder's owner is dead.
    while True:
        folder = root / f".own-{uuid.uuid4().hex[:12]}"
        lock = folder.with_suffix(".lock").open("ab")
        if _lock(lock) is not False:
            break
        lock.close()  # another process looked whether it is abandoned just before it was taken: take another name
    try:
        folder.mkdir(mode=0o700)  # what is in it is unpickled
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".lock").unlink(missing_ok=True)
        lock.close()


def remove_abandoned(root: Path) -> None:
    for path in root.glob(".own-*.lock"):
        with path.open("ab") as lock:
            if _lock(lock):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)


def _lock(file: IO[bytes]) -> bool | None:
    """Whether this process holds the lock now; None on a file system without locks: nothing is removed there."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
