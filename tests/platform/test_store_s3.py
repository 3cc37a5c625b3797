"""A store in a bucket, on a real server process: it does what a folder does, and outlives the server's absences."""

import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress

import pytest

from depthlaw.platform import store_lease
from depthlaw.platform.config import parse_config
from depthlaw.platform.store import PATIENCE_S, Store, StoreError
from depthlaw.platform.store_check import check
from depthlaw.platform.store_compact import compact
from depthlaw.platform.store_export import export
from depthlaw.platform.store_lease import LeaseLostError
from depthlaw.platform.store_s3 import S3Files
from depthlaw.platform.sweep import sweep

pytest.importorskip("moto", reason="the extra `dev` has the server")
SECRET = "sentinel-93a1"

pytestmark = pytest.mark.engine


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Gate:
    """A way to the server that can be shut, and that can lose an answer on its way back."""

    def __init__(self, server):
        self.server, self.port, self.lose = server, free_port(), 0
        self.open()

    def open(self):
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.ways = []
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def shut(self):
        for one in (self.listener, *self.ways):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self, listener):
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.server))
            self.ways += [near, far]
            for source, target, back in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._carry, args=(source, target, back), daemon=True).start()

    def _carry(self, source, target, back):
        with suppress(OSError):
            while data := source.recv(65536):
                if back and self.lose:
                    self.lose -= 1
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def server_process():
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        yield port, process
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def server(server_process):
    return server_process[0]


@pytest.fixture
def environment(server, monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server}", "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
        "XDG_CACHE_HOME": str(tmp_path / "cache"), "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def address(environment):
    S3Files("s3://bucket", 10)._call("create_bucket")
    return f"s3://bucket/runs of/{uuid.uuid4().hex}"


@pytest.fixture
def bucket(address):
    return Store.create(address)


@pytest.fixture
def gate(server, monkeypatch, address):
    gate = Gate(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gate.port}")
    yield gate
    gate.shut()


@pytest.fixture
def quick(monkeypatch):
    for name, value in (("BEAT_S", 0.1), ("TTL_S", 1.5), ("POLL_S", 0.05)):
        monkeypatch.setattr(store_lease, name, value)


def fill(store, trial_row, seed=0):
    rng = random.Random(seed)
    for n in range(5):
        for attempt in range(rng.randint(1, 2)):
            for sequence in range(rng.choice([1, 3])):
                rows = [(step, "loss", rng.random()) for step in rng.sample(range(30), 20)]
                store.write_steps(f"e {n % 2}", "hc(streams=2)", f"t{n}", attempt, sequence, rows)
            store.write_trial(trial_row(f"t{n}", attempt, experiment=f"e {n % 2}"))
    store.write_plan("e 0", [{"trial": "t0"}])


def answers(store):
    queries = [store.steps(), store.steps(experiment="e 1"), store.attempts(), store.trials(), store.statuses()]
    return [*queries, store.experiments(), store.plan("e 0"), store.next_attempt("t1")]


def same(a, b):
    return all(x.equals(y) if hasattr(x, "equals") else x == y for x, y in zip(a, b, strict=True))


# ---- as a folder


def test_it_answers_as_a_folder_does_before_and_after_a_compaction(bucket, store, trial_row, tmp_path):
    for each in (bucket, store):
        fill(each, trial_row)
    assert same(answers(bucket), answers(store))
    assert check(bucket).problems == []
    bucket.compact("t1")
    assert same(answers(bucket), answers(store))
    done = compact(bucket)
    assert done.files_after == 2
    assert same(answers(bucket), answers(store))
    assert check(bucket).problems == []
    assert export(bucket, tmp_path / "steps.csv", "steps") == len(store.steps())
    assert same(answers(pickle.loads(pickle.dumps(Store(str(bucket.path))))), answers(store))


def test_a_listing_of_more_than_a_page_is_whole(bucket, monkeypatch):
    real = S3Files._call

    def small(self, operation, **options):
        return real(self, operation, **options | ({"MaxKeys": 3} if operation == "list_objects_v2" else {}))

    monkeypatch.setattr(S3Files, "_call", small)
    for n in range(10):
        bucket._files.write(f"trials/{n}.txt", b"x")
        bucket._files.write(f"steps/{n}/x", b"x")
    assert bucket._files.listing("trials")[1] == [f"{n}.txt" for n in range(10)]
    assert bucket._files.listing("steps")[0] == [str(n) for n in range(10)]
    assert len(bucket._files.ages("trials")) == 10


@pytest.mark.parametrize("seed", range(4))
def test_a_compaction_that_is_killed_at_any_call_loses_nothing(bucket, trial_row, monkeypatch, seed):
    class KilledError(Exception):
        pass

    fill(bucket, trial_row, seed)
    before, real = answers(bucket), S3Files._call
    calls, crash = 0, random.Random(seed).randrange(25)

    def dying(self, operation, **options):
        nonlocal calls
        calls += operation in ("put_object", "delete_object")
        if calls > crash:
            raise KilledError
        return real(self, operation, **options)

    with monkeypatch.context() as patch:
        patch.setattr(S3Files, "_call", dying)
        with suppress(KilledError):
            compact(bucket)
    assert same(answers(bucket), before)
    for held in store_lease.leases(bucket._files):  # of a process that lives on, here only
        bucket._files.delete(held.key)
    compact(bucket)
    assert same(answers(bucket), before)


def test_what_is_no_address_no_bucket_or_no_store_is_one_line(environment, address):
    for words, text in (
        ("S3://bucket/x", "is not the address of a bucket"),
        ("gs://bucket/x", "is not the address of a bucket: write s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", "is not the address of a bucket"),
        ("s3://no-such-bucket/x", "refused list_objects_v2: NoSuchBucket"),
        (f"{address}/none", "there is no store at"),
    ):
        with pytest.raises(StoreError, match=text):
            Store(words)


def test_without_credentials_it_says_which_variables_to_set(address, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"):
        Store(address)


@pytest.mark.parametrize("ignored", ["IfNoneMatch", "IfMatch"])
def test_a_server_that_ignores_conditions_is_refused_before_anything_runs(address, monkeypatch, ignored):
    real = S3Files._call

    def deaf(self, operation, **options):
        options.pop(ignored, None)
        return real(self, operation, **options)

    monkeypatch.setattr(S3Files, "_call", deaf)
    with pytest.raises(StoreError, match="ignores If-None-Match or If-Match"):
        Store.create(address)
    assert S3Files(address, 10).kind() == "missing"


def test_no_credential_is_in_the_store_or_in_an_error(bucket, trial_row):
    fill(bucket, trial_row)
    with bucket.lease("t9"):
        keys = [one["Key"] for one in bucket._files._call("list_objects_v2")["Contents"]]
        texts = [bucket._files._call("get_object", Key=key)["Body"] for key in keys]
    assert len(texts) > 10
    assert not any(SECRET.encode() in text for text in texts)
    with pytest.raises(StoreError) as refused:
        S3Files("s3://no-such-bucket", 1).write("x", b"")
    assert SECRET not in str(refused.value)


# ---- leases

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


# ---- a sweep

CONFIG = {
    "name": "tiny",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 8,
    "shape_rule": "small",
    "checkpoint_every_s": 0.2,
    "grid": [{"topologies": ["pre_ln", "hc"], "shapes": [[3, 32]], "tokens_per_backbone_param": [5], "lr": [5e-3]}],
}


@pytest.mark.slow
@pytest.mark.engine
def test_a_sweep_into_a_bucket_that_is_away_for_seconds_has_the_rows_of_one_into_a_folder(address, gate, tmp_path):
    (tmp_path / "tiny.yaml").write_text(json.dumps(CONFIG))  # which is YAML too
    environment = os.environ | {"DEPTHLAW_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}

    def start(*words):
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "depthlaw", *words]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)

    with start("sweep", "tiny.yaml", "--storage", "folder") as calm:
        assert calm.wait() == 0, calm.stderr.read()
    rough = start("sweep", "tiny.yaml", "--storage", address)
    absences = 0
    with rough:
        while rough.poll() is None:
            time.sleep(0.5)
            with suppress(StoreError):
                if (
                    absences < 2
                    and (store := Store.find(address))
                    and any(h.owner["step"] > 20 for h in store.running())
                ):
                    gate.shut()
                    time.sleep(4)
                    gate.open()
                    absences += 1
        assert rough.returncode == 0, rough.stderr.read()
    assert absences > 0
    a, b = Store(tmp_path / "folder"), Store(address)
    assert a.statuses() == b.statuses()
    assert set(b.attempts()["attempt"]) == {0}
    key = ["trial", "step", "name"]
    assert a.steps().set_index(key)["value"].equals(b.steps().set_index(key)["value"])
    assert check(b).problems == []
    assert not any((tmp_path / "cache").rglob("latest.json"))
    before = b._files._call("list_objects_v2")["KeyCount"]
    with start("sweep", "tiny.yaml", "--storage", address) as again:  # there is nothing to do
        assert again.wait() == 0
    assert b._files._call("list_objects_v2")["KeyCount"] == before
    with start("status", address, "--json") as status:
        told = json.loads(status.communicate()[0])
    assert (told["left"]["trials"], told["left"]["settled"], told["store"]) == (2, 2, address)
    with start("store", "check", address) as checked:
        assert checked.wait() == 0


@pytest.mark.slow
@pytest.mark.engine
def test_a_sweep_outlives_a_server_that_hangs_for_a_minute_and_one_that_is_gone_as_a_round_ends(
    address, gate, server_process, tmp_path, monkeypatch
):
    """The first absence meets the trials; the second, longer than the patience of other commands, the driver alone."""
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process, hung, gone, told = server_process[1], [], [], []

    def hang():
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(60)
        os.kill(process.pid, signal.SIGCONT)

    def listener(progress):
        told.append(progress.message)
        if "val_loss" in progress.message and not hung:
            hung.append(threading.Thread(target=hang))
            hung[0].start()
        if progress.planned and progress.done == progress.planned and not gone:
            gone.append(time.monotonic())
            gate.shut()
            threading.Timer(PATIENCE_S + 5, gate.open).start()

    config = parse_config(CONFIG)
    sweep(config, calm := Store.create(tmp_path / "calm"), data_folder=tmp_path / "data")
    sweep(config, Store.create(address), data_folder=tmp_path / "data", listener=listener)
    assert time.monotonic() - gone[0] > PATIENCE_S
    hung[0].join()
    assert not any("started again" in message for message in told)
    a, b = calm, Store(address)
    assert set(b.attempts()["attempt"]) == {0}
    assert a.statuses() == b.statuses()
    key = ["trial", "step", "name"]
    assert a.steps().set_index(key)["value"].equals(b.steps().set_index(key)["value"])
    assert check(b).problems == []
