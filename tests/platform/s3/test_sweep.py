"""Sweeps into a bucket whose server goes away and comes back."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from depthlaw.platform.config import parse_config
from depthlaw.platform.store import PATIENCE_S, Store, StoreError
from depthlaw.platform.store_check import check
from depthlaw.platform.sweep import sweep

pytestmark = [pytest.mark.engine, pytest.mark.slow]

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


@pytest.mark.long
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
