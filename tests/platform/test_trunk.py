"""Branches of one trunk: each is to the last bit the run of its own that it stands for, and the trunk is paid once."""

import math

import numpy as np
import pytest

from depthlaw.platform import cadence, checkpoint
from depthlaw.platform.config import ConfigError, parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.plan import TrialSpec, plan
from depthlaw.platform.schedules import branch_step, rate, wsd
from depthlaw.platform.store import Store
from depthlaw.platform.trial import run_trial
from depthlaw.platform.trunk import Trunk, families, spent_flops, trunk_key
from depthlaw.platform.worker import trainable

RATIOS = [3, 5, 11]


def config(**changes):
    raw = {
        "name": "trunk",
        "data": {"source": "pydoc", "vocab_size": 300},
        "seq_len": 32,
        "batch_tokens": 256,
        "micro_batch_seqs": 4,
        "shape_rule": "small",
        "validation": {"times": 5, "windows": 16},
        "log_every": 7,
        "layer_stats_every": 5,
        "schedule": {"kind": "wsd", "warmup_steps": 6, "decay": 0.3},
        "grid": [{"topologies": ["pre_ln"], "shapes": [[2, 16]], "tokens_per_backbone_param": RATIOS, "lr": [5e-3]}],
    }
    return parse_config(raw | changes)


# ---- the schedule, without training


def test_the_rate_rises_stays_and_falls_as_one_minus_the_root():
    rates = [wsd(step, 80, 100, 2.0, 10, 0.0) for step in range(100)]
    assert rates[:10] == pytest.approx([0.2 * (k + 1) for k in range(10)])
    assert set(rates[10:81]) == {2.0}
    assert rates[85] == pytest.approx(2.0 * (1 - math.sqrt(5 / 20)))  # a quarter of the decay: half the rate
    assert rates[99] == pytest.approx(2.0 * (1 - math.sqrt(19 / 20)))
    kept = [wsd(step, 80, 100, 2.0, 10, 0.1) for step in range(100)]
    assert kept[85] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert (np.diff(kept[80:]) < 0).all()


def test_before_it_decays_a_run_is_the_same_however_long_it_is_to_be():
    short, *longer = families(plan(config(), "f"))[0]
    assert branch_step(short) == short.steps - round(0.3 * short.steps)
    for spec in longer:
        assert [rate(spec, s) for s in range(branch_step(short))] == [rate(short, s) for s in range(branch_step(short))]
        assert rate(spec, branch_step(short) + 1) > rate(short, branch_step(short) + 1)


def test_a_warm_up_that_reaches_the_decay_is_refused_with_the_steps_there_are():
    with pytest.raises(ConfigError, match=r"makes \d+ steps, of which the last \d+ decay: .* must be below \d+"):
        plan(config(schedule={"kind": "wsd", "warmup_steps": 200}))


def test_trials_that_differ_only_in_tokens_share_a_trunk_and_others_do_not():
    block = {"topologies": ["pre_ln", "hc"], "shapes": [[2, 16], [1, 24]], "tokens_per_backbone_param": RATIOS,
             "lr": [5e-3, 1e-2]}  # fmt: skip
    trials = plan(config(grid=[block], seeds=[0, 1]), "f")
    found = families(trials)
    assert len(found) == 2 * 2 * 2 * 2
    for family in found:
        assert [spec.tokens for spec in family] == sorted({spec.tokens for spec in family})
        assert len(family) == 3
        assert len({(s.topology, s.n_layers, s.lr, s.seed, trunk_key(s)) for s in family}) == 1
    cosine = plan(config(schedule={}), "f")
    assert [len(family) for family in families(cosine)] == [1] * 3
    assert [trunk_key(spec) for spec in cosine] == [spec.hash for spec in cosine]


def test_the_flops_of_a_shared_trunk_are_counted_once():
    trials = plan(config(), "f")
    spent = spent_flops(trials)
    # The trunk as far as the longest needs it, and every decay.
    steps = branch_step(trials[-1]) + sum(spec.steps - branch_step(spec) for spec in trials)
    assert sum(spent.values()) == steps * 256 * trials[0].costs.train_flops_per_token(32)
    assert spent[trials[0].hash] == trials[0].train_flops
    cosine = plan(config(schedule={}), "f")
    assert spent_flops(cosine) == {spec.hash: spec.train_flops for spec in cosine}


def test_a_cosine_has_the_hash_it_had_before_there_was_another_schedule():
    (spec, *_) = plan(config(schedule={}), "f")
    assert spec.schedule == {"warmup": 0.1, "final": 0.1}
    assert spec.hash == "0c46ea2d27253c82"


# ---- training


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return build_data(config().data, tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def checkpoints_whenever_asked(monkeypatch):
    monkeypatch.setattr(cadence, "SHARE", math.inf)


@pytest.fixture(scope="module")
def alone(dataset, tmp_path_factory):
    """Every branch from scratch, as a run of its own."""
    store = Store.create(tmp_path_factory.mktemp("alone") / "store")
    for spec in plan(config(), dataset.fingerprint):
        run_trial(spec, store, dataset)
    return store


class InterruptedHereError(Exception):
    pass


def run_family(store, dataset, interrupt_at=(), **changes):
    """As a worker does; `interrupt_at` are the (trial, step) after whose validation it dies, and begins again."""
    specs = [TrialSpec.from_dict(s.to_dict() | changes) for s in plan(config(), dataset.fingerprint)]
    folder, ends = store.checkpoint_dir(trunk_key(specs[0])), list(interrupt_at)

    def report_of(k):
        def report(metrics):
            if ends and (k, metrics["step"]) >= ends[0] and "val_loss" in metrics:
                ends.pop(0)
                raise InterruptedHereError

        return report

    while True:
        try:
            for k, spec in enumerate(specs):
                if store.statuses().get(spec.hash) is None:
                    run_trial(spec, store, dataset, report=report_of(k), trunk=Trunk(folder, specs[k + 1 :]))
            checkpoint.delete(folder)
        except InterruptedHereError:
            continue
        assert not ends
        return specs


def assert_same(store, alone, specs):
    for spec in specs:
        a, b = (s.steps(trial=spec.hash).set_index(["step", "name"])["value"] for s in (store, alone))
        assert a.index.is_unique
        assert a.equals(b)
    names = ["status", "val_loss", "last_val_loss", "bits_per_byte", "tokens", "tokens_done", "steps_done"]
    a, b = (s.trials().set_index("trial")[names] for s in (store, alone))
    assert a.equals(b)


@pytest.mark.engine
def test_every_branch_is_bit_equal_to_its_run_from_scratch_and_the_trunk_is_paid_once(dataset, alone, tmp_path):
    store = Store.create(tmp_path / "store")
    specs = run_family(store, dataset)
    assert_same(store, alone, specs)
    rows = store.trials().set_index("trial")
    assert rows["train_flops"].to_dict() == spent_flops(specs)
    assert rows["train_flops"].sum() < 0.8 * alone.trials()["train_flops"].sum()
    assert set(rows["status"]) == {"finished"}
    # More tokens, a lower loss: the branches are points of a law.
    assert list(rows.loc[[spec.hash for spec in specs], "val_loss"].diff().dropna() < 0) == [True, True]
    assert not (store.path / "checkpoints").exists()


@pytest.mark.engine
@pytest.mark.parametrize("every_s", [1e-9, 1e9])
def test_interrupted_in_the_trunk_in_a_decay_and_between_branches_it_ends_with_the_same_bits(
    dataset, alone, tmp_path, every_s
):
    store = Store.create(tmp_path / "store")
    first, second, _ = plan(config(), dataset.fingerprint)
    in_trunk, in_decay, between = (0, 10), (0, branch_step(first) + 1), (1, branch_step(first) + 1)
    specs = run_family(store, dataset, [in_trunk, in_decay, between, (1, second.steps)], checkpoint_every_s=every_s)
    assert_same(store, alone, specs)
    rows = store.trials().set_index("trial")
    assert rows["train_flops"].to_dict() == spent_flops(specs)  # whatever was trained twice is not in the plan's cost


@pytest.mark.engine
def test_the_last_branch_alone_takes_the_trunk_that_the_others_left_and_clears_it_away(
    dataset, alone, tmp_path, monkeypatch
):
    from ray import tune

    told = []
    monkeypatch.setattr(tune, "report", told.append)
    store = Store.create(tmp_path / "store")
    specs = plan(config(), dataset.fingerprint)
    folder = store.checkpoint_dir(trunk_key(specs[0]))
    for k in (0, 1):
        run_trial(specs[k], store, dataset, trunk=Trunk(folder, specs[k + 1 :]))
    assert (folder / checkpoint.POINTER).exists()
    trainable(
        {"trial": "last"},
        runs={"last": [specs[2].to_dict()]},
        store_path=str(store.path),
        data_folder=str(dataset.path.parent),
        data=config().data,
        pruning=None,
        board=None,
        loggers=[],
        keep=False,
    )
    assert_same(store, alone, specs)
    assert store.trials()["train_flops"].sum() == sum(spent_flops(specs).values())
    assert not (store.path / "checkpoints").exists()
    assert {metrics["trial"] for metrics in told} == {specs[2].hash}
    assert told[-1]["status"] == "finished"


@pytest.mark.engine
def test_a_trunk_that_was_left_for_other_branches_is_not_used(dataset, alone, tmp_path):
    """Its validations are not where this branch has its own: the trial starts over instead of missing some."""
    store = Store.create(tmp_path / "store")
    first, second, third = plan(config(), dataset.fingerprint)
    folder = store.checkpoint_dir(trunk_key(first))
    run_trial(second, store, dataset, trunk=Trunk(folder, [first]))
    for spec in (third, first):  # the one has a validation in the trunk that was not made, the other ends before it
        if spec is first:
            run_trial(third, store, dataset, trunk=Trunk(folder, [first]))
        with pytest.raises(checkpoint.CheckpointError, match="was left for other trials"):
            run_trial(spec, store, dataset, trunk=Trunk(folder, []))
    run_trial(first, store, dataset, trunk=Trunk(folder, []))
    assert_same(store, alone, [first, second, third])


@pytest.mark.engine
def test_branches_of_a_trunk_that_diverges_are_judged_each_by_its_own_length(dataset, tmp_path):
    shared, alone = Store.create(tmp_path / "shared"), Store.create(tmp_path / "alone")
    specs = run_family(shared, dataset, lr=20.0)
    for spec in specs:
        run_trial(spec, alone, dataset)
    assert_same(shared, alone, specs)
    assert set(shared.trials()["status"]) == {"diverged"}
