"""A whole sweep through the command line, on Ray: resumed, extended, disturbed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from depthlaw.platform.cluster import check_nodes
from depthlaw.platform.config import ConfigError
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.pruning import Rungs, middle_out, rung_steps
from depthlaw.platform.store import Store
from support import family, titled, wait_for

pytestmark = pytest.mark.engine

CONFIG = {
    "name": "tiny",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 8,
    "shape_rule": "small",
    "validation": {"times": 2, "windows": 16},
    "grid": [
        {"topologies": ["pre_ln", "hc"], "shapes": [[1, 24], [2, 16]], "tokens_per_backbone_param": [2], "lr": [5e-3]},
        {"topologies": ["pre_ln"], "shapes": [[1, 24]], "tokens_per_backbone_param": [2], "lr": [50.0]},
    ],
}


def write(path: Path, config: dict) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"DEPTHLAW_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}


def depthlaw(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "depthlaw", *words],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )


def parts(store: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in store.rglob("*.parquet")}


def test_a_sweep_is_run_once_resumed_extended_and_answers(tmp_path):
    config = write(tmp_path / "tiny.yaml", CONFIG)
    first = depthlaw(tmp_path, "sweep", str(config), "--storage", "store", "--json")
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout)["planned"] == 5  # and nothing of Ray's beside it
    store = Store(tmp_path / "store")
    assert sorted(store.statuses().values()) == ["diverged", *["finished"] * 4]
    trials = store.trials()
    assert set(zip(trials["topology"], trials["n_layers"], strict=True)) == {
        (t, n) for t in ("pre_ln", "hc") for n in (1, 2)
    }
    # The same command again trains nothing.
    before = parts(tmp_path / "store")
    again = depthlaw(tmp_path, "sweep", str(config), "--storage", "store", "--json")
    assert again.returncode == 0, again.stderr
    assert parts(tmp_path / "store") == before
    assert json.loads(again.stdout)["planned"] == 5
    # A wider grid trains only what is new.
    wider = CONFIG | {"grid": [CONFIG["grid"][0] | {"topologies": ["pre_ln", "hc", "full_attnres"]}, CONFIG["grid"][1]]}
    extended = depthlaw(tmp_path, "sweep", str(write(tmp_path / "wider.yaml", wider)), "--storage", "store")
    assert extended.returncode == 0, extended.stderr
    after = parts(tmp_path / "store")
    assert {k: v for k, v in after.items() if k in before} == before
    assert sorted(store.statuses().values()) == ["diverged", *["finished"] * 6]
    cells = json.loads(depthlaw(tmp_path, "status", "store", "--json").stdout)["cells"]
    assert [(c["n_planned"], c["n_finished"]) for c in cells].count((1, 1)) == 5
    assert sum(c["n_diverged"] for c in cells) == 1
    # Four shapes at one size cannot fit a law of eight parameters over three topologies: the answer is no.
    refused = depthlaw(tmp_path, "fit", "store")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "store" / "ray").exists()
    assert not (tmp_path / "store" / "checkpoints").exists() or not any((tmp_path / "store" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_search_at_a_base_shape_goes_in_rounds_until_nothing_is_missing_and_then_trains_nothing(tmp_path):
    block = {"topologies": ["pre_ln"], "shapes": [[1, 24], [2, 16]], "tokens_per_backbone_param": [2]}
    search = {"lr": [1.0e-3, 2.0e-3], "lr_search": {"base_shape": [2, 16], "extensions": 1}}
    config = write(tmp_path / "search.yaml", CONFIG | {"grid": [block | search]})
    done = depthlaw(tmp_path, "sweep", str(config), "--storage", "store")
    assert done.returncode == 0, done.stderr
    trials = Store(tmp_path / "store").trials()
    # Both rates of the list are far too low for runs this short, so the list grows by one, which is the best.
    assert sorted(trials[trials["n_layers"] == 2]["lr"]) == [1e-3, 2e-3, 4e-3]
    assert sorted(trials[trials["n_layers"] == 1]["lr"]) == [4e-3]
    before = parts(tmp_path / "store")
    again = depthlaw(tmp_path, "sweep", str(config), "--storage", "store", "--json")
    assert json.loads(again.stdout)["planned"] == 4
    assert parts(tmp_path / "store") == before
    dry = depthlaw(tmp_path, "sweep", str(config), "--storage", "none", "--dry-run")
    assert dry.stdout.count("after the search") == 1
    assert dry.stdout.count("to run") == 3  # two trials, and their sum
    assert "what later rounds run depends on these results" in dry.stdout


@pytest.mark.slow
def test_a_pruned_sweep_of_a_cell_keeps_its_best_and_stops_those_that_three_others_beat(tmp_path):
    rates = [3.0e-4, 1.0e-3, 3.0e-3, 1.0e-2, 3.0e-2, 1.0e-1]
    block = {"topologies": ["pre_ln"], "shapes": [[1, 24]], "tokens_per_backbone_param": [4], "lr": rates}
    common = CONFIG | {"grid": [block], "validation": {"times": 4, "windows": 16}}
    full = depthlaw(tmp_path, "sweep", str(write(tmp_path / "full.yaml", common)), "--storage", "full")
    assert full.returncode == 0, full.stderr
    config = write(tmp_path / "pruned.yaml", common | {"pruning": {"at": [0.25, 0.5]}})
    done = depthlaw(tmp_path, "sweep", str(config), "--storage", "pruned", "--concurrent", "1")
    assert done.returncode == 0, done.stderr
    full, pruned = (Store(tmp_path / name) for name in ("full", "pruned"))
    whole = full.trials().set_index("trial")
    kept = pruned.trials().set_index("trial")
    # The rule over the losses of the full run, in the order of the run, says the same of each trial.
    curves = full.steps(names="val_loss").pivot(index="trial", columns="step", values="value")
    rungs, expected = Rungs(keep=3), {}
    (last,) = set(whole["steps"])
    for spec in middle_out([TrialSpec.from_dict(json.loads(text)) for text in whole["spec"]]):
        steps = [s for s in rung_steps([0.25, 0.5], last, 4) if s in curves.loc[spec.hash].dropna().index]
        verdicts = [rungs.verdict("cell", step, spec.lr, curves.loc[spec.hash, step]) for step in steps]
        stopped = [step for step, why in zip(steps, verdicts, strict=True) if why]
        expected[spec.hash] = stopped[0] if stopped else whole.loc[spec.hash, "steps_done"]
    assert kept["steps_done"].astype(int).to_dict() == expected
    stopped = kept[kept["status"] == "pruned"]
    assert len(stopped) >= 1
    assert stopped["reason"].str.contains("is above those of 3 other learning rates of its cell").all()
    assert stopped["val_loss"].isna().all()
    # What was kept is the same to the last bit, and the best of all is among it.
    finished = kept[kept["status"] == "finished"]
    assert finished["val_loss"].equals(whole.loc[finished.index, "val_loss"])
    assert finished["val_loss"].min() == whole["val_loss"].min()


def test_one_run_gives_all_its_branches(tmp_path):
    block = {"topologies": ["pre_ln"], "shapes": [[1, 24]], "tokens_per_backbone_param": [2, 4], "lr": [5e-3]}
    branches = CONFIG | {"schedule": {"kind": "wsd", "warmup_steps": 5}, "grid": [block]}
    config = write(tmp_path / "wsd.yaml", branches)
    done = depthlaw(tmp_path, "sweep", str(config), "--storage", "store")
    assert done.returncode == 0, done.stderr
    store = Store(tmp_path / "store")
    rows = store.trials().sort_values("tokens")
    assert rows["status"].to_list() == ["finished"] * 2
    per_step = rows["train_flops"].iloc[0] / rows["steps"].iloc[0]
    trunk = rows["steps"].iloc[0] - round(0.2 * rows["steps"].iloc[0])
    assert rows["train_flops"].iloc[1] == per_step * (rows["steps"].iloc[1] - trunk)
    assert not (tmp_path / "store" / "checkpoints").exists()


def test_a_corpus_too_small_is_refused_with_the_epochs_it_would_make(tmp_path):
    hungry = CONFIG | {"grid": [CONFIG["grid"][0] | {"tokens_per_backbone_param": [100]}]}
    done = depthlaw(tmp_path, "sweep", str(write(tmp_path / "hungry.yaml", hungry)), "--storage", "store")
    assert done.returncode == 2
    assert "epochs where max_epochs allows 1" in done.stderr.splitlines()[-1]


def refused(tmp_path, *words, **changes) -> tuple[int, str]:
    """Exit code and the one line on stderr of a sweep that must not start."""
    config = write(tmp_path / "refused.yaml", CONFIG | changes)
    done = depthlaw(tmp_path, "sweep", str(config), "--storage", "store", *words)
    return done.returncode, done.stderr.splitlines()[-1]


def test_what_this_machine_can_never_run_is_refused_and_does_not_wait_for_ever(tmp_path):
    code, line = refused(tmp_path, cpus_per_rank=4096)
    assert (code, line.startswith("error: cpus_per_rank is 4096 and this machine has ")) == (2, True)
    if not torch.cuda.is_available():
        code, line = refused(tmp_path, gpus_per_rank=1)
        assert (code, line.startswith("error: gpus_per_rank is 1 and this machine has no GPU")) == (2, True)


def test_ranks_that_find_no_room_in_a_cluster_are_refused_and_of_a_bucket_all_need_one_node(monkeypatch):
    import ray

    nodes = [{"Alive": True, "Resources": {"CPU": 4.0, "GPU": gpus}} for gpus in (2.0, 1.0)]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}}])
    per_rank = {"cpu": 1, "gpu": 1}
    check_nodes(per_rank, 3, on_one_node=False)
    check_nodes(per_rank, 2, on_one_node=True)
    with pytest.raises(ConfigError, match=r"needs 4 times 1 cpus and 1 gpus, each on one node, .* has them 3 times"):
        check_nodes(per_rank, 4, on_one_node=False)
    with pytest.raises(ConfigError, match=r"all on one node, as its store is in a bucket, .* has them 2 times"):
        check_nodes(per_rank, 3, on_one_node=True)


def test_a_sequence_longer_than_the_validation_split_is_refused_before_any_trial(tmp_path):
    long = {"seq_len": 16384, "batch_tokens": 16384, "micro_batch_seqs": 1, "max_epochs": 100}
    code, line = refused(tmp_path, **long)
    assert (code, line.startswith("error: the validation split has ")) == (2, True)


def test_a_cluster_that_does_not_answer_is_a_failed_run_in_one_line(tmp_path):
    code, line = refused(tmp_path, "--address", "127.0.0.1:1")
    assert (code, line.startswith("error: nothing answers at the Ray address 127.0.0.1:1")) == (3, True)


def test_the_private_name_that_keeps_ray_from_printing_is_still_there():
    import ray

    assert ray._private.worker._worker_logs_enabled in (True, False)


def longer() -> dict:
    """Some seconds a trial: what is done to it must reach it before its end."""
    block = CONFIG["grid"][0] | {"shapes": [[3, 32]], "tokens_per_backbone_param": [5]}
    return CONFIG | {"grid": [block], "checkpoint_every_s": 0.2}


def holders(pid: int, store: Path) -> list[int]:
    """Processes below `pid` with a trial of which there is a checkpoint, and the most of it still to do."""
    early = set()
    for pointer in store.glob("checkpoints/*/latest.json"):
        with suppress(OSError):  # the trial ended just then
            if int(json.loads(pointer.read_text())["tag"].removeprefix("step")) < 200:
                early.add(pointer.parent.name)
    if not early:
        return []
    owners = {held.owner["pid"] for held in Store(store).running() if held.trial in early and held.owner}
    return [child.pid for child in family(pid) if child.pid in owners]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_a_killed_process_loses_nothing_and_changes_no_bit(tmp_path, victim):
    config = write(tmp_path / "longer.yaml", longer())
    calm = depthlaw(tmp_path, "sweep", str(config), "--storage", "calm")
    assert calm.returncode == 0, calm.stderr
    command = [sys.executable, "-m", "depthlaw", "sweep", str(config), "--storage", "rough"]
    # Files, not pipes: a process left behind by the kill would hold a pipe open for ever.
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log)
        holder, *_ = wait_for(lambda: holders(run.pid, tmp_path / "rough"))
        started = family(run.pid)
        os.kill(run.pid if victim == "driver" else holder, signal.SIGKILL)
        code = run.wait(300)
    if victim == "driver":
        assert code == -signal.SIGKILL
        # At once, while what the kill orphaned may still run.
        resumed = depthlaw(tmp_path, "sweep", str(config), "--storage", "rough")
        assert resumed.returncode == 0, resumed.stderr
        wait_for(lambda: not any(process.is_running() for process in started))
        assert not (tmp_path / "rough" / "ray").exists()
    else:
        told = (tmp_path / "log").read_text()
        assert code == 0, told
        # The victim may not have written anything yet, and then its number is used again: the log has the restart.
        assert "started again after: its worker process died" in told
    assert_same(tmp_path / "calm", tmp_path / "rough")


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs")
def test_a_killed_rank_costs_its_trial_a_restart_in_another_process_and_no_other_trial_anything(tmp_path):
    config = write(tmp_path / "two.yaml", longer() | {"ranks_per_trial": 2})
    calm = depthlaw(tmp_path, "sweep", str(config), "--storage", "calm")
    assert calm.returncode == 0, calm.stderr
    command = [sys.executable, "-m", "depthlaw", "sweep", str(config), "--storage", "rough"]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=log, stderr=log)
        holder, *_ = wait_for(lambda: holders(run.pid, tmp_path / "rough"))
        (rank,) = titled(family(run.pid), "ray::Rank")
        rank.kill()
        # A worker is used again only after a clean end.
        wait_for(lambda: not Path(f"/proc/{holder}").exists(), 30)
        code = run.wait(300)
    told = (tmp_path / "log").read_text()
    assert code == 0, told
    assert "started again after: RankError: rank 1 of 2: its process died: killed, or out of memory" in told
    assert told.count("started again") == 1
    assert_same(tmp_path / "calm", tmp_path / "rough")


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs")
def test_a_trial_of_all_ranks_that_is_stopped_early_frees_them_for_the_next(tmp_path):
    """Two rates of three diverge, so one trial at least begins where a stopped one was; two do not fit at once."""
    cpus = len(os.sched_getaffinity(0))
    block = CONFIG["grid"][0] | {"topologies": ["pre_ln"], "shapes": [[1, 24]], "lr": [5e-3, 50.0, 60.0]}
    ranks = {"ranks_per_trial": 2, "cpus_per_rank": cpus // 2, "grid": [block], "log_every": 2}
    done = depthlaw(tmp_path, "sweep", str(write(tmp_path / "two.yaml", CONFIG | ranks)), "--storage", "store")
    assert done.returncode == 0, done.stderr
    rows = Store(tmp_path / "store").trials().sort_values("lr")
    assert rows["status"].to_list() == ["finished", "diverged", "diverged"]
    assert (rows["steps_done"] < rows["steps"]).to_list() == [False, True, True]
    assert "started again" not in done.stderr


def assert_same(calm: Path, rough: Path) -> None:
    """Each (trial, step, name) once, and every value equal to the last bit."""
    stores = [Store(path) for path in (calm, rough)]
    a, b = (s.trials().set_index("trial")["val_loss"] for s in stores)
    assert a.equals(b)
    key = ["trial", "step", "name"]
    a, b = (s.steps().set_index(key)["value"].sort_index() for s in stores)
    assert a.index.is_unique
    assert b.index.is_unique
    assert a.equals(b)


@pytest.mark.slow
def test_ctrl_c_stops_at_once_says_how_to_go_on_and_leaves_no_process(tmp_path):
    config = write(tmp_path / "longer.yaml", longer())
    command = [sys.executable, "-m", "depthlaw", "sweep", str(config), "--storage", "store"]
    with open(tmp_path / "log", "w") as log:
        run = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=log,
            stderr=log,
            # A shell's background job ignores it, and so would what it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        checkpoints = tmp_path / "store" / "checkpoints"
        wait_for(lambda: checkpoints.exists() and any(checkpoints.glob("*/latest.json")))
        started = family(run.pid)
        os.kill(run.pid, signal.SIGINT)
        assert run.wait(30) == 130
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("stopped by Ctrl-C; run the same command again")
    wait_for(lambda: not any(process.is_running() for process in started), 30)
    assert not (tmp_path / "store" / "ray").exists()


@pytest.mark.slow
def test_two_sweeps_at_once_on_one_store_train_each_trial_once(tmp_path):
    config = write(tmp_path / "longer.yaml", longer())
    calm = depthlaw(tmp_path, "sweep", str(config), "--storage", "calm")
    assert calm.returncode == 0, calm.stderr
    command = [sys.executable, "-m", "depthlaw", "sweep", str(config), "--storage", "shared"]
    runs = [subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path)) for _ in range(2)]
    assert [run.wait(300) for run in runs] == [0, 0]
    assert_same(tmp_path / "calm", tmp_path / "shared")
    assert set(Store(tmp_path / "shared").attempts()["attempt"]) == {0}
