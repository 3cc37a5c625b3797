"""A sweep on a running Ray cluster of two nodes, here on one machine: which node runs what, and one of them lost."""

import os
from pathlib import Path

import pytest

import depthlaw
from depthlaw.platform.config import parse_config
from depthlaw.platform.store import Store
from depthlaw.platform.sweep import sweep

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SWEEP = {
    "name": "cluster",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 8,
    "shape_rule": "small",
    "validation": {"times": 4, "windows": 16},
    "checkpoint_every_s": 0.2,
    "grid": [
        {"topologies": ["pre_ln"], "shapes": [[2, 16]], "tokens_per_backbone_param": [4], "lr": [4e-3, 6e-3, 8e-3]}
    ],
}


@pytest.fixture
def cluster():
    """Two nodes with a CPU each. They know depthlaw only by what a sweep ships: their path has nothing of it."""
    from ray.cluster_utils import Cluster

    before = os.environ.pop("PYTHONPATH", None)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.second = cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()
    if before is not None:
        os.environ["PYTHONPATH"] = before


def nodes_of_actors() -> set[str]:
    """Nodes on which an actor of this job has been started."""
    import ray

    actors = ray._private.state.actors().values()
    return {actor["Address"]["NodeID"] for actor in actors if actor["Address"]["NodeID"]}


def test_trials_run_on_both_nodes_and_one_node_lost_in_the_middle_loses_no_trial(cluster, tmp_path):
    import ray

    used, told, shipped = set(), [], []

    @ray.remote(num_cpus=0)
    def package() -> str:
        return str(Path(depthlaw.__file__).parent)

    def listener(progress):
        told.append(progress.message)
        if "val_loss" not in progress.message:
            return
        used.update(nodes_of_actors())
        if not shipped:
            shipped.append(ray.get(package.remote()))
        if len(used) == 2 and cluster.second is not None:
            cluster.remove_node(cluster.second, allow_graceful=False)
            cluster.second = None

    store = Store.create(tmp_path / "store")
    sweep(parse_config(SWEEP), store, data_folder=tmp_path / "data", address=cluster.address, listener=listener)
    assert cluster.second is None, told  # it was lost while trials ran
    assert sorted(store.statuses().values()) == ["finished"] * 3
    assert any("started again after" in message for message in told)
    assert "runtime_resources" in shipped[0]  # not the package that this test imports
    assert (Path(depthlaw.__file__).parent / "archs").is_symlink()  # and links were followed on the way


def test_the_ranks_of_a_trial_spread_over_two_nodes(cluster, tmp_path):
    used = set()

    def listener(progress):
        used.update(nodes_of_actors() if "val_loss" in progress.message else ())

    store = Store.create(tmp_path / "store")
    two = parse_config(SWEEP | {"ranks_per_trial": 2, "grid": [SWEEP["grid"][0] | {"lr": [4e-3, 6e-3]}]})
    sweep(two, store, data_folder=tmp_path / "data", address=cluster.address, listener=listener)
    assert sorted(store.statuses().values()) == ["finished"] * 2  # the second trial found its bundles free
    assert len(used) == 2
