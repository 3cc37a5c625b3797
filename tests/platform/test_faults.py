"""Processes killed at random moments, twenty times and more: nothing is lost, doubled or changed by a bit.

The seeds are fixed and the moments printed; what they hit (a step, a checkpoint, a part, a start, the time between two
trials) differs from run to run, for no two machines are as fast.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from depthlaw.platform.store import Store
from depthlaw.platform.store_check import check

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Two seconds or so a trial, for which a checkpoint is written at every report.
CONFIG = {
    "name": "faults",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 256,
    "micro_batch_seqs": 8,
    "shape_rule": "small",
    "validation": {"times": 4, "windows": 16},
    "log_every": 5,
    "checkpoint_every_s": 0.01,
    "grid": [
        {
            "topologies": ["pre_ln", "hc"],
            "shapes": [[2, 16]],
            "tokens_per_backbone_param": [6, 7, 8],
            "lr": [2e-3, 5e-3],
        }
    ],
}
# Read by every Python process at its start, so by Ray's workers too: else so short a trial writes two checkpoints.
EAGER = "import math\nfrom depthlaw.platform import cadence\ncadence.SHARE = math.inf\n"
PATIENT = "from depthlaw.platform import cli, rounds\nrounds.RESTARTS = 100\ncli.main()"


KILLS, SEED = 20, 20261


@pytest.fixture
def sweep(tmp_path):
    """`sweep(store)` starts one as a process of its own and returns it; its output goes to a file beside the store."""
    ray_folder = tempfile.mkdtemp(dir="/tmp")  # a path short enough for Ray's sockets
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EAGER)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"DEPTHLAW_DATA": str(tmp_path / "data"), "RAY_TMPDIR": ray_folder, "PYTHONPATH": path}
    (tmp_path / "faults.yaml").write_text(yaml.safe_dump(CONFIG))
    started = []

    def sweep(store, *words, code="from depthlaw.platform import cli\ncli.main()", config="faults.yaml"):
        command = [sys.executable, "-c", code, "sweep", config, "--storage", store, *words]
        # A file, not a pipe: what a kill leaves behind would hold a pipe open for ever.
        with open(tmp_path / f"{store}.log", "a") as log:
            run = psutil.Popen(
                command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"} | environment, stdout=log, stderr=log
            )
        started.append(run)
        return run

    yield sweep
    for run in started:
        if run.poll() is None:
            for process in (*family(run), run):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            run.wait()
    shutil.rmtree(ray_folder, ignore_errors=True)


def family(process):
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def workers(run):
    """The processes that train: Ray names them after the trainable, from before they import anything."""
    found = []
    for process in family(run):
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ImplicitFunc"):
                found.append(process)
    return found


def wait_for(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError


def left_by(store: Path) -> str:
    """What kills have left half done in a store."""
    half = []
    for folder in store.glob("checkpoints/*/step*"):
        pointer = folder.parent / "latest.json"
        if not pointer.exists() or json.loads(pointer.read_text())["tag"] != folder.name:
            half.append(f"checkpoint {folder.name} of {folder.parent.name[:6]}")
    return ", ".join(half + [str(path.relative_to(store)) for path in store.rglob(".*.tmp")]) or "nothing"


def leases(store: Path, run) -> dict[int, str]:
    """Which of the run's processes has a lease on which trial."""
    mine = {process.pid for process in family(run)}
    found = Store.find(store)
    held = found.running() if found else []
    return {h.owner["pid"]: f"{h.trial[:6]}-{h.attempt}" for h in held if h.owner.get("pid") in mine}


def progress(store: Path) -> float:
    """When a trial last got somewhere: wrote a checkpoint, or its row."""
    moments = [0.0]
    for path in (*store.glob("checkpoints/*/latest.json"), *store.glob("trials/*.parquet")):
        with suppress(FileNotFoundError):
            moments.append(path.stat().st_mtime)
    return max(moments)


def calm_sweep(sweep, tmp_path) -> tuple[float, float]:
    """The undisturbed run: the seconds until it trains, and those of a trial, by which the moments are chosen."""
    began = time.monotonic()
    run = sweep("calm")
    wait_for(lambda: progress(tmp_path / "calm"))
    start_s = time.monotonic() - began
    assert run.wait(600) == 0, (tmp_path / "calm.log").read_text()
    return start_s, float(Store(tmp_path / "calm").trials()["wall_s"].mean())


def assert_same(calm: Path, rough: Path) -> None:
    """The same trials, one row each; each (trial, step, name) once; and every value equal to the last bit."""
    stores = [Store(path) for path in (calm, rough)]
    columns = ["trial", "status", "steps_done", "tokens_done", "data_fingerprint", "recipe_hash", "val_loss"]
    a, b = (store.attempts()[columns].sort_values("trial", ignore_index=True) for store in stores)
    assert a["trial"].is_unique
    assert set(a["status"]) == {"finished"}
    assert a.equals(b)
    key = ["trial", "step", "name"]
    a, b = (store.steps().set_index(key)["value"].sort_index() for store in stores)
    assert b.index.is_unique
    assert a.equals(b)  # a loss for each step, so the order of tokens too
    assert check(stores[1]).problems == []
    for folder in ("ray", "checkpoints"):
        assert not (rough / folder).exists()
    assert list((rough / "leases").iterdir()) == []


def test_workers_killed_at_random_moments_lose_nothing_and_change_no_bit(sweep, tmp_path):
    """Each worker lives for a random time, counted from its start, until twenty have been killed."""
    start_s, trial_s = calm_sweep(sweep, tmp_path)
    moments, longest_s = random.Random(SEED), start_s / 2 + 2 * trial_s
    run = sweep("rough", code=PATIENT)
    ends: dict[int, float] = {}
    kills: list[str] = []
    while run.poll() is None:
        for worker in workers(run) if len(kills) < KILLS else ():
            end = ends.setdefault(worker.pid, time.monotonic() + moments.uniform(0, longest_s))
            if time.monotonic() > end:
                at = leases(tmp_path / "rough", run).get(worker.pid, "its start, or between two trials")
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
                    kills.append(at)
                    print(f"kill {len(kills)} of seed {SEED}: {at}; half done: {left_by(tmp_path / 'rough')}")
        time.sleep(0.02)
    told = (tmp_path / "rough.log").read_text()
    assert run.wait() == 0, told
    assert len(kills) == KILLS
    assert told.count("started again after: its worker process died") >= KILLS / 2
    assert_same(tmp_path / "calm", tmp_path / "rough")


def test_drivers_killed_at_random_moments_lose_nothing_and_change_no_bit(sweep, tmp_path):
    """The same command again and again: a third is killed before it trains anything, the others while they do."""
    store, log = tmp_path / "rough", tmp_path / "rough.log"
    start_s, trial_s = calm_sweep(sweep, tmp_path)
    moments, kills, orphans = random.Random(SEED), 0, []
    while kills < KILLS:
        run = sweep("rough")
        if kills % 3:
            began = time.time()
            wait_for(lambda run=run, began=began: run.poll() is not None or progress(store) > began)
            time.sleep(moments.uniform(0, 0.5 * trial_s))
        else:
            with suppress(psutil.TimeoutExpired):
                run.wait(moments.uniform(0, start_s))
        assert run.poll() in (None, 0), log.read_text()
        if run.poll() == 0:
            break
        orphans += family(run)
        run.kill()
        run.wait()
        kills += 1
        done = len(list(store.glob("trials/*.parquet")))
        print(f"kill {kills} of seed {SEED}: {done} trials done; half done: {left_by(store)}")
    assert kills == KILLS
    assert sweep("rough").wait(600) == 0, log.read_text()
    wait_for(lambda: not any(process.is_running() for process in orphans))
    assert_same(tmp_path / "calm", store)
