"""A store as one table for other programs."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from depthlaw.platform.store import Store, StoreError

KINDS = ("trials", "steps")
SUFFIXES = (".parquet", ".csv")


def export(store: Store, target: Path, kind: str) -> int:
    """Writes `trials` (one row a trial) or `steps` (the reading view); returns the number of rows. Raises StoreError.

    The file appears whole, in place of what was there.
    """
    if kind not in KINDS:
        raise StoreError(f"what is {kind!r}; it must be one of {', '.join(KINDS)}")
    if target.suffix not in SUFFIXES:
        raise StoreError(f"cannot export to {target}: the file must end in {' or '.join(SUFFIXES)}")
    frame = store.trials() if kind == "trials" else store.steps()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if target.suffix == ".csv":
            frame.to_csv(temporary, index=False)  # floats by their shortest exact text
        else:
            frame.to_parquet(temporary, index=False)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
    return len(frame)
