"""Statistics of sublayers against their definitions, and that looking changes nothing."""

import math

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.topologies import topology
from depthlaw.archs.topology import TOPOLOGIES
from depthlaw.platform.config import ConfigError, parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.layer_stats import norms, watched_forward
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_trial


def spec_of(sweep_of, fingerprint="f", **changes) -> TrialSpec:
    raw = sweep_of(
        data={"source": "pydoc", "vocab_size": 300}, seq_len=32, batch_tokens=256, micro_batch_seqs=4,
        validation={"times": 2, "windows": 8}, grid={"shapes": [[2, 16]], "tokens_per_backbone_param": [2]},
    )  # fmt: skip
    return TrialSpec.from_dict(plan(parse_config(raw), fingerprint)[0].to_dict() | changes)


def tokens(model):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(model.shape.vocab_size, (2, 17), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


@pytest.mark.parametrize("label", [*sorted(set(TOPOLOGIES) - {"hybrid"}), "hybrid(blocks=1)"])
def test_watching_a_forward_pass_changes_neither_loss_nor_gradient_nor_the_model(sweep_of, label):
    shape = spec_of(sweep_of).shape
    plain, watched = (build(shape, topology(label), 0) for _ in range(2))
    inputs, targets = tokens(plain)
    plain(inputs, targets).backward()
    with watched_forward(watched) as seen:
        loss = watched(inputs, targets)
    loss.backward()
    assert watched.topology == topology(label)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    names = {name for name, _ in seen}
    expected = {f"output_rms.{i}" for i in range(4)}
    assert names == expected | (set() if "hybrid" in label else {f"state_rms.{i}" for i in range(4)})
    assert all(math.isfinite(value) and value > 0 for _, value in seen)


def test_of_a_plain_residual_they_are_those_of_its_stream_written_out(sweep_of):
    model = build(spec_of(sweep_of).shape, topology("pre_ln"), 0)
    inputs, targets = tokens(model)
    outputs = []
    for branch in model.branches:
        branch.register_forward_hook(lambda module, args, out: outputs.append(out.detach().double()))
    with watched_forward(model) as seen:
        model(inputs, targets).backward()
    seen = dict(seen)
    stream = model.embedding.detach().double()[inputs]
    for i, out in enumerate(outputs):
        stream = stream + out
        assert seen[f"output_rms.{i}"] == pytest.approx(float(out.square().mean().sqrt()), rel=1e-5)
        assert seen[f"state_rms.{i}"] == pytest.approx(float(stream.square().mean().sqrt()), rel=1e-5)
    found = dict(norms(model, 0))
    for i, branch in enumerate(model.branches):
        gradients = [p.grad.double() for p in (*branch.parameters(), *model.depth[i].parameters())]
        expected = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        assert found[f"grad_norm.{i}"] == pytest.approx(expected, rel=1e-5)
        weights = [p.detach().double() for p in (*branch.parameters(), *model.depth[i].parameters())]
        expected = math.sqrt(sum(float(w.square().sum()) for w in weights))
        assert found[f"weight_norm.{i}"] == pytest.approx(expected, rel=1e-5)


def test_split_tensors_are_refused(sweep_of):
    with pytest.raises(ConfigError, match="layer_stats_every needs whole tensors"):
        parse_config(sweep_of(layer_stats_every=5, zero_stage=3))


@pytest.mark.engine
def test_a_trial_keeps_them_at_its_interval_and_ends_with_the_same_bits(sweep_of, tmp_path):
    data = build_data(parse_config(sweep_of(data={"source": "pydoc", "vocab_size": 300})).data, tmp_path / "data")
    kept = {}
    for stage, every in ((0, 0), (0, 5), (1, 5), (2, 5)):
        store = Store.create(tmp_path / f"{stage}-{every}")
        spec = spec_of(sweep_of, data.fingerprint, layer_stats_every=every, zero_stage=stage)
        loss = run_trial(spec, store, data)["val_loss"]
        kept[stage, every] = loss, store.steps().pivot(index="step", columns="name", values="value")
    (plain, without), (loss, steps) = kept[0, 0], kept[0, 5]
    assert loss == plain
    assert not [name for name in without if "." in name]
    looked = steps.dropna(subset=["grad_norm.3"])
    assert list(looked.index) == list(range(5, spec.steps + 1, 5))
    assert {name.split(".")[0] for name in steps if "." in name} == {"grad_norm", "weight_norm", "output_rms", "state_rms"}  # fmt: skip  # noqa: E501
    # With blocks computed again in the backward pass, each is noted once and nothing else changes.
    store = Store.create(tmp_path / "again")
    spec = spec_of(sweep_of, data.fingerprint, layer_stats_every=5, activation_checkpointing=True)
    run_trial(spec, store, data)
    (part,) = store.path.rglob("part-*.parquet")
    rows = pq.read_table(part).to_pandas()
    assert not rows.duplicated(["step", "name"]).any()
    again = rows.pivot(index="step", columns="name", values="value").dropna(subset=["grad_norm.3"])
    np.testing.assert_allclose(again[list(looked.columns)], looked, rtol=1e-4)
    parts = np.sqrt(sum(looked[f"grad_norm.{i}"] ** 2 for i in range(4)))
    assert (parts < looked["grad_norm"]).all()  # embedding, head and final norm are the rest
    assert (parts > 0.05 * looked["grad_norm"]).all()
    for stage in (1, 2):
        other = kept[stage, 5][1].dropna(subset=["grad_norm.3"])
        for name in ("grad_norm.0", "grad_norm.3", "weight_norm.1", "state_rms.2"):
            np.testing.assert_allclose(other[name], looked[name], rtol=2e-2)
