"""Where a store's bytes live: every touch of the filesystem is in `LocalFiles`.

Files are named by a key with "/" between folders, as objects in a bucket are, and a write appears whole or not at all.
A variant for object storage needs the same six methods: `write` is one PUT there, and `listing` a delimited list.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from urllib.parse import quote, unquote


class StoreError(ValueError):
    """A store that cannot be opened, read or written, or a row that does not fit its schema. One line for a person."""


def encode(text: str, what: str = "name") -> str:
    """`text` as one path segment, percent-encoded as hive layouts are (`hc(streams=2)` -> `hc%28streams%3D2%29`).

    Raises StoreError if it is not text, is empty, or cannot be written as UTF-8.
    """
    if not isinstance(text, str) or not text:
        raise StoreError(f"{what} is {text!r}; it must be a text that is not empty")
    try:
        segment = quote(text, safe="")
    except UnicodeEncodeError:
        raise StoreError(f"{what} is {text!r}, which is not valid Unicode text") from None
    # A leading dot would hide the file (or, for "..", leave the store).
    return "%2E" + segment[1:] if segment.startswith(".") else segment


def decode(segment: str) -> str:
    return unquote(segment)


class LocalFiles:
    """A folder on a local or mounted filesystem. Names that start with a dot are never listed.

    Such are the temporary files of writers; one that was killed leaves its own behind, which costs only bytes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def kind(self) -> str:
        """What the root is: `folder`, `file` or `missing`."""
        if self.root.is_dir():
            return "folder"
        return "file" if self.root.exists() else "missing"

    def listing(self, prefix: str) -> tuple[list[str], list[str]]:
        """(folders, files) directly under `prefix`, as sorted names. Both empty if it does not exist."""
        folders: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(self.root / prefix) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        (folders if entry.is_dir() else files).append(entry.name)
        except FileNotFoundError:
            return [], []
        except OSError as error:
            raise StoreError(f"cannot list {self.root / prefix}: {error.strerror}") from error
        return sorted(folders), sorted(files)

    def exists(self, key: str) -> bool:
        return (self.root / key).exists()

    def read(self, key: str) -> bytes:
        """Raises FileNotFoundError or another OSError: callers decide what an unreadable file means."""
        return (self.root / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        """Puts `data` under `key` in place of what was there. Killed at any moment, the old or the new is there, whole.

        Raises StoreError if the disk refuses (full, read-only, name too long); nothing visible is left behind then.
        """
        target = self.root / key
        temporary = target.parent / f".{secrets.token_hex(8)}.tmp"
        try:
            _make_folder(target.parent)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
            # The rename itself must reach the disk, else a power cut can undo a commit that was reported.
            _sync_folder(target.parent)
        except BaseException as error:
            # Should this fail too, the file is hidden from readers, and the first error is the one to report.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
            raise

    def delete(self, key: str) -> None:
        """A file that is gone already is fine. Raises StoreError."""
        try:
            (self.root / key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot delete {self.root / key}: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)
