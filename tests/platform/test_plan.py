"""What a config asks for, trial by trial, and the hashes by which a store knows them again."""

import csv
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import fields, replace

import pytest

from depthlaw.platform.config import load_config, parse_config
from depthlaw.platform.plan import SETTLED, TrialSpec, missing, plan
from depthlaw.platform.store import STATUSES

# How a run is executed, and words about it: these do not make it another run.
EXECUTION = {"experiment", "data", "shape_rule", "micro_batch_seqs", "zero_stage", "checkpoint_every_s",
             "ranks", "activation_checkpointing", "layer_stats_every", "lr_searched_at"}  # fmt: skip
# What may differ between two losses that a law compares.
COMPARED = {"topology", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "tokens", "lr", "seed", "divergence",
            "log_every"}  # fmt: skip
ALL = [f.name for f in fields(TrialSpec)]


@pytest.fixture(scope="module")
def spec(sweep_of):
    return plan(parse_config(sweep_of()), "0123")[0]


def changed(value):
    """Every value that differs from this one in one place."""
    if isinstance(value, Mapping):
        return [{**value, key: other} for key in value for other in changed(value[key])]
    if isinstance(value, list):
        return [[*value[:k], other, *value[k + 1 :]] for k in range(len(value)) for other in changed(value[k])]
    return [value + "x"] if isinstance(value, str) else [value + 1] if isinstance(value, int) else [value * (1 + 1e-15)]


# ---- the published suite


def rounded(ratio, params, batch):
    """The whole number of batches nearest to ratio x params, in whole-number arithmetic."""
    return (2 * ratio * params + batch) // (2 * batch) * batch


def test_every_row_of_the_published_400m_suite_has_its_exact_parameters_and_tokens(request):
    root = request.config.rootpath
    with open(root / "tests/archs/published_shapes.csv", newline="") as file:
        published = {(int(r["n_layers"]), int(r["d_model"])): r for r in csv.DictReader(file) if r["suite"] == "400m"}
    trials = plan(load_config(root / "tune_configs/depthbench_400m.yaml"))
    counts = Counter(t.topology for t in trials)
    assert sorted(counts.values()) == [5] * 7 + [7] * 3
    assert {name for name, n in counts.items() if n == 7} == {"pre_ln", "hc", "full_attnres"}
    # Beyond Pre-LN: a sublayer of hc has 4 x 5 + 4 + 2 numbers and d (4 + 2); of full_attnres two gains of d.
    extra = {"pre_ln": lambda L, d: 0, "hc": lambda L, d: 2 * L * (26 + 6 * d), "full_attnres": lambda L, d: 4 * L * d}
    for t in trials:
        if t.topology not in extra:
            continue  # their counts are those of real modules, tested with the topologies
        row = published.get((t.n_layers, t.d_model))
        assert row is not None, t
        assert (t.d_ff, t.n_heads, t.n_kv_heads) == (int(row["d_ff"]), 16, 16)
        more = extra[t.topology](t.n_layers, t.d_model)
        assert t.costs.backbone_params == int(row["backbone_params"]) + more
        assert t.costs.params == int(row["total_params"]) + more
        assert t.tokens == rounded(20, int(row["total_params"]), 1_048_576)
        assert t.steps * 1_048_576 == t.tokens
    assert {(t.n_layers, t.d_model) for t in trials} == set(published)


@pytest.mark.parametrize(
    ("name", "suites", "n_trials"),
    [
        ("depthbench_300m_backbone", {"300m_backbone"}, 3 * 6 * 4),
        ("depthbench_ladder", {"ladder_200m", "ladder_300m", "ladder_400m", "ladder_500m"}, 10 * 12),
        ("depthbench_1600m", {"1600m"}, 10 * 3),
    ],
)
def test_the_other_published_suites_have_the_published_shapes(request, name, suites, n_trials):
    root = request.config.rootpath
    with open(root / "tests/archs/published_shapes.csv", newline="") as file:
        rows = [r for r in csv.DictReader(file) if r["suite"] in suites]
    columns = ("n_layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "vocab_size")
    published = {tuple(int(r[c]) for c in columns): (int(r["backbone_params"]), int(r["total_params"])) for r in rows}
    trials = plan(load_config(root / f"tune_configs/{name}.yaml"))
    assert len(trials) == n_trials
    for t in trials:
        _, total = published[tuple(getattr(t, c) for c in columns)]
        assert t.tokens == rounded(20, total, 1_048_576)
    plain = [t for t in trials if t.topology == "pre_ln"]
    found = {tuple(getattr(t, c) for c in columns): (t.costs.backbone_params, t.costs.params) for t in plain}
    assert found == published


def test_published_rates_are_those_of_each_topology(sweep_of):
    names = ["pre_ln", "lns", "deepnorm"]
    block = {"topologies": names, "shapes": [[2, 32]], "tokens_per_backbone_param": [4]}
    best = plan(parse_config(sweep_of(grid=block | {"lr": None, "published_lr": "best"})))
    assert [(t.topology, t.lr) for t in best] == [("pre_ln", 2e-3), ("lns", 1e-2), ("deepnorm", 1e-3)]
    grid = plan(parse_config(sweep_of(grid=block | {"lr": None, "published_lr": "grid"})))
    assert [t.lr for t in grid if t.topology == "pre_ln"] == [5e-4, 1e-3, 2e-3, 5e-3]
    assert max(t.lr for t in grid if t.topology == "lns") == 2e-2


# ---- the grid


def test_the_grid_is_the_cross_product_of_its_block_with_every_trial_once(sweep_of):
    block = {"topologies": ["pre_ln", "hc", "hc(streams=2)"], "shapes": [[2, 32], [4, 16]], "lr": [1e-3, 2e-3],
             "tokens_per_backbone_param": [4, 8]}  # fmt: skip
    trials = plan(parse_config(sweep_of(grid=block, seeds=[0, 1])))
    assert len(trials) == 3 * 2 * 2 * 2 * 2
    points = {(t.topology, t.n_layers, t.d_model, t.lr, t.tokens, t.seed) for t in trials}
    assert len(points) == len({t.hash for t in trials}) == len(trials)


def test_blocks_that_overlap_give_each_trial_once(sweep_of):
    one = sweep_of(grid={"shapes": [[2, 32], [4, 16]], "lr": [1e-3, 2e-3]})
    block = one["grid"][0]
    same_rate = {**block, "lr": ["1e-3", 4e-3, 4e-3], "topologies": ["pre_ln", " hc( streams=4 )", "hc"]}
    alone, both = plan(parse_config(one)), plan(parse_config({**one, "grid": [block, same_rate]}))
    assert len(alone) == 4
    # 4 of the first; of the second 2 more of pre_ln (one rate is there already) and 4 of hc, however it is written.
    assert len(both) == len({t.hash for t in both}) == 4 + 2 + 4
    assert [t.hash for t in both[:4]] == [t.hash for t in alone]
    assert {t.topology for t in both} == {"pre_ln", "hc"}


@pytest.mark.parametrize("ratio", ["tokens_per_param", "tokens_per_backbone_param"])
def test_all_topologies_of_a_shape_see_the_same_tokens_counted_by_its_plain_model(sweep_of, ratio):
    other = {"tokens_per_param": "tokens_per_backbone_param", "tokens_per_backbone_param": "tokens_per_param"}[ratio]
    block = {
        "topologies": ["hc", "full_attnres", "hc(streams=2)", "pre_ln"],
        "shapes": [[2, 32], [6, 48]],
        ratio: [3, 7],
    }
    seen = defaultdict(set)
    for t in plan(parse_config(sweep_of(grid={**block, other: None}))):
        seen[t.n_layers, t.d_model].add(t.tokens)
    for (L, d), tokens in seen.items():
        d_ff = -(-8 * d // 48) * 16  # 8 d / 3, up to 16
        params = L * (4 * d * d + 3 * d * d_ff + 2 * d) + d + (2 * 512 * d if ratio == "tokens_per_param" else 0)
        assert tokens == {rounded(3, params, 512), rounded(7, params, 512)}


def test_a_ratio_below_one_step_still_trains_one(sweep_of):
    trials = plan(parse_config(sweep_of(grid={"tokens_per_backbone_param": [1e-6]})))
    assert {t.tokens for t in trials} == {512}
    assert {t.steps for t in trials} == {1}


# ---- hashes


@pytest.mark.parametrize("name", ALL)
def test_a_hash_changes_with_every_field_but_those_of_execution(spec, name):
    for value in changed(getattr(spec, name)):
        other = replace(spec, **{name: value})
        assert (other.hash == spec.hash) == (name in EXECUTION), value


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_is_what_two_losses_must_share_to_compare(spec, name):
    for value in changed(getattr(spec, name)):
        other = replace(spec, **{name: value})
        assert (other.recipe_hash == spec.recipe_hash) == (name in EXECUTION | COMPARED), value


@pytest.mark.parametrize(
    "changes",
    [{"name": "other"}, {"micro_batch_seqs": 8}, {"zero_stage": 2}, {"checkpoint_every_s": 7}, {"max_epochs": 3},
     {"layer_stats_every": 5}, {"cpus_per_rank": 2}, {"gpus_per_rank": 1},
     {"ranks_per_trial": 2}, {"activation_checkpointing": True}, {"estimate_hardware": "h100"}],
)  # fmt: skip
def test_how_a_sweep_is_run_changes_no_hash(sweep_of, changes):
    hashes = [[t.hash for t in plan(parse_config(sweep_of(**more)), "0123")] for more in ({}, changes)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    "changes",
    [{"seq_len": 32}, {"batch_tokens": 1024}, {"precision": "bf16"}, {"optimizer": {"clip": 2}}, {"log_every": 9},
     {"schedule": {"warmup": 0.2}}, {"validation": {"windows": 8}}, {"divergence": {"patience": 4}}, {"seeds": [1]},
     {"data": {"source": "pydoc", "vocab_size": 300}}, {"grid": {"lr": [5e-3]}}, {"grid": {"topologies": ["hc"]}}],
)  # fmt: skip
def test_what_a_trial_computes_changes_every_hash(sweep_of, changes):
    first, other = ({t.hash for t in plan(parse_config(sweep_of(**more)), "0123")} for more in ({}, changes))
    assert not first & other


def test_other_data_changes_every_hash(sweep_of):
    config = parse_config(sweep_of())
    assert not {t.hash for t in plan(config, "0123")} & {t.hash for t in plan(config, "4567")}


def test_numbers_written_differently_are_the_same_trial(sweep_of):
    written = sweep_of(seq_len=64.0, optimizer={"clip": 1, "eps": "1e-8"}, grid={"lr": ["4e-3", "0.008"]})
    assert [t.hash for t in plan(parse_config(written))] == [t.hash for t in plan(parse_config(sweep_of()))]


def test_a_spec_comes_back_from_json_equal_and_with_its_hashes(sweep_of):
    for t in plan(
        parse_config(sweep_of(grid={"topologies": ["pre_ln", "hc(streams=2)"], "lr": [1 / 3, 1e-30]})), "0123"
    ):
        back = TrialSpec.from_dict(json.loads(json.dumps(t.to_dict())))
        assert back == t
        assert (back.hash, back.recipe_hash) == (t.hash, t.recipe_hash)


def test_hashes_are_the_same_in_another_process(sweep_of):
    code = (
        "import json, sys; from depthlaw.platform.config import parse_config; from depthlaw.platform.plan import plan\n"
        "print(json.dumps([[t.hash, t.recipe_hash] for t in plan(parse_config(json.load(sys.stdin)), '0123')]))"
    )
    raw = sweep_of(grid={"topologies": ["pre_ln", "hc"]})
    mine = [[t.hash, t.recipe_hash] for t in plan(parse_config(raw), "0123")]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(raw), capture_output=True, text=True, check=True, env=environment
    )
    assert json.loads(done.stdout) == mine


# ---- what is left to run


def test_only_trials_without_a_lasting_answer_are_missing(sweep_of):
    rates = [1e-3 * (k + 1) for k in range(len(STATUSES) + 1)]
    trials = plan(parse_config(sweep_of(grid={"lr": rates})), "0123")
    statuses = {t.hash: status for t, status in zip(trials, STATUSES, strict=False)}
    again = {statuses.get(t.hash, "never run") for t in missing(trials, statuses)}
    assert again == {"failed", "stopped", "never run"}
    assert set(SETTLED) == {"finished", "diverged", "pruned", "oom"}


def test_missing_keeps_the_order_of_the_plan_and_ignores_trials_of_others(sweep_of):
    trials = plan(parse_config(sweep_of(grid={"lr": [1e-3 * (k + 1) for k in range(40)]})), "0123")
    done = set(random.Random(0).sample([t.hash for t in trials], 15))
    left = missing(trials, {**dict.fromkeys(done, "finished"), "elsewhere": "failed"})
    assert [t.hash for t in left] == [t.hash for t in trials if t.hash not in done]
    assert len(left) == 25


def test_ten_thousand_trials_are_planned_while_one_waits(sweep_of, record_property):
    block = {"topologies": ["pre_ln", "hc"], "shapes": [[L, 8 * d] for L in range(1, 11) for d in range(2, 12)],
             "lr": [1e-3 * 1.1**k for k in range(25)], "tokens_per_backbone_param": [4, 8]}  # fmt: skip
    config = parse_config(sweep_of(grid=block))
    began = time.perf_counter()
    trials = plan(config, "0123")
    took = time.perf_counter() - began
    record_property("seconds", took)
    assert len(trials) == 10_000
    assert took < 30
