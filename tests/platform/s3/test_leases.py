"""Leases in a bucket: one owner at a time, also when processes are paused or killed and the server is away."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from depthlaw.platform import store_lease
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.store_check import check
from depthlaw.platform.store_lease import LeaseLostError

pytestmark = pytest.mark.engine

RACER = """
import os, sys, time
from pathlib import Path
from depthlaw.platform import store_lease
from depthlaw.platform.store import Store
store_lease.POLL_S = 0.02
store, ran = Store(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
for n in range(25):
    with store.lease(f"t{n}") as lease:
        inside = Path(sys.argv[2]) / f"in-{n}"
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if the other one is inside too
        if not (done := Path(sys.argv[2]) / f"done-{n}").exists():
            lease.confirm()
            done.touch()
            ran += 1
        inside.unlink()
print(ran, flush=True)
"""
OWNER = """
import sys
from depthlaw.platform import store_lease
from depthlaw.platform.store import Store
store_lease.BEAT_S = 0.1
with Store(sys.argv[1]).lease("t") as lease:
    print(lease.attempt, flush=True)
    sys.stdin.readline()
    try:
        lease.confirm()
        print("still mine", flush=True)
    except store_lease.LeaseLostError as error:
        print("lost:", error, flush=True)
"""


def start(code, *words):
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, *map(str, words)], stdin=pipe, stdout=pipe, text=True)


def test_two_processes_that_race_are_never_on_one_trial_at_once_and_run_each_once(bucket, tmp_path):
    racers = [start(RACER, bucket.path, tmp_path) for _ in range(2)]
    assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 2
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    ran = [int(racer.communicate(timeout=120)[0]) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0]
    assert sum(ran) == 25
    assert store_lease.leases(bucket._files) == []


def test_a_paused_owner_loses_its_trial_and_a_killed_one_at_once(bucket, quick):
    owner = start(OWNER, bucket.path)
    with owner:
        assert owner.stdout.readline() == "0\n"
        assert [held.trial for held in bucket.running()] == ["t"]
        os.kill(owner.pid, signal.SIGSTOP)
        with bucket.lease("t") as lease:
            assert lease.attempt == 1
            os.kill(owner.pid, signal.SIGCONT)
            owner.stdin.write("go on\n")
            owner.stdin.flush()
            assert owner.stdout.readline().startswith("lost: ")
            lease.confirm()
    second = start(OWNER, bucket.path)
    with second:
        assert second.stdout.readline() == "0\n"
        second.kill()
        began = time.monotonic()
        with bucket.lease("t") as lease:
            assert time.monotonic() - began < store_lease.TTL_S
            assert lease.attempt == 1


# ---- absences


def test_a_server_that_is_gone_for_seconds_loses_and_doubles_nothing(bucket, gate, quick):
    store = Store(str(bucket.path), patience_s=60)
    with store.lease("t") as lease:
        store.write_steps("e", "pre_ln", "t", 0, 0, [(1, "loss", 1.0)])
        gate.shut()
        reopen = threading.Timer(4, gate.open)
        reopen.start()
        began = time.monotonic()
        store.write_steps("e", "pre_ln", "t", 0, 1, [(2, "loss", 2.0)])
        assert time.monotonic() - began > 3
        lease.confirm()
        assert store.steps()["value"].tolist() == [1.0, 2.0]
        assert store.next_attempt("t") == 1


def test_a_lease_outlives_an_absence_longer_than_its_ttl_though_another_waits_for_it(bucket, gate, quick):
    store, entered = Store(str(bucket.path), patience_s=60), threading.Event()

    def enter():
        with Store(str(bucket.path), patience_s=60).lease("t"):
            entered.set()

    with store.lease("t") as lease:
        second = threading.Thread(target=enter)
        second.start()
        time.sleep(0.5)
        gate.shut()
        time.sleep(2 * store_lease.TTL_S)
        gate.open()
        lease.confirm()
        assert not entered.wait(0.5)
    assert entered.wait(30)
    second.join(30)


def test_an_answer_that_is_lost_is_asked_for_again_and_nothing_is_done_twice(bucket, gate, trial_row):
    store = Store(str(bucket.path), patience_s=60)
    for n in range(3):
        gate.lose = 1
        store.write_steps("e", "pre_ln", "t", 0, n, [(n, "loss", float(n))])
    gate.lose = 1
    with store.lease("u") as lease:  # the server made it; its word was lost
        assert lease.attempt == 0
        gate.lose = 1
        lease.confirm()
        lease.check()
    gate.lose = 1
    store.write_trial(trial_row())
    assert store.steps()["value"].tolist() == [0.0, 1.0, 2.0]
    assert store.statuses() == {"t": "finished"}
    assert check(store).problems == []


def test_a_server_that_stays_away_is_one_line_after_the_patience(bucket, gate):
    store = Store(str(bucket.path), patience_s=1)
    gate.shut()
    began = time.monotonic()
    with pytest.raises(StoreError, match="does not answer after 1 s of trying"):
        store.statuses()
    assert time.monotonic() - began < 10


def test_one_that_lost_its_lease_while_cut_off_finds_out_when_it_is_back(bucket, gate, quick):
    alone = Store(str(bucket.path), patience_s=60)
    with alone.lease("t") as first:
        # The others reach the server by another way.
        gate.shut()
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{gate.server}"
        with Store(str(bucket.path)).lease("t") as second:
            assert second.attempt == 1
            gate.open()
            with pytest.raises(LeaseLostError):
                first.confirm()
            second.confirm()
