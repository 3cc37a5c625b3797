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

from depthlaw.platform.ranks import Ranks

POINTER = "latest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be read and is gone now: the next attempt starts the trial over."""


class UnwrittenCheckpointError(RuntimeError):
    """A checkpoint that the disk refused. The one before it is still there."""


class ForeignCheckpointError(CheckpointError):
    """A checkpoint that another user may have written. It is neither read nor deleted."""


def save(engine: Any, folder: Path, step: int, state: dict[str, Any], ranks: Ranks) -> None:
    """Writes the engine and `state` after `step` steps, then lets go of the one before.

    The pointer is renamed into place after the checkpoint is complete: killed at any moment, `load` finds a whole one.
    DeepSpeed's own `latest` file is written in place and can be seen empty, so it is not used.
    Raises UnwrittenCheckpointError, and leaves nothing of it, if the disk refuses.
    """
    tag = f"step{step}"
    try:
        _make_private(folder)
        engine.save_checkpoint(str(folder), tag, client_state=state, save_latest=False)
        ranks.barrier()  # the others' files are complete too
        if ranks.first:
            point_to(folder, tag, {"zero_stage": engine.zero_optimization_stage(), "world": ranks.world})
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # not of torch's writer of files
            raise
        if pointer_of(folder).get("tag") != tag:
            shutil.rmtree(folder / tag, ignore_errors=True)  # a full disk needs the room for what is written next
        reason = (isinstance(error, OSError) and error.strerror) or "the disk is full, or refuses it"
        raise UnwrittenCheckpointError(f"cannot write checkpoint {folder / tag}: {reason}") from error


def point_to(folder: Path, tag: str, about: dict[str, Any]) -> None:
    """Makes folder/tag, which is complete, the checkpoint; others go. `about` stands in the pointer."""
    below = sorted((folder / tag).rglob("*"))
    for path in (folder / tag, *below):
        path.chmod(0o700 if path.is_dir() else 0o600)
    sizes = {str(path.relative_to(folder / tag)): path.stat().st_size for path in below if path.is_file()}
    temporary = folder / f".{POINTER}.tmp"
    temporary.touch(mode=0o600)
    temporary.write_text(json.dumps(about | {"tag": tag, "sizes": sizes}))
    os.replace(temporary, folder / POINTER)
    for old in folder.glob("step*"):
        if old.name != tag:
            shutil.rmtree(old, ignore_errors=True)


def pointer_of(folder: Path) -> dict[str, Any]:
    """What the last checkpoint is: empty if there is none, or none that can be read (`load` says so)."""
    try:
        found = json.loads((folder / POINTER).read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def load(engine: Any, folder: Path, restore: Callable[[dict[str, Any]], None], ranks: Ranks) -> None:
    """Puts the engine back to what was saved last and hands the state to `restore`; does nothing if there is none.

    Raises CheckpointError if it is damaged, or of another ZeRO stage or version. It is deleted then, for it would fail
    every later attempt too; the engine may be half put back and is not to be used. Raises ForeignCheckpointError if
    another user may have written it.
    """
    text = ranks.agreed((folder / POINTER).read_text() if ranks.first and (folder / POINTER).exists() else None)
    if text is None:
        return
    check_private(folder)
    try:
        pointer = json.loads(text)
        # DeepSpeed takes what it finds: a missing file, or another stage's, would lose the optimiser's moments unsaid.
        stage = engine.zero_optimization_stage()
        if pointer["zero_stage"] != stage:
            raise ValueError(f"it is of ZeRO stage {pointer['zero_stage']}, and this run has {stage}")
        for name, size in pointer["sizes"].items():
            if (found := (folder / pointer["tag"] / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} of {size} bytes")
        own = _hyperparameters(engine) if pointer.get("universal") else None
        _, state = engine.load_checkpoint(str(folder), pointer["tag"])
        if own is not None:
            _mend(engine, own)
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


def _hyperparameters(engine: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]


def _mend(engine: Any, own: list[dict[str, Any]]) -> None:
    """Two mistakes of ZeRO 3 with a universal checkpoint and more than one group of tensors.

    Every group gets the hyperparameters of the first, so its weight decay too; and all share one tensor that counts
    AdamW's steps, which then counts each step once for each group.
    """
    for group, given in zip(engine.optimizer.param_groups, own, strict=True):
        group.update(given)
    for kept in engine.basic_optimizer.state.values():
        if isinstance(kept.get("step"), torch.Tensor):
            kept["step"] = kept["step"].clone()


def _make_private(folder: Path) -> None:
    """Makes the folder, for its owner alone. Raises ForeignCheckpointError if it is another's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)
    folder.chmod(0o700)


def check_private(folder: Path) -> None:
    """Raises ForeignCheckpointError naming the first thing in it that is another user's, or that others may change."""
    mine = _me(folder)
    for path in (folder, *folder.rglob("*")):
        try:
            found = path.lstat()
        except FileNotFoundError:  # another rank's look at whose the folder is
            continue
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
