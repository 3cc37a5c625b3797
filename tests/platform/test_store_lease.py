"""One process at a time on a trial: raced for, killed, paused, and with clocks that are off."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from depthlaw.platform import store_lease
from depthlaw.platform.store import Store
from depthlaw.platform.store_files import LocalFiles
from depthlaw.platform.store_lease import LeaseLostError

OWNER = """
import sys, time
from depthlaw.platform import store_lease
from depthlaw.platform.store import Store
store_lease.BEAT_S = 0.1
with Store(sys.argv[1]).lease("t") as lease:
    print(lease.attempt, flush=True)
    sys.stdin.readline()  # until it is told, or killed, or paused
    try:
        lease.confirm()
        print("still mine", flush=True)
    except store_lease.LeaseLostError as error:
        print("lost:", error, flush=True)
"""


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path / "store")


@pytest.fixture
def quick(monkeypatch):
    """A lease of a second instead of a minute."""
    for name, value in (("BEAT_S", 0.1), ("TTL_S", 1.0), ("POLL_S", 0.05)):
        monkeypatch.setattr(store_lease, name, value)


@pytest.fixture
def another_machine(monkeypatch):
    """As if this process could not see those that hold leases."""
    monkeypatch.setattr(store_lease, "_machine", lambda: "another one")


def start(code, *words):
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdin=pipe, stdout=pipe, text=True)


@pytest.fixture
def owner(store):
    process = start(OWNER, store.path)
    assert process.stdout.readline() == "0\n"
    yield process
    with process:
        process.kill()


def files(store):
    return sorted(path.name for path in (store.path / "leases").iterdir())


# ---- races

RACER = """
import os, random, sys, time
from pathlib import Path
from depthlaw.platform import store_lease
from depthlaw.platform.store import Store
from depthlaw.platform.store_files import LocalFiles
store_lease.POLL_S = 0.002
store, rng, ran = Store(sys.argv[1]), random.Random(), 0
print("ready", flush=True)
sys.stdin.readline()
for n in range(200):
    (Path(sys.argv[2]) / f"at-{n}-{sys.argv[3]}").touch()  # so that both ask for it at one time
    while not (Path(sys.argv[2]) / f"at-{n}-{1 - int(sys.argv[3])}").exists():
        pass
    with store.lease(f"t{n}") as lease:
        inside = Path(sys.argv[2]) / f"in-{n}"
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if the other one is inside too
        if not (done := Path(sys.argv[2]) / f"done-{n}").exists():
            time.sleep(rng.random() * 0.002)
            lease.confirm()
            done.touch()
            ran += 1
        inside.unlink()
print(ran, flush=True)
"""


def test_two_processes_that_race_for_200_trials_are_never_on_one_at_once_and_run_each_once(store, tmp_path):
    racers = [start(RACER, store.path, tmp_path, me) for me in range(2)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    ran = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert sum(ran) == 200
    assert min(ran) > 0  # else there was no race
    assert files(store) == []


def test_many_threads_that_claim_one_trial_each_get_an_attempt_of_their_own(store, monkeypatch):
    monkeypatch.setattr(store_lease, "POLL_S", 0.001)
    attempts, inside = [], threading.Lock()

    def claim():
        with store.lease("t") as lease:
            assert inside.acquire(blocking=False)
            store.write_steps("e", "pre_ln", "t", lease.attempt, 0, [(1, "loss", random.random())])
            attempts.append(lease.attempt)
            inside.release()

    threads = [threading.Thread(target=claim) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert attempts == list(range(12))


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_create_one_file_one_does_and_its_bytes_are_there(store, monkeypatch, links):
    def none(source, target):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))  # as FAT and some FUSE file systems do

    if not links:
        monkeypatch.setattr(os, "link", none)
    files, made = LocalFiles(store.path), []

    def create(n):
        if files.create("leases/x", b"%d" % n):
            made.append(n)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    (winner,) = made
    assert files.read("leases/x") == b"%d" % winner
    assert [path.name for path in (store.path / "leases").iterdir()] == ["x"]


# ---- owners that end


def test_a_killed_owner_on_this_machine_is_succeeded_at_once_under_a_higher_attempt(store, owner):
    waited = threading.Event()
    names = []

    def waiting(name):
        names.append(name)
        waited.set()
        owner.kill()

    began = time.monotonic()
    with store.lease("t", waiting) as lease:
        assert time.monotonic() - began < 5  # where the heartbeat alone would take a minute
        assert waited.is_set()
        assert lease.attempt == 1
        assert files(store) == ["t-1.json"]
    assert names == [f"process {owner.pid} on {store_lease.socket.gethostname()}"]
    assert files(store) == []


def test_an_owner_that_nobody_has_buried_yet_is_dead_all_the_same(store, owner):
    owner.kill()  # a zombie, until its parent here asks for its status
    with store.lease("t") as lease:
        assert lease.attempt == 1
    assert owner.wait(10) == -signal.SIGKILL


def test_a_process_that_has_the_number_of_a_dead_owner_does_not_keep_the_lease(store, owner):
    (held,) = store.running()
    assert not store_lease.is_dead(held.owner)
    assert store_lease.is_dead(held.owner | {"born": "1"})  # the number is used again, by a process begun later
    assert not store_lease.is_dead(held.owner | {"born": "1", "machine": "another"})  # not to be known from here


def test_a_killed_owner_of_another_machine_is_succeeded_when_its_heartbeat_has_stopped_for_the_ttl(
    store, owner, quick, another_machine
):
    owner.kill()
    began = time.monotonic()
    with store.lease("t") as lease:
        assert time.monotonic() - began > store_lease.TTL_S
        assert lease.attempt == 1


def test_a_living_owner_of_another_machine_is_waited_for_however_long(store, owner, quick, another_machine):
    entered = threading.Event()

    def enter():
        with store.lease("t"):
            entered.set()

    second = threading.Thread(target=enter)
    second.start()
    assert not entered.wait(3 * store_lease.TTL_S)
    owner.stdin.write("end\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "still mine\n"
    assert entered.wait(10)
    second.join(10)


# ---- clocks


@pytest.mark.parametrize("off", [-600, 600])
def test_a_clock_that_is_off_by_minutes_neither_ends_a_lease_nor_keeps_one(
    store, owner, quick, another_machine, monkeypatch, off
):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off)  # this machine's, against the owner's and the disk's
    assert [held.trial for held in store.running()] == ["t"]
    entered = threading.Event()

    def enter():
        with store.lease("t"):
            entered.set()

    second = threading.Thread(target=enter)
    second.start()
    end = time.monotonic() + 2 * store_lease.TTL_S
    while time.monotonic() < end:  # as if the owner's machine, or the server, stamped the file so
        stamp = real() - off
        os.utime(store.path / "leases" / "t-0.json", (stamp, stamp))
        assert not entered.wait(0.05)
    owner.kill()
    assert entered.wait(10)
    second.join(10)


def test_time_in_which_nobody_could_look_does_not_end_a_lease(store, owner, quick, another_machine, monkeypatch):
    os.kill(owner.pid, signal.SIGSTOP)
    real, looks = LocalFiles.listing, []

    def listing(self, prefix):
        if prefix == "leases":
            looks.append(time.monotonic())
            if len(looks) == 4:
                time.sleep(2 * store_lease.TTL_S)  # the store does not answer, or this machine is asleep
        return real(self, prefix)

    monkeypatch.setattr(LocalFiles, "listing", listing)
    with store.lease("t"):
        # After the gap a whole lifetime of looking is still to come, less the moments before it.
        assert looks[-1] - looks[3] > 2 * store_lease.TTL_S + 0.5 * store_lease.TTL_S


def test_a_lease_shows_as_running_until_its_owner_is_dead_or_silent(store, owner, quick, monkeypatch):
    assert [(held.trial, held.attempt) for held in store.running()] == [("t", 0)]
    os.kill(owner.pid, signal.SIGSTOP)
    time.sleep(1.5 * store_lease.TTL_S)
    assert store.running() == []
    os.kill(owner.pid, signal.SIGCONT)
    time.sleep(0.5)
    assert len(store.running()) == 1
    owner.kill()
    owner.wait(10)
    assert store.running() == []


# ---- fencing


def test_a_paused_owner_whose_trial_was_taken_over_writes_nothing_when_it_wakes(store, owner, quick):
    os.kill(owner.pid, signal.SIGSTOP)
    with store.lease("t") as lease:
        assert lease.attempt == 1
        os.kill(owner.pid, signal.SIGCONT)
        owner.stdin.write("go on\n")
        owner.stdin.flush()
        assert owner.stdout.readline().startswith("lost: trial t attempt 0 was taken over")
        assert owner.wait(10) == 0
        lease.confirm()  # and what it did on its way out has not ended the other's
    assert files(store) == []


def test_one_that_wakes_after_the_trial_was_ended_and_cleared_away_has_lost_it_too(store, owner, quick):
    os.kill(owner.pid, signal.SIGSTOP)
    with store.lease("t"):
        pass
    assert files(store) == []
    os.kill(owner.pid, signal.SIGCONT)
    owner.stdin.write("go on\n")
    owner.stdin.flush()
    assert owner.stdout.readline().startswith("lost: ")
    assert owner.wait(10) == 0
    assert files(store) == []  # its heartbeat has not made the file again


def test_one_whose_number_was_given_to_another_meanwhile_has_lost_it(store):
    """Nothing was written under it, so the number was free once more."""
    with store.lease("t") as first:
        (store.path / first.key).unlink()
        with store.lease("t") as second:
            assert second.attempt == first.attempt
            with pytest.raises(LeaseLostError):
                first.confirm()
            second.confirm()
        assert files(store) == []


def test_a_heartbeat_that_the_store_refuses_is_made_up_for_and_loses_nothing(store, quick, monkeypatch):
    real, refused = LocalFiles.swap, []

    def swap(self, key, old, new):
        if len(refused) < 4:
            refused.append(key)
            # The second kind: it was written, and the answer was lost.
            if len(refused) % 2 == 0:
                real(self, key, old, new)
            raise store_lease.StoreError("unreachable")
        return real(self, key, old, new)

    monkeypatch.setattr(LocalFiles, "swap", swap)
    with store.lease("t") as lease:
        time.sleep(0.8)
        assert len(refused) == 4
        lease.check()
        lease.confirm()


def test_a_lease_tells_how_far_its_attempt_is_and_nothing_of_the_environment(store, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sentinel")
    with store.lease("t") as lease:
        lease.progress(7, 1.25)
        lease.confirm()
        (held,) = store.running()
        assert (held.owner["step"], held.owner["wall_s"]) == (7, 1.25)
        assert set(held.owner) == {"token", "host", "machine", "pid", "born", "beat", "step", "wall_s"}
        assert len(held.data) == 512


def test_a_file_that_is_no_lease_or_is_being_written_disturbs_nobody(store, another_machine, quick):
    (store.path / "leases").mkdir()
    (store.path / "leases" / "notes.txt").write_text("x")
    (store.path / "leases" / "t-3.json").write_bytes(b"\0" * 512)
    began = time.monotonic()
    with store.lease("t") as lease:  # nobody keeps it alive
        assert lease.attempt == 4
        assert time.monotonic() - began > store_lease.TTL_S
