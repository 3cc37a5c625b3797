"""Where a store is, and whether it is one."""

from __future__ import annotations

import json
import os
from pathlib import Path

from depthlaw.platform.store_files import LocalFiles, StoreError, encode
from depthlaw.platform.store_parts import SCHEMA_VERSION
from depthlaw.platform.store_s3 import ADDRESS, S3Files

MARKER = "store.json"


def files_at(path: str | Path, patience_s: float) -> LocalFiles | S3Files:
    """The files of a folder or an address, whether or not a store is there. Raises StoreError for neither."""
    text = str(path)
    if ADDRESS.fullmatch(text) or "://" in text:
        return S3Files(text, patience_s)
    try:
        # Trials run in a temporary working directory, so a store never depends on it.
        return LocalFiles(Path(path).expanduser().absolute())
    except (OSError, RuntimeError) as error:
        raise StoreError(f"cannot use {path} as a path: {error}") from None


def make(files: LocalFiles | S3Files) -> None:
    """Marks a folder or prefix as a store, unless it is one. Raises StoreError if it cannot be one."""
    if files.kind() != "file" and not files.exists(MARKER):
        if isinstance(files, S3Files):
            files.check_conditional_writes()
        files.write(MARKER, json.dumps({"format": "depthlaw", "schema_version": SCHEMA_VERSION}).encode())


def check_is_store(files: LocalFiles | S3Files, path: str | Path) -> None:
    """Raises StoreError if there is no store, or a newer depthlaw wrote it; `path` is what the user calls it."""
    hint = f"`depthlaw sweep CONFIG --storage {path}` makes one"
    kind = files.kind()
    if kind == "missing":
        raise StoreError(f"there is no store at {path}: {hint}")
    if kind == "file":
        raise StoreError(f"{path} is a file, and a store is a folder: choose another path")
    try:
        marker = files.read(MARKER)
    except FileNotFoundError:
        raise StoreError(f"{path} is a folder but not a store, for it has no {MARKER}: {hint}") from None
    except OSError as error:
        raise StoreError(f"cannot read {files.root}/{MARKER}: {error.strerror}") from None
    try:
        version = json.loads(marker)["schema_version"]
    except (ValueError, KeyError, TypeError):
        version = None
    if not isinstance(version, int):
        raise StoreError(f"{path} is not a store of depthlaw: its {MARKER} has no schema_version")
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema_version {version} and this depthlaw reads up to {SCHEMA_VERSION}: upgrade depthlaw"
        )


def local_folder(files: LocalFiles | S3Files) -> Path:
    """Where a running sweep keeps what is no result: the store itself, or for a bucket a folder of this user.

    Resume checkpoints are among it: of a bucket's store, a trial that goes on on another machine starts over.
    """
    if isinstance(files, LocalFiles):
        return files.root
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "depthlaw" / encode(files.root)
