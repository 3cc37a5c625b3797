"""A trial on two processes: the numbers of one process, whatever ZeRO does, and its end when one of them fails."""

import pickle
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.ranks import Ranks, meeting_point
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_trial

pytestmark = pytest.mark.engine

SWEEP = {
    "name": "ranks",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 4,
    "shape_rule": "small",
    # Five micro-batches of validation: on two ranks one of them has a round with nothing to do.
    "validation": {"times": 5, "windows": 20},
    "log_every": 5,
    "grid": [{"topologies": ["pre_ln"], "shapes": [[2, 16]], "tokens_per_backbone_param": [4], "lr": [5e-3]}],
}

OTHER = """
import pickle, sys
import torch
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.ranks import Ranks, joined
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_rank

spec, port, store, data, before = pickle.load(open(sys.argv[1], "rb"))
torch.set_num_threads(1)
exec(before)
run_rank(spec, Store(store), Dataset(data), Ranks(1, 2, joined("127.0.0.1", port)))
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return build_data(parse_config(SWEEP).data, tmp_path_factory.mktemp("data"))


@pytest.fixture
def spec_of(dataset):
    def spec_of(**changes) -> TrialSpec:
        (spec,) = plan(parse_config(SWEEP), dataset.fingerprint)
        return TrialSpec.from_dict(spec.to_dict() | changes)

    return spec_of


@pytest.fixture
def two(dataset, tmp_path):
    """`two(store)` is a gang: rank 1 is a process beside this one, without Ray. `before` is code that it runs first."""

    def two(store, before=""):
        @contextmanager
        def gang(spec):
            assert spec.ranks == 2
            meeting, port = meeting_point("127.0.0.1")
            told = tmp_path / "told.pickle"
            told.write_bytes(pickle.dumps((spec, port, str(store.path), dataset.path, before)))
            other = subprocess.Popen([sys.executable, "-c", OTHER, str(told)])
            try:
                yield Ranks(0, 2, meeting, other.kill)
                assert other.wait(60) == 0
            finally:
                other.kill()
                other.wait()

        return gang

    return two


def curve(store: Store, spec: TrialSpec) -> dict[str, np.ndarray]:
    """Values by name, in the order of their steps."""
    steps = store.steps(trial=spec.hash).sort_values(["name", "step"])
    return {str(name): rows["value"].to_numpy() for name, rows in steps.groupby("name")}


def assert_near(a: dict[str, np.ndarray], b: dict[str, np.ndarray], atol: float) -> None:
    assert a["train_loss"][0] - a["train_loss"][-1] > 0.5  # it learns: the comparison is of a model that moves
    for name in ("train_loss", "val_loss"):
        np.testing.assert_allclose(a[name], b[name], atol=atol, rtol=0)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=10 * atol)


def test_two_ranks_take_the_steps_that_one_takes(dataset, spec_of, two, tmp_path):
    alone, both = Store.create(tmp_path / "alone"), Store.create(tmp_path / "both")
    one = run_trial(spec_of(), alone, dataset)
    row = run_trial(spec_of(ranks=2), both, dataset, gang=two(both))
    assert row["trial"] == one["trial"]
    assert row["tokens_done"] == one["tokens_done"]
    assert_near(curve(alone, spec_of()), curve(both, spec_of()), 1e-5)
    assert len(both.trials()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("label", ["full_attnres", "hc"])
def test_zero_stages_on_two_ranks_train_as_one_rank_without(dataset, spec_of, two, tmp_path, label, stage, precision):
    alone, both = Store.create(tmp_path / "alone"), Store.create(tmp_path / "both")
    spec = spec_of(topology=label, precision=precision)
    run_trial(spec, alone, dataset)
    run_trial(spec_of(topology=label, precision=precision, ranks=2, zero_stage=stage), both, dataset, gang=two(both))
    assert_near(curve(alone, spec), curve(both, spec), 1e-3)
