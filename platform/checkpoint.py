"""The resume checkpoint of a running trial: private to it, replaced as it goes on, deleted when it ends."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

POINTER = "latest.json"


def save(engine: Any, folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes the engine and `state` after `step` steps, then lets go of the one before.

    The pointer is renamed into place after the checkpoint is complete: killed at any moment, `load` finds a whole one.
    DeepSpeed's own `latest` file is written in place and can be seen empty, so it is not used.
    """
    tag = f"step{step}"
    engine.save_checkpoint(str(folder), tag, client_state=state, save_latest=False)
    temporary = folder / f".{POINTER}.tmp"
    temporary.write_text(json.dumps({"tag": tag}))
    os.replace(temporary, folder / POINTER)
    for old in folder.glob("step*"):
        if old.name != tag:
            shutil.rmtree(old, ignore_errors=True)


def load(engine: Any, folder: Path) -> dict[str, Any] | None:
    """The state saved last, with the engine put back to it; None if there is none."""
    try:
        tag = json.loads((folder / POINTER).read_text())["tag"]
    except FileNotFoundError:
        return None
    _, state = engine.load_checkpoint(str(folder), tag)
    return dict(state)


def delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
