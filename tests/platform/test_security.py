"""What `docs/security.md` promises: names stay in their folder, Ray on this machine, secrets out of rows and logs."""

import contextlib
import ipaddress
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from depthlaw.platform.config import ConfigError, load_config
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.store_files import LocalFiles
from support import family

HOSTILE = ["../../out", "/etc/out", "..", "a/../../out", "x/../../../out", "~", "C:\\out", "\x00out", ".", "%2e%2e/out"]


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# ---- names


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_of_a_trial_experiment_or_topology_leaves_its_folder(store, trial_row, name):
    store.write_steps(name, name, name, 0, 0, [(1, "loss", 2.0)])
    store.write_trial(trial_row(name, experiment=name, topology=name))
    store.write_plan(name, [{"trial": name}])
    with store.lease(name):
        assert len(list((store.path / "leases").iterdir())) == 1
    folder = store.checkpoint_dir(name)
    assert folder.parent == store.path / "checkpoints"
    assert folder.resolve() == folder
    assert [path.name for path in store.path.parent.iterdir()] == ["store"]
    assert store.experiments() == [name]
    assert store.trials()["trial"].tolist() == store.steps()["trial"].tolist() == [name]


@pytest.mark.parametrize("inside", ["steps", "trials", "plans", "leases", "steps/experiment=e"])
def test_a_link_in_a_store_does_not_lead_a_writer_out_of_it(store, trial_row, tmp_path, inside):
    outside = tmp_path / "outside"
    outside.mkdir()
    (store.path / inside).parent.mkdir(exist_ok=True)
    (store.path / inside).symlink_to(outside)
    for write in (
        lambda: store.write_steps("e", "pre_ln", "t", 0, 0, [(1, "loss", 2.0)]),
        lambda: store.write_trial(trial_row()),
        lambda: store.write_plan("e", []),
        lambda: store.lease("t").__enter__(),
    ):
        with contextlib.suppress(StoreError):
            write()
    assert everything(outside) == []
    key = f"{inside}/x"
    with pytest.raises(StoreError, match="leads out of the store"):
        LocalFiles(store.path).write(key, b"")


def test_a_store_that_is_reached_through_a_link_is_written_as_any(tmp_path, trial_row):
    real = Store.create(tmp_path / "real")
    (tmp_path / "link").symlink_to(real.path)
    Store(tmp_path / "link").write_trial(trial_row())
    assert len(real.trials()) == 1


# ---- what is handed over


class Trap:
    """A pickle of this makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_nothing_of_a_store_or_law_that_was_handed_over_is_unpickled(store, trial_row, tmp_path):
    import pickle

    from depthlaw.platform.store_check import check
    from depthlaw.platform.store_compact import compact
    from depthlaw.scaling.law_file import load_law

    store.write_steps("e", "pre_ln", "t", 0, 0, [(1, "loss", 2.0)])
    store.write_trial(trial_row())
    store.write_plan("e", [{"trial": "t"}])
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    for path in [path for path in store.path.rglob("*") if path.is_file()]:
        shutil.copy(path, tmp_path / "kept")
        path.write_bytes(trap)
        for look in (
            Store,
            *(lambda s, q=q: getattr(Store(s), q)() for q in ("steps", "trials", "statuses", "running")),
        ):
            _quietly(look, store.path)
        for look in (check, lambda s: s.plan("e")):
            _quietly(look, store)
        shutil.copy(tmp_path / "kept", path)
    for path in store.path.rglob("*.parquet"):
        path.write_bytes(trap)
    _quietly(compact, store)
    (tmp_path / "law.json").write_bytes(trap)
    _quietly(load_law, tmp_path / "law.json")
    assert not (tmp_path / "sprung").exists()


def _quietly(look, *words):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError):  # a StoreError or a FitError: refused
            look(*words)


def test_a_config_cannot_make_objects(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"name: !!python/object/apply:builtins.open [{tmp_path / 'sprung'}, w]\n")
    with pytest.raises(ConfigError):
        load_config(config)
    assert not (tmp_path / "sprung").exists()


# ---- a sweep

SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD")
SENTINEL = "sentinel-5f1c7e"
CONFIG = {
    "name": "tiny",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 8,
    "shape_rule": "small",
    "checkpoint_every_s": 0.2,
    "ranks_per_trial": min(2, len(os.sched_getaffinity(0))),  # they meet on the loopback too
    "grid": [
        {"topologies": ["pre_ln"], "shapes": [[2, 24]], "tokens_per_backbone_param": [6], "lr": [5e-3]},
        {"topologies": ["pre_ln"], "shapes": [[2, 24]], "tokens_per_backbone_param": [6], "lr": [50.0]},
    ],
}


def listeners(pids):
    """(address, name of the process) of every TCP socket that these processes listen on."""
    owner = {}
    for pid in pids:
        try:
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for file in Path(f"/proc/{pid}/fd").iterdir():
                owner[os.readlink(file)] = name
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in owner:
                raw = bytes.fromhex(local.split(":")[0])
                words = b"".join(raw[k : k + 4][::-1] for k in range(0, len(raw), 4))  # of four bytes, little-endian
                found.add((ipaddress.ip_address(words), owner[f"socket:[{rest[5]}]"]))
    return found


def is_loopback(address):
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the sockets of a process are read from /proc")
def test_a_local_sweep_listens_on_the_loopback_only_and_writes_no_secret_down(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    ray_folder = tempfile.mkdtemp(dir="/tmp")  # a path short enough for Ray's sockets
    secrets = {name: f"{SENTINEL}-{name}" for name in SECRETS}
    environment = {"DEPTHLAW_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": ray_folder}
    command = [sys.executable, "-m", "depthlaw", "sweep", "tiny.yaml", "--storage", "store"]
    seen, copies = set(), {}
    try:
        with open(tmp_path / "log", "w") as log:
            run = subprocess.Popen(
                command, cwd=tmp_path, env=os.environ | environment | secrets, stdout=log, stderr=log
            )
            while run.poll() is None:
                seen |= listeners([run.pid, *(one.pid for one in family(run.pid))])
                for path in (tmp_path / "store").rglob("*.json"):  # leases and pointers, which go at the end
                    try:
                        copies[path] = path.read_bytes()
                    except OSError:
                        continue
                time.sleep(0.1)
        assert run.returncode == 0, (tmp_path / "log").read_text()
        assert {"raylet", "gcs_server"} <= {name for _, name in seen}
        assert [one for one in seen if not is_loopback(one[0])] == []
        assert any("leases" in path.parts for path in copies)
        written = [path for path in (*tmp_path.rglob("*"), *Path(ray_folder).rglob("*")) if path.is_file()]
        assert len(written) > 20
        found = {str(path) for path in written if SENTINEL.encode() in path.read_bytes()}
        assert found == set()
        assert not any(SENTINEL.encode() in text for text in copies.values())
        # Parquet could hide it in a compressed page.
        opened = Store(tmp_path / "store")
        for frame in (opened.trials(), opened.attempts(), opened.steps()):
            assert SENTINEL not in frame.to_csv()
    finally:
        shutil.rmtree(ray_folder, ignore_errors=True)
