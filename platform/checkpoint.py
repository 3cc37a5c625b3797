"""The resume checkpoint of a running trial: private to it, replaced as it goes on, deleted when it ends.

DeepSpeed's checkpoints are pickles: who can write one runs code here. So their folders are open to their owner alone,
and nothing is read that another user could have put there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

POINTER = "latest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be read and is gone now: the next attempt starts the trial over."""


class ForeignCheckpointError(CheckpointError):
    """A checkpoint that another user may have written. It is neither read nor deleted."""


def save(engine: Any, folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes the engine and `state` after `step` steps, then lets go of the one before.

    The pointer is renamed into place after the checkpoint is complete: killed at any moment, `load` finds a whole one.
    DeepSpeed's own `latest` file is written in place and can be seen empty, so it is not used.
    """
    tag = f"step{step}"
    _make_private(folder)
    engine.save_checkpoint(str(folder), tag, client_state=state, save_latest=False)
    for path in (folder / tag, *(folder / tag).iterdir()):
        path.chmod(0o700 if path.is_dir() else 0o600)
    sizes = {path.name: path.stat().st_size for path in (folder / tag).iterdir()}
    pointer = {"tag": tag, "zero_stage": engine.zero_optimization_stage(), "sizes": sizes}
    temporary = folder / f".{POINTER}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(pointer))
    os.replace(temporary, folder / POINTER)
    for old in folder.glob("step*"):
        if old.name != tag:
            shutil.rmtree(old, ignore_errors=True)


def load(engine: Any, folder: Path, restore: Callable[[dict[str, Any]], None]) -> None:
    """Puts the engine back to what was saved last and hands the state to `restore`; does nothing if there is none.

    Raises CheckpointError if it is damaged, or of another ZeRO stage or version. It is deleted then, for it would fail
    every later attempt too; the engine may be half put back and is not to be used. Raises ForeignCheckpointError if
    another user may have written it.
    """
    if not (folder / POINTER).exists():
        return
    _check_private(folder)
    text = (folder / POINTER).read_text()
    try:
        pointer = json.loads(text)
        # DeepSpeed takes what it finds: a missing file, or another stage's, would lose the optimiser's moments unsaid.
        stage = engine.zero_optimization_stage()
        if pointer["zero_stage"] != stage:
            raise ValueError(f"it is of ZeRO stage {pointer['zero_stage']}, and this run has {stage}")
        for name, size in pointer["sizes"].items():
            if (found := (folder / pointer["tag"] / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} of {size} bytes")
        _, state = engine.load_checkpoint(str(folder), pointer["tag"])
        restore(state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        delete(folder)
        reason = next(iter(str(error).strip().splitlines()), "")
        raise CheckpointError(
            f"checkpoint {folder} cannot be used ({type(error).__name__}: {reason}); it was deleted, and the trial "
            "starts over when it is run again"
        ) from error


def _make_private(folder: Path) -> None:
    """Makes the folder, for its owner alone. Raises ForeignCheckpointError if it is another's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder)
    folder.chmod(0o700)


def _check_private(folder: Path) -> None:
    """Raises ForeignCheckpointError naming the first thing in it that is another user's, or that others may change."""
    mine = _me(folder)
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        if stat.S_ISLNK(found.st_mode):
            wrong = "is a link"
        elif found.st_uid != mine:
            wrong = f"belongs to user {found.st_uid}, not to user {mine} who runs this"
        elif path == folder and found.st_mode & 0o022:  # what is below is out of others' reach
            wrong = f"may be changed by others (mode {stat.S_IMODE(found.st_mode):o})"
        else:
            continue
        raise ForeignCheckpointError(
            f"checkpoint {path} {wrong}: resuming from it would run its code. Delete {folder} to start the trial over"
        )


def _me(folder: Path) -> int:
    """This user, as the file system of the folder sees it: some take root for nobody."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".") as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:  # not writable, so not of this user
        return os.geteuid()


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the last one's parent goes too, where it is empty
        folder.parent.rmdir()
