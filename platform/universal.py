"""A resume checkpoint for another number of ranks than wrote it: DeepSpeed's universal checkpoint, made when needed."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

from depthlaw.platform.checkpoint import CheckpointError, check_private, delete, point_to, pointer_of


def fit_to(folder: Path, world: int, zero_stage: int) -> None:
    """Converts the trial's checkpoint, if there is one and it is of another world size. One process, before the ranks.

    ZeRO shards the optimiser by ranks; without it (stage 0) the checkpoint is the same for any number of them. Raises
    CheckpointError if the conversion fails; the checkpoint is deleted then. Raises ForeignCheckpointError if another
    user may have written it.
    """
    pointer = pointer_of(folder)
    if (
        not pointer
        or 0 in (zero_stage, pointer.get("zero_stage"))
        or pointer.get("universal")
        or pointer.get("world", 1) == world
    ):
        return
    check_private(folder)  # what is converted is unpickled
    from depthlaw.platform.engine import prepare

    prepare()
    from deepspeed.checkpoint import ds_to_universal

    source, target = folder / pointer["tag"], folder / f"{pointer['tag']}-universal"
    arguments = SimpleNamespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,  # what it asks for is written by Megatron, not by an engine
    )
    shutil.rmtree(target, ignore_errors=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            ds_to_universal.main(arguments)
    except Exception as error:
        delete(folder)
        reason = next(iter(str(error).strip().splitlines()), "")
        raise CheckpointError(
            f"checkpoint {folder} of {pointer.get('world')} ranks cannot be converted for {world} "
            f"({type(error).__name__}: {reason}); it was deleted, and the trial starts over when it is run again"
        ) from error
    about = {k: v for k, v in pointer.items() if k not in ("tag", "sizes")}
    point_to(folder, target.name, about | {"universal": True})
