"""The resume checkpoint of a running trial: private to it, replaced as it goes on, deleted when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

POINTER = "latest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be read and is gone now: the next attempt starts the trial over."""


def save(engine: Any, folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes the engine and `state` after `step` steps, then lets go of the one before.

    The pointer is renamed into place after the checkpoint is complete: killed at any moment, `load` finds a whole one.
    DeepSpeed's own `latest` file is written in place and can be seen empty, so it is not used.
    """
    tag = f"step{step}"
    engine.save_checkpoint(str(folder), tag, client_state=state, save_latest=False)
    sizes = {path.name: path.stat().st_size for path in (folder / tag).iterdir()}
    pointer = {"tag": tag, "zero_stage": engine.zero_optimization_stage(), "sizes": sizes}
    temporary = folder / f".{POINTER}.tmp"
    temporary.write_text(json.dumps(pointer))
    os.replace(temporary, folder / POINTER)
    for old in folder.glob("step*"):
        if old.name != tag:
            shutil.rmtree(old, ignore_errors=True)


def load(engine: Any, folder: Path, restore: Callable[[dict[str, Any]], None]) -> None:
    """Puts the engine back to what was saved last and hands the state to `restore`; does nothing if there is none.

    Raises CheckpointError if it is damaged, or of another ZeRO stage or version. It is deleted then, for it would fail
    every later attempt too; the engine may be half put back and is not to be used.
    """
    try:
        text = (folder / POINTER).read_text()
    except FileNotFoundError:
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


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the last one's parent goes too, where it is empty
        folder.parent.rmdir()
