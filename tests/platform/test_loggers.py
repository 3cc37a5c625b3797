"""Views of a sweep beside its store: what they show is what the store has."""

import itertools
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from depthlaw.platform import loggers
from depthlaw.platform.config import ConfigError, parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.loggers import check, run_name, tensorboard
from depthlaw.platform.plan import plan
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_trial

SMALL = {
    "data": {"source": "pydoc", "vocab_size": 300}, "seq_len": 32, "batch_tokens": 256, "micro_batch_seqs": 4,
    "validation": {"times": 2, "windows": 8}, "log_every": 5, "layer_stats_every": 10,
}  # fmt: skip
GRID = {"shapes": [[2, 16]], "tokens_per_backbone_param": [2], "lr": [5e-3]}


def events(folder: Path) -> dict[tuple[int, str], float]:
    """Scalars of the event files: TFRecord, that is length, its checksum, the event, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(folder.glob("events.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
            at += length + 16
    return found


@pytest.mark.engine
def test_tensorboard_files_have_the_values_of_the_store(sweep_of, tmp_path):
    config = parse_config(sweep_of(**SMALL, grid=GRID))
    data = build_data(config.data, tmp_path / "data")
    (spec,) = plan(config, data.fingerprint)
    store = Store.create(tmp_path / "store")
    with tensorboard(spec, store) as watch:
        run_trial(spec, store, data, watch=watch)
    shown = events(store.path / "tensorboard" / "s" / run_name(spec))
    steps = store.steps().set_index(["step", "name"])["value"]
    validations = {step for step, name in steps.index if name == "val_loss"}
    reports = sorted({*range(5, spec.steps + 1, 5), *validations})
    assert {step for step, name in shown if name == "train_loss"} == set(reports)
    for before, step in itertools.pairwise([0, *reports]):
        mean = steps.loc[[(s, "train_loss") for s in range(before + 1, step + 1)]].mean()
        assert shown[step, "train_loss"] == pytest.approx(mean, rel=1e-6)
        assert shown[step, "lr"] == pytest.approx(steps[step, "lr"], rel=1e-6)
    assert {step for step, name in shown if name == "val_loss"} == validations
    assert all(shown[s, "val_loss"] == pytest.approx(steps[s, "val_loss"], rel=1e-6) for s in validations)
    assert shown[10, "grad_norm/3"] == pytest.approx(steps[10, "grad_norm.3"], rel=1e-6)


FULL = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
from depthlaw.platform import loggers
spec = SimpleNamespace(experiment="e")
loggers.run_name = lambda spec: "run"
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # a file that takes no more than that
with loggers.tensorboard(spec, SimpleNamespace(local_folder=Path(sys.argv[1]))) as watch:
    for step in range(1000):
        watch(step, {"train_loss": float(step)})
    Path(sys.argv[1], "trained").touch()
"""


def test_a_disk_that_refuses_tensorboards_file_neither_ends_nor_hangs_a_trial(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "trained").exists()
    (file,) = (tmp_path / "tensorboard" / "e" / "run").iterdir()
    assert file.stat().st_size <= 2000


def test_a_logger_that_is_not_installed_is_named_with_what_installs_it(sweep_of, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"loggers has wandb, which is not installed: pip install 'depthlaw\[wandb\]'"
    ):
        check(["tensorboard", "wandb"])
    check(["tensorboard"])
    with pytest.raises(ConfigError, match="loggers"):
        parse_config(sweep_of(loggers=["comet"]))


def test_names_of_runs_are_safe_in_a_path_and_differ_where_trials_do(sweep_of):
    grid = {"topologies": ["hc(streams=2)", "pre_ln"], "lr": [1e-3, 2e-3], "tokens_per_backbone_param": [4, 8]}
    names = [run_name(spec) for spec in plan(parse_config(sweep_of(grid=grid, seeds=[0, 1])))]
    assert len(set(names)) == 16
    assert all(not set(name) & set(" /()=,") for name in names)


@pytest.mark.engine
def test_offline_runs_of_wandb_and_mlflow_say_what_each_trial_was_and_scored(tmp_path):
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    grid = [{"topologies": ["pre_ln"], **GRID, "lr": [5e-3, 1e-2]}]
    raw = {"name": "seen", **SMALL, "shape_rule": "small", "grid": grid, "loggers": ["wandb", "mlflow"]}
    (tmp_path / "seen.yaml").write_text(yaml.safe_dump(raw))
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "depthlaw", "sweep", "seen.yaml", "--storage", "store"],
        cwd=tmp_path, env=os.environ | env | {"DEPTHLAW_DATA": str(tmp_path / "data")}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    store = Store(tmp_path / "store")
    losses = store.trials().set_index("lr")["val_loss"]
    mlflow.set_tracking_uri(f"sqlite:///{store.path / 'mlflow.db'}")
    runs = mlflow.search_runs(experiment_names=["seen"], output_format="list")
    found = {float(run.data.params["lr"]): run.data.metrics["val_loss"] for run in runs}
    assert found == pytest.approx(losses.to_dict())
    assert {run.data.params["topology"] for run in runs} == {"pre_ln"}
    assert len(list(tmp_path.glob("wandb/offline-run-*/*.wandb"))) == 2
    assert not (store.path / "tensorboard").exists()
