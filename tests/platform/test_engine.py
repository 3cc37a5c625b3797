"""One trial against plain torch, and what a trial leaves behind when it is disturbed."""

import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from depthlaw.archs.backbone import build
from depthlaw.archs.topologies import topology
from depthlaw.platform import cadence
from depthlaw.platform.checkpoint import CheckpointError
from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.engine import running_engine
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.schedules import cosine
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_trial

pytestmark = pytest.mark.engine


def config(**changes):
    raw = {
        "name": "engine",
        "data": {"source": "pydoc", "vocab_size": 300},
        "seq_len": 32,
        "batch_tokens": 256,
        "micro_batch_seqs": 4,
        "shape_rule": "small",
        "validation": {"times": 5, "windows": 16},
        "log_every": 5,
        "grid": [
            {"topologies": ["pre_ln"], "shapes": [[2, 16]], "tokens_per_backbone_param": [8], "lr": [5e-3]},
        ],
    }
    return parse_config(raw | changes)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return build_data(config().data, tmp_path_factory.mktemp("data"))


def one_spec(dataset, label="pre_ln", **changes) -> TrialSpec:
    (spec,) = plan(config(), dataset.fingerprint)
    return TrialSpec.from_dict(spec.to_dict() | {"topology": label} | changes)


def plain_torch(spec, dataset, steps):
    """The same training written without the engine: two micro-batches a step, clipping, AdamW, warm-up and cosine."""
    model = build(spec.shape, topology(spec.topology), spec.seed)
    decayed = [p for _, p, d in model.decayed() if d]
    others = [p for _, p, d in model.decayed() if not d]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=spec.lr, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = (
            torch.from_numpy(a) for a in dataset.train_batch(step, seq_len=spec.seq_len, batch_seqs=8, seed=spec.seed)
        )
        rise = round(0.1 * spec.steps)
        wave = 0.5 * (1 + math.cos(math.pi * (step - rise) / (spec.steps - 1 - rise)))
        for group in optimizer.param_groups:
            group["lr"] = spec.lr * ((step + 1) / rise if step < rise else 0.1 + 0.9 * wave)
        optimizer.zero_grad()
        loss = F.cross_entropy(model.logits(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms


@pytest.mark.parametrize("label", ["pre_ln", "hc", "full_attnres"])
def test_the_engine_trains_as_plain_torch_does_for_50_steps(dataset, tmp_path, label):
    spec = one_spec(dataset, label)
    assert spec.steps >= 50
    store = Store.create(tmp_path / "store")
    run_trial(spec, store, dataset)
    losses, norms = plain_torch(spec, dataset, 50)
    steps = store.steps(trial=spec.hash).pivot(index="step", columns="name", values="value")
    np.testing.assert_allclose(steps["train_loss"].iloc[:50], losses, atol=1e-4, rtol=0)
    np.testing.assert_allclose(steps["grad_norm"].iloc[:50], norms, rtol=1e-3)
    assert losses[-1] < losses[0] - 0.5  # it learns, so the comparison is of a model that moves


def test_a_finished_row_says_what_was_run_and_found(dataset, tmp_path):
    spec = one_spec(dataset, "hc")
    store = Store.create(tmp_path / "store")
    run_trial(spec, store, dataset)
    (row,) = store.trials().to_dict("records")
    assert (row["trial"], row["status"], row["topology"]) == (spec.hash, "finished", "hc")
    assert row["tokens_done"] == spec.tokens == spec.steps * 256
    assert row["backbone_params"] + row["embedding_params"] == row["params"] == spec.costs.params
    assert row["train_flops"] == spec.tokens * spec.costs.train_flops_per_token(32)
    steps = store.steps(trial=spec.hash)
    validations = steps[steps["name"] == "val_loss"]
    assert len(validations) == 5
    assert row["val_loss"] == validations["value"].iloc[-1] < math.log(300)
    _, targets = dataset.validation_windows(32, 16)
    text = len(dataset.tokenizer().decode(targets.flatten().tolist(), skip_special_tokens=True).encode())
    assert row["bits_per_byte"] == pytest.approx(row["val_loss"] * targets.size / math.log(2) / text, rel=0.02)
    assert 0 < row["train_s"] < row["wall_s"]


class InterruptedHereError(Exception):
    pass


@pytest.fixture(autouse=True)
def checkpoints_whenever_asked(monkeypatch):
    """However much of these short runs' time it takes: the bound has tests of its own."""
    monkeypatch.setattr(cadence, "SHARE", math.inf)


def test_an_interrupted_trial_resumes_from_its_checkpoint_to_the_same_bits(dataset, tmp_path):
    spec = one_spec(dataset, "full_attnres")
    calm, rough = Store.create(tmp_path / "calm"), Store.create(tmp_path / "rough")
    undisturbed = run_trial(spec, calm, dataset)
    often = one_spec(dataset, "full_attnres", checkpoint_every_s=1e-9)
    assert often.hash == spec.hash
    ends = iter([0.3, 0.3, 0.7])
    stop_at = next(ends) * spec.steps

    def interrupt(metrics):
        if metrics["step"] >= stop_at:
            raise InterruptedHereError

    for _ in range(3):
        with pytest.raises(InterruptedHereError):
            run_trial(often, rough, dataset, report=interrupt)
        stop_at = next(ends, 2) * spec.steps
        assert rough.statuses() == {}
    resumed = run_trial(often, rough, dataset)
    assert resumed["attempt"] == 2  # the second interruption came before anything was written
    assert resumed["val_loss"] == undisturbed["val_loss"]
    key = ["step", "name"]
    a, b = (s.steps(trial=spec.hash).set_index(key)["value"] for s in (calm, rough))
    assert a.index.is_unique
    assert b.index.is_unique
    assert a.equals(b)
    assert not rough.checkpoint_dir(spec.hash).exists()
    assert rough.steps(trial=spec.hash)["attempt"].nunique() > 1  # earlier attempts' steps were kept, not redone


def interrupted(dataset, folder, **changes) -> tuple[TrialSpec, Store]:
    """A trial that checkpointed at every report and stopped after its second validation."""
    spec, store = one_spec(dataset, checkpoint_every_s=1e-9, **changes), Store.create(folder)

    def interrupt(metrics):
        if metrics["step"] > spec.steps * 0.3:
            raise InterruptedHereError

    with pytest.raises(InterruptedHereError):
        run_trial(spec, store, dataset, report=interrupt)
    return spec, store


def truncate(pointed: Path, pointer: Path) -> None:
    with open(pointed, "r+b") as file:
        file.truncate(100)


def scramble(pointed: Path, pointer: Path) -> None:
    pointed.write_bytes(b"x" * pointed.stat().st_size)


def remove(pointed: Path, pointer: Path) -> None:
    pointed.unlink()


def blank(pointed: Path, pointer: Path) -> None:
    pointer.write_text("")


@pytest.mark.parametrize("damage", [truncate, scramble, remove, blank])
def test_a_damaged_checkpoint_is_named_and_deleted_and_the_trial_starts_over_to_the_same_bits(
    dataset, tmp_path, damage
):
    spec, store = interrupted(dataset, tmp_path / "rough")
    (pointed,) = store.checkpoint_dir(spec.hash).glob("step*/mp_rank*")
    damage(pointed, store.checkpoint_dir(spec.hash) / "latest.json")
    with pytest.raises(CheckpointError, match=r"cannot be used .* the trial starts over"):
        run_trial(spec, store, dataset)
    undisturbed = run_trial(spec, Store.create(tmp_path / "calm"), dataset)
    assert run_trial(spec, store, dataset)["val_loss"] == undisturbed["val_loss"]
    assert store.steps(trial=spec.hash).set_index(["step", "name"]).index.is_unique


def test_a_checkpoint_of_another_zero_stage_is_refused_not_loaded_without_its_moments(dataset, tmp_path):
    spec, store = interrupted(dataset, tmp_path / "store")
    other = one_spec(dataset, zero_stage=1)
    assert other.hash == spec.hash
    with pytest.raises(CheckpointError, match="it is of ZeRO stage 0, and this run has 1"):
        run_trial(other, store, dataset)


def test_a_rate_far_too_high_is_stopped_early_and_kept_as_diverged(dataset, tmp_path):
    spec = one_spec(dataset, lr=20.0)
    store = Store.create(tmp_path / "store")
    run_trial(spec, store, dataset)
    (row,) = store.trials().to_dict("records")
    assert row["status"] == "diverged"
    assert "was above 1.3 x its lowest so far" in row["reason"] or "not finite" in row["reason"]
    assert row["steps_done"] < spec.steps / 2
    assert math.isnan(row["val_loss"])
    assert store.steps(trial=spec.hash, names="train_loss")["step"].max() == row["steps_done"]


def test_bf16_is_autocast_over_fp32_parameters(dataset, tmp_path):
    spec = one_spec(dataset, "hc", precision="bf16")
    model = build(spec.shape, topology("hc"), 0)
    with running_engine(model, spec) as engine:
        inputs, targets = (torch.from_numpy(a) for a in dataset.train_batch(0, seq_len=32, batch_seqs=4, seed=0))
        seen = []
        model.branches[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
        engine(inputs, targets)
        assert seen == [torch.bfloat16]
        assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    fp32 = run_trial(one_spec(dataset, "hc"), Store.create(tmp_path / "a"), dataset)["val_loss"]
    bf16 = run_trial(spec, Store.create(tmp_path / "b"), dataset)["val_loss"]
    assert bf16 != fp32
    assert abs(bf16 - fp32) < 0.05


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_train_to_the_same_loss(dataset, tmp_path, stage):
    losses = []
    for zero_stage in (0, stage):
        store = Store.create(tmp_path / f"{zero_stage}")
        losses.append(run_trial(one_spec(dataset, "full_attnres", zero_stage=zero_stage), store, dataset)["val_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


def test_an_engine_takes_no_port_that_another_process_could_take_first(dataset, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    spec = one_spec(dataset)
    for _ in range(2):  # and the process can start another
        with running_engine(build(spec.shape, topology("pre_ln"), 0), spec):
            assert torch.distributed.get_world_size() == 1
        assert "MASTER_PORT" not in os.environ
        assert not torch.distributed.is_initialized()


def test_the_private_name_that_keeps_deepspeed_from_compiling_is_still_there():
    import deepspeed

    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__


# Losses of numerics_version 1 on synthetic tokens. If this test fails, what a trial computes has changed: raise
# NUMERICS_VERSION in plan.py, so that stored trials are not taken for the new ones, and write the new losses here.
GOLDEN = {
    "pre_ln": [5.7003, 4.9521, 4.4165],
    "hc": [5.7000, 4.9560, 4.4211],
    "full_attnres": [5.7003, 4.9523, 4.4136],
}


@pytest.mark.parametrize("label", ["pre_ln", "hc", "full_attnres"])
def test_golden_losses_guard_the_numerics_version(label, dataset):
    from depthlaw.platform.plan import NUMERICS_VERSION

    spec = one_spec(dataset, label)
    model = build(spec.shape, topology(label), 3)
    tokens = torch.arange(4 * 33).reshape(4, 33) ** 2 % 97
    found = []
    with running_engine(model, spec) as engine:
        for step in range(12):
            for group in engine.optimizer.param_groups:
                group["lr"] = cosine(step, 12, 1e-2, 0.25, 0.1)
            for _ in range(2):
                loss = engine(tokens[:, :-1], tokens[:, 1:])
                engine.backward(loss)
                engine.step()
            found.append(float(loss.detach()))
    assert (NUMERICS_VERSION, [found[0], found[5], found[-1]]) == (1, pytest.approx(GOLDEN[label], abs=5e-4))


def test_the_learning_rate_rises_then_falls_along_a_cosine_to_its_final_share():
    rates = [cosine(s, 100, 2.0, 0.1, 0.1) for s in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == pytest.approx(2.0)
    assert rates[-1] == pytest.approx(0.2)
    middle = (10 + 99) / 2
    assert np.interp(middle, range(100), rates) == pytest.approx(2.0 * 0.55, rel=1e-3)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    for steps, warmup in ((1, 0.1), (2, 1.0), (7, 1.0), (3, 0.9)):
        assert cosine(steps - 1, steps, 2.0, warmup, 0.1) == pytest.approx(0.2)
