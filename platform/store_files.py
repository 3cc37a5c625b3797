"""Where a store's bytes live: every touch of the filesystem is in `LocalFiles`.

Files are named by a key with "/" between folders, as objects in a bucket are, and a write appears whole or not at all.
`store_s3.S3Files` has the same methods over a bucket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from pathlib import Path
from typing import IO
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

    def has_folder(self, prefix: str) -> bool:
        return (self.root / prefix).is_dir()

    def exists(self, key: str) -> bool:
        return (self.root / key).exists()

    def read(self, key: str) -> bytes:
        """Raises FileNotFoundError or another OSError: callers decide what an unreadable file means."""
        return (self.root / key).read_bytes()

    def write(self, key: str, data: bytes) -> None:
        """Puts `data` under `key` in place of what was there. Killed at any moment, the old or the new is there, whole.

        Raises StoreError if the disk refuses (full, read-only, name too long); nothing visible is left behind then.
        """
        target = self._inside(key)
        temporary = target.parent / f".{secrets.token_hex(8)}.tmp"
        try:
            with _open_new(temporary) as file:
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
            self._inside(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"cannot delete {self.root / key}: {error.strerror}") from error

    def remove_empty(self, prefix: str) -> None:
        """Removes the folder if nothing is in it."""
        with contextlib.suppress(OSError):
            self._inside(f"{prefix}/x").parent.rmdir()

    def create(self, key: str, data: bytes) -> bool:
        """Puts `data` under `key` if nothing is there, and says whether it did: of several callers at once, one does.

        Raises StoreError as `write` does.
        """
        target = self._inside(key)
        temporary = target.parent / f".{secrets.token_hex(8)}.tmp"
        try:
            with _open_new(temporary) as file:
                file.write(data)
            _link(temporary, target)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        return True

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Puts `new` in place of `old`, which is as long, and says whether it did: not if anything else, or nothing, is
        there. It never makes a file that was deleted appear again. For a file that one process alone writes.

        Raises StoreError if the disk refuses.
        """
        try:
            descriptor = os.open(self._inside(key), os.O_RDWR)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"cannot write {self.root / key}: {error.strerror}") from error
        try:
            if os.pread(descriptor, len(old) + 1, 0) != old:
                return False
            os.pwrite(descriptor, new, 0)
            os.fsync(descriptor)
        except OSError as error:
            raise StoreError(f"cannot write {self.root / key}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        return True

    def ages(self, prefix: str) -> dict[str, float]:
        """Seconds since each file directly under `prefix` was written, by the clock of the file system itself."""
        folder, ages = self.root / prefix, {}
        _, names = self.listing(prefix)
        if names:
            probe = folder / f".{secrets.token_hex(8)}.tmp"
            try:
                probe.touch()
                now = probe.stat().st_mtime
            except OSError:  # only readable: this machine's clock is what there is
                now = time.time()
            finally:
                with contextlib.suppress(OSError):
                    probe.unlink(missing_ok=True)
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    ages[name] = max(0.0, now - (folder / name).stat().st_mtime)
        return ages

    def hidden(self, older_than_s: float) -> list[str]:
        """Keys of the temporary files that writers left, of at least this age, sorted."""
        found = []
        for path in self.root.rglob(".*.tmp"):
            with contextlib.suppress(OSError):
                if "checkpoints" not in path.parts and time.time() - path.stat().st_mtime >= older_than_s:
                    found.append(path.relative_to(self.root).as_posix())
        return sorted(found)

    def _inside(self, key: str) -> Path:
        """The path of `key`. Raises StoreError where a link in the store leads out of it."""
        target = self.root / key
        inside = os.path.realpath(self.root)
        if os.path.commonpath([inside, os.path.realpath(target.parent)]) != inside:
            raise StoreError(
                f"{target.parent} leads out of the store {self.root}: remove the link, nothing was written"
            )
        return target


def _open_new(path: Path) -> IO[bytes]:
    """Opens a file that must not be there; makes its folder, again if a compaction removes it just then."""
    for _ in range(3):
        _make_folder(path.parent)
        with contextlib.suppress(FileNotFoundError):
            return open(path, "xb")
    return open(path, "xb")


def _link(source: Path, target: Path) -> None:
    """Gives the file its name, or raises FileExistsError. Exclusive and whole on network file systems too."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without hard links. A reader may see this one empty for a moment.
        with open(target, "xb") as file:
            file.write(source.read_bytes())


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
