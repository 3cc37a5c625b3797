"""Who runs a trial: a lease on its next attempt, kept alive by a heartbeat, in the store itself.

    STORE/leases/TRIAL-ATTEMPT.json      owner, count of heartbeats, how far the attempt is

The lease of the highest attempt is the one that counts, and creating it is exclusive; so an attempt number belongs to
one process for good, and whoever takes a trial over does it under a higher one. An owner that was paused and wakes
finds the higher one and stops.

A lease has ended when its file is gone, when its process has (seen at once on the machine it ran on), or when no
heartbeat came for `TTL_S`, which an observer counts by its own monotonic clock and only while it looks: no two
clocks are compared, and an hour in which the store cannot be reached ends no lease.

What is left: an owner that is paused between its last look at the lease (`confirm`) and the rename that commits its
row, for longer than the TTL, still commits it. It is then one more attempt of the trial, and replaces nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from depthlaw.platform.store_files import StoreError, decode, encode

if TYPE_CHECKING:
    from depthlaw.platform.store_files import LocalFiles
    from depthlaw.platform.store_s3 import S3Files

BEAT_S, TTL_S, POLL_S = 10.0, 60.0, 1.0
_KEY = re.compile(r"(.+)-(\d+)\.json", re.ASCII)
_SIZE = 512  # bytes of every lease: a heartbeat overwrites it in place


class LeaseLostError(StoreError):
    """The trial is another process's now: this attempt must write nothing more."""


class Held(NamedTuple):
    """A lease as others see it; `owner` is empty if it cannot be read."""

    trial: str
    attempt: int
    key: str
    data: bytes
    owner: dict[str, Any]


class Lease:
    """An attempt of a trial that this process alone may run."""

    def __init__(self, files: LocalFiles | S3Files, trial: str, attempt: int) -> None:
        self.trial, self.attempt = trial, attempt
        self.parts = 0  # step parts that the attempt has committed: the sequence of the next one
        self.key = f"leases/{encode(trial, 'trial')}-{attempt}.json"
        self._files = files
        self._owner = {"token": secrets.token_hex(8), **_me(), "beat": 0, "step": 0, "wall_s": 0.0}
        self._data = _bytes(self._owner)
        self._lock = threading.Lock()  # the heartbeat's thread and the trial's
        self._stop = threading.Event()
        self._lost = False

    def progress(self, step: int, wall_s: float) -> None:
        """What the next heartbeats tell of this attempt: steps done and the seconds since its begin."""
        self._owner |= {"step": step, "wall_s": round(wall_s, 3)}

    def check(self) -> None:
        """Raises LeaseLostError if a heartbeat has found another owner. Costs nothing."""
        if self._lost:
            raise LeaseLostError(
                f"trial {self.trial} attempt {self.attempt} was taken over, for no heartbeat came for {TTL_S:.0f} s; "
                "this process writes nothing more of it"
            )

    def confirm(self) -> None:
        """Looks in the store, as the last thing before a commit. Raises LeaseLostError, or StoreError."""
        self._beat()
        self.check()

    def _take(self) -> bool:
        return self._files.create(self.key, self._data) or self._is_mine()

    def _is_mine(self) -> bool:
        """After a write that was refused, or whose answer was lost: whether what is there came from here."""
        try:
            data = self._files.read(self.key)
        except FileNotFoundError:
            return False
        mine = data.count(str(self._owner["token"]).encode()) == 1
        if mine:
            self._data = data
        return mine

    def _beat(self) -> None:
        with self._lock:
            self._owner["beat"] += 1
            data = _bytes(self._owner)
            # Whoever takes over creates its lease first and deletes this one then: look in the opposite order.
            held = self._files.swap(self.key, self._data, data)
            if not held:
                held = self._is_mine() and self._files.swap(self.key, self._data, data)
            if held:
                self._data = data
            if not held or highest(self._files, self.trial) != self.attempt:
                self._lost = True

    def _run(self) -> None:
        while not self._lost and not self._stop.wait(BEAT_S):
            with contextlib.suppress(StoreError, OSError):  # unreachable just now: the next one tries again
                self._beat()


@contextlib.contextmanager
def hold(
    files: LocalFiles | S3Files,
    trial: str,
    unused: Callable[[], int],
    waiting: Callable[[str], None] = lambda owner: None,
) -> Iterator[Lease]:
    """A lease on the trial, let go at the end. Calls `waiting` with its owner's name once, if there is one, and waits.

    `unused`: one more than any attempt that left rows in the store.
    """
    lease = _claim(files, trial, unused, waiting)
    beats = threading.Thread(target=lease._run, name=f"lease-{trial}", daemon=True)
    beats.start()
    try:
        yield lease
    finally:
        lease._stop.set()
        beats.join()
        # Whoever took over has deleted it. Should the store refuse, it ends with this process or by itself.
        with contextlib.suppress(StoreError, OSError):
            if lease._is_mine():
                files.delete(lease.key)


def _claim(files: LocalFiles | S3Files, trial: str, unused: Callable[[], int], waiting: Callable[[str], None]) -> Lease:
    silence, told = _Silence(), False
    while True:
        # Before the look at the leases: an owner seen in its rows only would not be seen to be alive.
        attempt = unused()
        while (top := _top(files, trial)) is not None and not silence.ended(top):
            if not told:
                waiting(f"process {top.owner['pid']} on {top.owner['host']}" if top.owner else "another process")
                told = True
            time.sleep(POLL_S * random.uniform(0.5, 1.0))
            attempt = -1
        if attempt >= 0:
            lease = Lease(files, trial, max(attempt, top.attempt + 1 if top else 0))
            if lease._take():
                # What was seen may be old by now; then a later attempt shows.
                if highest(files, trial) == lease.attempt and unused() <= lease.attempt:
                    for held in leases(files, trial):
                        if held.attempt < lease.attempt:
                            files.delete(held.key)
                    return lease
                files.delete(lease.key)


class _Silence:
    """For how long the leases that it is shown have not changed."""

    def __init__(self) -> None:
        self.data, self.seconds, self.looked = b"", 0.0, time.monotonic()

    def ended(self, held: Held) -> bool:
        now = time.monotonic()
        # Time in which nobody could look, of a paused machine or an unreachable store, does not count.
        self.seconds = self.seconds + min(now - self.looked, 2 * POLL_S) if held.data == self.data else 0.0
        self.data, self.looked = held.data, now
        return self.seconds > TTL_S or is_dead(held.owner)


def _top(files: LocalFiles | S3Files, trial: str) -> Held | None:
    return max(leases(files, trial), key=lambda held: held.attempt, default=None)


def leases(files: LocalFiles | S3Files, trial: str | None = None) -> list[Held]:
    """All leases in the store, or those of one trial, whether or not their owners live."""
    found = []
    for name in files.listing("leases")[1]:
        if (match := _KEY.fullmatch(name)) and trial in (None, decode(match[1])):
            key = f"leases/{name}"
            try:
                data = files.read(key)
            except FileNotFoundError:
                continue
            try:
                owner = json.loads(data)
            except ValueError:  # read while its heartbeat was written
                owner = {}
            found.append(Held(decode(match[1]), int(match[2]), key, data, owner if _is_owner(owner) else {}))
    return found


def highest(files: LocalFiles | S3Files, trial: str) -> int:
    """The highest attempt that is leased, whether or not its owner lives; -1 if there is none."""
    names = (_KEY.fullmatch(name) for name in files.listing("leases")[1])
    return max((int(m[2]) for m in names if m and decode(m[1]) == trial), default=-1)


def running(files: LocalFiles | S3Files) -> list[Held]:
    """The leases whose owners live, one a trial: a heartbeat in the last `TTL_S`, by the clock of the store."""
    ages = files.ages("leases")
    live: dict[str, Held] = {}
    for held in leases(files):
        if ages.get(held.key.split("/")[-1], TTL_S) < TTL_S and not is_dead(held.owner):
            live[held.trial] = max(held, live.get(held.trial, held), key=lambda one: one.attempt)
    return list(live.values())


def is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner is a process of this machine that has ended. False if that cannot be known from here."""
    machine = _machine()
    return bool(owner) and machine is not None and owner["machine"] == machine and _born(owner["pid"]) != owner["born"]


def _bytes(owner: dict[str, Any]) -> bytes:
    return json.dumps(owner).encode().ljust(_SIZE)


def _is_owner(owner: Any) -> bool:
    return isinstance(owner, dict) and isinstance(owner.get("pid"), int) and {"host", "machine", "born"} <= set(owner)


def _me() -> dict[str, Any]:
    # The start tells this process from a later one of the same number.
    return {"host": socket.gethostname()[:64], "machine": _machine(), "pid": os.getpid(), "born": _born(os.getpid())}


@cache
def _machine() -> str | None:
    """Names the set of process numbers that this process is in: this boot, and the container if it is in one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()[:64]} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: the end of a process is seen by its heartbeats alone
        return None


def _born(pid: int) -> str | None:
    """When the process began, in ticks since boot; None if there is none, or one that its parent has yet to bury."""
    try:
        # The name in the second field may hold anything, so count from behind it.
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]
