"""The ranks of a trial as Ray actors: one without memory, one killed, and what is free again after."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.store import Store
from support import titled, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SWEEP = {
    "name": "gang",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 8,
    "shape_rule": "small",
    "validation": {"times": 4, "windows": 16},
    "log_every": 5,
    "ranks_per_trial": 2,
    "grid": [{"topologies": ["pre_ln"], "shapes": [[2, 16]], "tokens_per_backbone_param": [4], "lr": [5e-3]}],
}


def no_memory_on_rank_1_for_more_than_4_sequences():
    """Runs in every worker of the cluster before anything else."""
    import torch

    from depthlaw.archs.backbone import SwiGLU

    real = SwiGLU.forward

    def forward(self, x_BTD, context):
        if os.environ.get("RANK") == "1" and len(x_BTD) > 4:
            raise torch.OutOfMemoryError("tried to allocate 1.00 GiB")
        return real(self, x_BTD, context)

    SwiGLU.forward = forward


@pytest.fixture
def cluster():
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield partial(
        ray.init, address="local", num_cpus=2, include_dashboard=False,
        log_to_driver=False, logging_level="CRITICAL",
    )  # fmt: skip
    ray.shutdown()


def trial_in(group, spec, store: Path, folder: Path, data):
    """A trial as Tune would run it: in an actor at the first bundle of a group that has one for each rank."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    @ray.remote(num_cpus=1)
    class Trial:
        def run(self):
            from depthlaw.platform.gang import ray_gang
            from depthlaw.platform.trial import run_trial

            gang = partial(ray_gang, store=str(store), folder=str(folder), data=data)
            return run_trial(spec, Store(store), build(data, folder), gang=gang)["status"]

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return Trial.options(scheduling_strategy=place).remote()


def specs(fingerprint: str, **changes) -> tuple[TrialSpec, ...]:
    return tuple(TrialSpec.from_dict(s.to_dict() | changes) for s in plan(parse_config(SWEEP), fingerprint))


def test_one_rank_without_memory_makes_all_take_half_at_once(cluster, tmp_path):
    import ray

    data = parse_config(SWEEP).data
    dataset = build(data, tmp_path / "data")
    (spec,) = specs(dataset.fingerprint)
    store = Store.create(tmp_path / "store")
    cluster(runtime_env={"worker_process_setup_hook": no_memory_on_rank_1_for_more_than_4_sequences})
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    actor = trial_in(group, spec, store.path, tmp_path / "data", data)
    assert ray.get(actor.run.remote(), timeout=200) == "finished"
    (row,) = store.trials().to_dict("records")
    assert json.loads(row["spec"])["micro_batch_seqs"] == 4
    assert row["reason"] == "out of memory with 8 sequences at once on a rank, done with 4"


def ranks() -> set[psutil.Process]:
    """Processes that run as a rank beside a trial's own."""
    return set(titled(psutil.process_iter(), "ray::Rank"))


def test_a_killed_rank_ends_the_attempt_in_one_line_and_the_next_goes_on_from_the_checkpoint(cluster, tmp_path):
    import ray

    data = parse_config(SWEEP).data
    dataset = build(data, tmp_path / "data")
    (spec,) = specs(dataset.fingerprint, checkpoint_every_s=1e-9)
    stores = {name: Store.create(tmp_path / name) for name in ("calm", "rough")}
    cluster()
    group = ray.util.placement_group([{"CPU": 1}] * 2)
    before = ranks()
    actor = trial_in(group, spec, stores["rough"].path, tmp_path / "data", data)
    running = actor.run.remote()
    folder = stores["rough"].checkpoint_dir(spec.hash)
    wait_for(lambda: (folder / "latest.json").exists())
    (victim,) = ranks() - before
    victim.kill()
    with pytest.raises(ray.exceptions.RayTaskError) as caught:
        ray.get(running, timeout=60)
    assert type(caught.value.cause).__name__ == "RankError"
    assert str(caught.value.cause) == "rank 1 of 2: its process died: killed, or out of memory"
    ray.kill(actor)
    # The same group has room for it again: nothing of the first attempt holds a bundle.
    for name in ("rough", "calm"):
        actor = trial_in(group, spec, stores[name].path, tmp_path / "data", data)
        assert ray.get(actor.run.remote(), timeout=120) == "finished"
        ray.kill(actor)
    a, b = (s.steps().set_index(["step", "name"])["value"].sort_index() for s in stores.values())
    assert a.equals(b)  # to the last bit
    assert stores["rough"].steps()["attempt"].nunique() == 2
