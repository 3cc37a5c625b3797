"""The resume checkpoint of a running trial: private to it, replaced as it goes on, deleted when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch

from depthlaw.platform.ranks import Ranks

POINTER = "latest.json"
LOCK = "lock"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be read and is gone now: the next attempt starts the trial over."""


@contextlib.contextmanager
def held(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Keeps a second process of this machine off the trial; that one calls `waiting`, then waits until it is let go.

    A worker can outlive its killed sweep for some seconds, and two sweeps can ask for one trial. The lock ends with
    the process that holds it, so there is never one to clear away. It does not reach across machines.
    """
    with _locked(folder, waiting):
        try:
            yield
        finally:
            if folder.exists() and [path.name for path in folder.iterdir()] == [LOCK]:
                delete(folder)


def _locked(folder: Path, waiting: Callable[[], None]) -> IO[bytes]:
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(folder / LOCK, "ab")  # noqa: SIM115
        except FileNotFoundError:  # the holder deleted the folder just then
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            return file
        # The holder before may have deleted the folder, and this lock with it, when its trial ended.
        if _is_at(file, folder / LOCK):
            return file
        file.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def save(engine: Any, folder: Path, step: int, state: dict[str, Any], ranks: Ranks) -> None:
    """Writes the engine and `state` after `step` steps, then lets go of the one before.

    The pointer is renamed into place after the checkpoint is complete: killed at any moment, `load` finds a whole one.
    DeepSpeed's own `latest` file is written in place and can be seen empty, so it is not used.
    """
    tag = f"step{step}"
    engine.save_checkpoint(str(folder), tag, client_state=state, save_latest=False)
    ranks.barrier()  # the others' files are complete too
    if not ranks.first:
        return
    sizes = {path.name: path.stat().st_size for path in (folder / tag).iterdir()}
    stage = engine.zero_optimization_stage()
    write_pointer(folder, {"tag": tag, "zero_stage": stage, "world": ranks.world, "sizes": sizes})
    for old in folder.glob("step*"):
        if old.name != tag:
            shutil.rmtree(old, ignore_errors=True)


def write_pointer(folder: Path, pointer: dict[str, Any]) -> None:
    temporary = folder / f".{POINTER}.tmp"
    temporary.write_text(json.dumps(pointer))
    os.replace(temporary, folder / POINTER)


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
    every later attempt too; the engine may be half put back and is not to be used.
    """
    text = ranks.agreed((folder / POINTER).read_text() if ranks.first and (folder / POINTER).exists() else None)
    if text is None:
        return
    try:
        pointer = json.loads(text)
        # DeepSpeed takes what it finds: a missing file, or another stage's, would lose the optimiser's moments unsaid.
        stage = engine.zero_optimization_stage()
        if pointer["zero_stage"] != stage:
            raise ValueError(f"it is of ZeRO stage {pointer['zero_stage']}, and this run has {stage}")
        for name, size in pointer["sizes"].items():
            if (found := (folder / pointer["tag"] / name).stat().st_size) != size:
                raise ValueError(f"{name} has {found} of {size} bytes")
        own = _hyperparameters(engine)
        _, state = engine.load_checkpoint(str(folder), pointer["tag"])
        _mend(engine, own)
        restore(state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        delete_contents(folder)
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


def delete(folder: Path) -> None:
    delete_contents(folder)
    # The lock goes last: whoever takes the next one finds nothing of this trial being deleted any more.
    with contextlib.suppress(OSError):
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def delete_contents(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)
