"""Processes killed at random moments, twenty times and more: nothing is lost, doubled or changed by a bit.

The seeds are fixed and the moments printed; what they hit (a step, a checkpoint, a part, a start, the time between two
trials) differs from run to run, for no two machines are as fast.
"""

import json
import os
import random
import re
import shutil
import subprocess
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
from support import family, titled, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]

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
def environment(tmp_path):
    ray_folder = tempfile.mkdtemp(dir="/tmp")  # a path short enough for Ray's sockets
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EAGER)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    ours = {"DEPTHLAW_DATA": str(tmp_path / "data"), "RAY_TMPDIR": ray_folder, "PYTHONPATH": path}
    yield os.environ | ours | {"OMP_NUM_THREADS": "1"}
    shutil.rmtree(ray_folder, ignore_errors=True)


@pytest.fixture
def sweep(tmp_path, environment):
    """`sweep(store)` starts one as a process of its own and returns it; its output goes to a file beside the store."""
    started = []

    def sweep(store, code="from depthlaw.platform import cli\ncli.main()", **changes):
        (tmp_path / "faults.yaml").write_text(yaml.safe_dump(CONFIG | changes))
        command = [sys.executable, "-c", code, "sweep", "faults.yaml", "--storage", store]
        # A file, not a pipe: what a kill leaves behind would hold a pipe open for ever.
        with open(tmp_path / f"{store}.log", "a") as log:
            run = psutil.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        started.append(run)
        return run

    yield sweep
    for run in started:
        if run.poll() is None:
            for process in (*family(run.pid), run):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            run.wait()


def workers(run):
    """The processes that train: Ray names them after what they run, from before they import anything."""
    return titled(family(run.pid), "ray::ImplicitFunc", "ray::Rank")


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
    mine = {process.pid for process in family(run.pid)}
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


def calm_sweep(sweep, tmp_path, **changes) -> tuple[float, float]:
    """The undisturbed run: the seconds until it trains, and those of a trial, by which the moments are chosen."""
    began = time.monotonic()
    run = sweep("calm", **changes)
    wait_for(lambda: progress(tmp_path / "calm") or run.poll())
    start_s = time.monotonic() - began
    assert run.wait(600) == 0, (tmp_path / "calm.log").read_text()
    return start_s, float(Store(tmp_path / "calm").trials()["wall_s"].mean())


def assert_same(calm: Path, rough: Path, attempts: bool = True) -> None:
    """The same trials, one row each (without `attempts`, one that counts), and each (trial, step, name) once.

    Every value is equal to the last bit.
    """
    stores = [Store(path) for path in (calm, rough)]
    columns = ["trial", "status", "steps_done", "tokens_done", "data_fingerprint", "recipe_hash", "val_loss"]
    tables = [store.attempts() if attempts else store.trials() for store in stores]
    a, b = (table[columns].sort_values("trial", ignore_index=True) for table in tables)
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


FEW = [CONFIG["grid"][0] | {"tokens_per_backbone_param": [8], "topologies": ["hc"]}]


@pytest.mark.parametrize(
    ("n_kills", "changes"),
    [
        (KILLS, {}),
        pytest.param(
            6,
            {"ranks_per_trial": 2, "micro_batch_seqs": 4, "grid": FEW},
            marks=pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs"),
        ),
    ],
    ids=["workers", "ranks"],
)
def test_workers_killed_at_random_moments_lose_nothing_and_change_no_bit(sweep, tmp_path, n_kills, changes):
    """Each worker lives for a random time, counted from its start, until so many have been killed."""
    start_s, trial_s = calm_sweep(sweep, tmp_path, **changes)
    # Short enough that the trials cannot end before so many kills, however fast the machine.
    moments, longest_s = random.Random(SEED), start_s / 2 + trial_s
    run = sweep("rough", code=PATIENT, **changes)
    ends: dict[int, float] = {}
    kills: list[str] = []
    while run.poll() is None:
        for worker in workers(run) if len(kills) < n_kills else ():
            end = ends.setdefault(worker.pid, time.monotonic() + moments.uniform(0, longest_s))
            if time.monotonic() > end:
                at = leases(tmp_path / "rough", run).get(worker.pid, "its start, between two trials, or a rank")
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
                    kills.append(at)
                    print(f"kill {len(kills)} of seed {SEED}: {at}; half done: {left_by(tmp_path / 'rough')}")
        time.sleep(0.02)
    told = (tmp_path / "rough.log").read_text()
    assert run.wait() == 0, told
    assert len(kills) == n_kills
    assert len(re.findall("its (worker )?process died", told)) >= n_kills / 3
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
        orphans += family(run.pid)
        run.kill()
        run.wait()
        kills += 1
        done = len(list(store.glob("trials/*.parquet")))
        print(f"kill {kills} of seed {SEED}: {done} trials done; half done: {left_by(store)}")
    assert kills == KILLS
    assert sweep("rough").wait(600) == 0, log.read_text()
    wait_for(lambda: not any(process.is_running() for process in orphans))
    assert_same(tmp_path / "calm", store)


def test_a_trial_whose_worker_is_killed_each_time_fails_in_a_line_and_the_same_command_trains_it(sweep, tmp_path):
    (run := sweep("calm", grid=FEW)).wait(600)
    assert run.wait() == 0
    run, kills = sweep("rough", grid=FEW), 0
    while run.poll() is None:
        for worker in workers(run):
            if worker.pid in leases(tmp_path / "rough", run):
                worker.kill()
                kills += 1
        time.sleep(0.02)
    assert run.wait() == 3
    assert kills == 2 * 4  # each of two trials, and three restarts
    told = (tmp_path / "rough.log").read_text().splitlines()
    assert told[-1].startswith("error: 2 of 2 trials have no result (first: hc 2 x 16, ")
    assert told[-1].endswith("its worker process died: killed, or out of memory); run the same command again to go on")
    assert set(Store(tmp_path / "rough").statuses().values()) == {"failed"}
    assert sweep("rough", grid=FEW).wait(600) == 0
    (losses, ours) = (Store(tmp_path / name).trials().set_index("trial")["val_loss"] for name in ("calm", "rough"))
    assert losses.equals(ours)


FULL_DISK = """
mkdir disk && mount -t tmpfs -o size=3m none disk || exit 77
dd if=/dev/zero of=disk/ballast bs=1k count=2700 status=none
"$@" --storage disk/store 2> first.log; echo $? > first.code
rm disk/ballast
"$@" --storage disk/store 2> second.log; echo $? > second.code
cp -r disk/store rough
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0,
    reason="a small file system of its own needs a mount namespace",
)
def test_a_full_disk_is_named_in_a_line_and_with_room_again_the_same_command_completes(sweep, environment, tmp_path):
    changes = {"grid": FEW}
    assert sweep("calm", **changes).wait(600) == 0
    command = [sys.executable, "-m", "depthlaw", "sweep", "faults.yaml"]
    done = subprocess.run(["unshare", "-rm", "bash", "-c", FULL_DISK, "bash", *command], cwd=tmp_path, env=environment)
    if done.returncode == 77:
        pytest.skip("no tmpfs in a mount namespace here")
    first, second = ((tmp_path / f"{n}.log").read_text() for n in ("first", "second"))
    assert (tmp_path / "first.code").read_text() == "3\n", first
    last = first.splitlines()[-1]
    assert last.startswith("error: ")
    assert re.search(r"cannot write (checkpoint )?\S*/disk/store/\S+: (No space left|the disk is full)", last), last
    # Nothing says that a trial has failed for another reason.
    for line in first.splitlines():
        if "started again after" in line or ": failed: " in line:
            assert re.search(r"cannot write|No space left", line), line
    assert (tmp_path / "second.code").read_text() == "0\n", second
    assert_same(tmp_path / "calm", tmp_path / "rough", attempts=False)
