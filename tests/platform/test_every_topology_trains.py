"""Every topology in a trial of its own, on real text, shallow to deep."""

import math
from dataclasses import replace

import pytest

from depthlaw.archs.topologies import TOPOLOGIES
from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_trial

pytestmark = pytest.mark.slow

NAMES = [*sorted(TOPOLOGIES.keys() - {"hybrid"}), "hybrid(blocks=2)", "block_attnres(grows=True)", "mhc(free=0.5)"]
SHAPES = [[1, 48], [4, 32], [24, 16]]
STEPS = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return build(sweep(["pre_ln"], SHAPES[:1], 4e-3).data, tmp_path_factory.mktemp("data"))


def sweep(names, shapes, lr):
    block = {"topologies": names, "shapes": shapes, "tokens_per_backbone_param": [1], "lr": [lr]}
    return parse_config(
        {
            "name": "every",
            "data": {"source": "pydoc", "vocab_size": 300},
            "seq_len": 64,
            "batch_tokens": 512,
            "micro_batch_seqs": 8,
            "shape_rule": "small",
            "validation": {"times": 10, "windows": 16},
            "grid": [block],
        }
    )


def trials(names, shapes, lr, data) -> list[TrialSpec]:
    specs = plan(sweep(names, shapes, lr), data.fingerprint)
    return [replace(spec, tokens=STEPS * spec.batch_tokens) for spec in specs]


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_200_steps_on_real_text_at_three_shapes_and_its_loss_falls(name, data, tmp_path):
    store = Store.create(tmp_path / "store")
    for spec in trials([name], SHAPES, 4e-3, data):
        row = run_trial(spec, store, data)
        assert row["status"] == "finished", row["reason"]
        values = store.steps(trial=spec.hash).pivot(index="step", columns="name", values="value")
        assert len(values) == STEPS
        losses = values["train_loss"]
        assert losses.map(math.isfinite).all()
        assert values["grad_norm"].map(math.isfinite).all()
        assert losses.iloc[-20:].mean() < losses.iloc[:10].mean() - 1.0, (spec.n_layers, spec.d_model)


def test_deepnorm_at_a_rate_ten_times_too_high_is_caught(data, tmp_path):
    """It does not blow up, for its stream is normed: it forgets all but the frequencies of tokens, and stays there."""
    good, bad = (trials(["deepnorm"], [[4, 32]], lr, data)[0] for lr in (4e-3, 4e-2))
    store = Store.create(tmp_path / "store")
    assert run_trial(good, store, data)["status"] == "finished"
    row = run_trial(bad, store, data)
    assert row["status"] == "diverged"
    assert row["reason"].startswith("never learnt")
