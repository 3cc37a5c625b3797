"""A wrong sweep is one line that says where, the value and what is allowed; a right one means what was written."""

import itertools
import math

import pytest

from depthlaw.platform.config import ConfigError, load_config, parse_config

BLOCK = {"topologies": ["pre_ln"], "shapes": [[2, 32]], "tokens_per_backbone_param": [4], "lr": [1e-3]}
FULL = {"n_layers": 2, "d_model": 48, "n_heads": 4, "n_kv_heads": 2, "d_ff": 128}


def refused(raw, source="config"):
    """The message of the error; that it is one line holds for every mistake."""
    with pytest.raises(ConfigError) as error:
        parse_config(raw, source)
    message = str(error.value)
    assert message.startswith(f"{source}: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lerning_rate": 1}, ["unknown key 'lerning_rate'", "allowed here: name, data, seq_len", "divergence"]),
        ({"data": {"vocab": 512}}, ["'data.vocab'", "allowed here: source, tokenizer, vocab_size"]),
        ({"optimizer": {"beta1": 0.9}}, ["'optimizer.beta1'", "allowed here: betas, eps, weight_decay, clip"]),
        ({"schedule": {"kinds": "wsd"}}, ["'schedule.kinds'", "allowed here: kind, warmup, final"]),
        ({"pruning": {"rungs": [0.5]}}, ["'pruning.rungs'", "allowed here: keep, at"]),
        (
            {"grid": {"lr_search": {"base": [2, 32]}}},
            ["'grid.0.lr_search.base'", "allowed here: base_shape, extensions"],
        ),
        ({"grid": {"topology": "hc"}}, ["'grid.0.topology'", "allowed here: topologies, shapes"]),
    ],
)
def test_an_unknown_key_is_named_with_its_place_and_the_allowed_keys(sweep_of, changes, words):
    message = refused(sweep_of(**changes))
    assert all(word in message for word in words), message


def test_a_misspelt_required_key_is_named_rather_than_the_key_that_it_leaves_missing(sweep_of):
    message = refused(sweep_of(seq_len=None, seqlen=64))
    assert "unknown key 'seqlen'" in message
    assert message.endswith("wrong too: seq_len")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": {"topologies": ["resnet"]}}, ["unknown topology 'resnet'", "full_attnres, hc"]),
        ({"grid": {"topologies": ["hc(width=2)"]}}, ["'hc(width=2)'", "streams"]),
        ({"grid": {"topologies": ["pre_ln(streams=2)"]}}, ["'pre_ln(streams=2)'", "none"]),
        ({"grid": {"topologies": ["hc(2)"]}}, ["'hc(2)'", "option=value"]),
        ({"grid": {"topologies": ["hc(streams=0)"]}}, ["streams", "0", "at least 1"]),
        ({"grid": {"topologies": ["hc(streams=two)"]}}, ["'hc(streams=two)'"]),
        ({"grid": {"topologies": ["hc(streams='two')"]}}, ["streams", "'two'", "int"]),
        ({"grid": {"topologies": ["hc(streams=2.5)"]}}, ["streams", "2.5", "int"]),
        ({"grid": {"topologies": ["hc(streams=True)"]}}, ["streams", "True", "int"]),
        ({"grid": {"topologies": [""]}}, ["''", "`hc`"]),
        ({"grid": {"shapes": [[2, 36]]}}, ["d_model 36", "'small'", "multiple of 8"]),
        ({"shape_rule": "published", "grid": {"shapes": [[2, 40]]}}, ["d_model 40", "'published'", "multiple of 32"]),
        ({"shape_rule": "golden"}, ["shape_rule", "'golden'", "published, published_1600m, small, head64, head128"]),
        ({"grid": {"shapes": [{**FULL, "n_heads": 5}]}}, ["n_heads 5", "d_model 48", "multiple"]),
        ({"grid": {"shapes": [{**FULL, "n_kv_heads": 3}]}}, ["n_kv_heads 3", "n_heads 4", "multiple"]),
        ({"grid": {"shapes": [{**FULL, "n_heads": 16}]}}, ["odd head_dim 3", "n_heads 16"]),
        ({"grid": {"shapes": [{"n_layers": 2, "d_model": 48}]}}, ["exactly d_ff, d_model, n_heads, n_kv_heads"]),
        ({"grid": {"shapes": [{**FULL, "vocab_size": 9}]}}, ["exactly d_ff, d_model, n_heads, n_kv_heads"]),
        ({"grid": {"tokens_per_param": [20]}}, ["grid.0", "exactly one of tokens_per_param"]),
        ({"grid": {"tokens_per_backbone_param": None}}, ["grid.0", "exactly one of tokens_per_param"]),
        ({"batch_tokens": 500}, ["batch_tokens 500", "not a multiple", "256"]),
        ({"data": {"vocab_size": 100}}, ["data", "vocab_size=100", "257 to 65535"]),
        ({"data": {"source": "web"}}, ["data.source", "'web'", "'offline', 'pydoc' or 'hub'"]),
        ({"precision": "fp16"}, ["precision", "'fp16'", "'fp32' or 'bf16'"]),
        ({"ranks_per_trial": 3}, ["batch_tokens 512", "micro_batch_seqs x ranks_per_trial = 768", "on every rank"]),
        ({"activation_checkpointing": 1}, ["activation_checkpointing", "1 is neither true nor false"]),
        ({"activation_checkpointing": "yes"}, ["activation_checkpointing", "'yes' is neither true nor false"]),
        ({"zero_stage": 4}, ["zero_stage", "4", "0, 1, 2 or 3"]),
        ({"optimizer": {"betas": [0.9]}}, ["optimizer.betas.1"]),
        ({"optimizer": {"betas": [0.9, 1.0]}}, ["optimizer.betas.1", "1.0", "less than 1"]),
        ({"optimizer": {"weight_decay": -0.1}}, ["optimizer.weight_decay", "-0.1", "greater than or equal to 0"]),
        ({"divergence": {"factor": 1.0}}, ["divergence.factor", "1.0", "greater than 1"]),
        ({"estimate_mfu": 40}, ["estimate_mfu", "40", "less than or equal to 1"]),
        ({"schedule": {"kind": "linear"}}, ["schedule.kind", "'linear'", "'cosine' or 'wsd'"]),
        ({"schedule": {"decay": 0.3}}, ["schedule", "decay", "kind cosine", "warmup and final"]),
        ({"schedule": {"kind": "wsd", "warmup": 0.1}}, ["schedule", "warmup", "kind wsd", "warmup_steps, decay"]),
        ({"schedule": {"kind": "wsd"}, "pruning": {}}, ["pruning and schedule.kind wsd exclude each other"]),
        ({"pruning": {"keep": 2}}, ["pruning.keep", "2", "greater than or equal to 3"]),
        ({"pruning": {"at": [1.0]}}, ["pruning.at.0", "1.0", "less than 1"]),
        ({"pruning": {"at": [0.5]}, "validation": {"times": 1}}, ["pruning.at [0.5]", "validation.times, which is 1"]),
        ({"grid": {"lr_search": "cells"}}, ["grid.0.lr_search", "'cells'", "write per_cell, or a mapping"]),
        ({"grid": {"lr_search": {"extensions": -1}}}, ["grid.0.lr_search.extensions", "-1"]),
        ({"grid": {"lr_search": "per_cell", "lr": [1e-3, 1e-3]}}, ["grid.0", "lr_search needs two rates"]),
        ({"grid": {"lr_search": "per_cell", "lr": None, "published_lr": "best"}}, ["grid.0", "published_lr: grid"]),
        ({"grid": {"lr_search": {"base_shape": [4, 16]}}}, ["base_shape (4, 16)", "none of the block's shapes"]),
        ({"name": ""}, ["name is ''", "letters, digits"]),
        ({"name": "../x"}, ["name is '../x'", "letters, digits"]),
        ({"seq_len": None}, ["seq_len is missing"]),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_with_what_is_allowed(sweep_of, changes, words):
    message = refused(sweep_of(**changes))
    assert all(word in message for word in words), message


NUMBERS = [("seq_len", 64), ("batch_tokens", 512), ("micro_batch_seqs", 4), ("log_every", 5), ("max_epochs", 1.0),
           ("checkpoint_every_s", 9.0), ("cpus_per_rank", 1), ("ranks_per_trial", 1),
           ("estimate_mfu", 0.5)]  # fmt: skip


@pytest.mark.parametrize("key", [key for key, _ in NUMBERS])
@pytest.mark.parametrize("value", ["many", [3], {"a": 1}, 0, -1, math.nan, math.inf, True, "inf"])
def test_a_number_that_is_none_or_not_positive_and_finite_is_refused_by_its_name(sweep_of, key, value):
    message = refused(sweep_of(**{key: value}))
    assert key in message
    assert repr(value) in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0, -1e-3, "fast", None, True, ".nan"])
@pytest.mark.parametrize("key", ["lr", "tokens_per_backbone_param"])
def test_a_rate_or_ratio_that_is_not_positive_and_finite_is_refused(sweep_of, key, value):
    message = refused(sweep_of(grid={key: [4, value]}))
    assert f"grid.0.{key}.1" in message
    assert repr(value) in message


@pytest.mark.parametrize("where", ["optimizer.clip", "schedule.final", "validation.windows", "divergence.learnt_by"])
def test_true_is_not_a_number_in_a_nested_block_either(sweep_of, where):
    block, key = where.split(".")
    message = refused(sweep_of(**{block: {key: True}}))
    assert where in message
    assert "True" in message


@pytest.mark.parametrize("key", ["topologies", "shapes", "tokens_per_backbone_param", "lr"])
def test_an_empty_list_in_a_block_is_refused(sweep_of, key):
    message = refused(sweep_of(grid={key: []}))
    assert f"grid.0.{key}" in message
    assert "at least 1" in message


def test_an_empty_grid_and_no_seeds_are_refused(sweep_of):
    assert "grid" in refused(sweep_of(grid=[]))
    assert "seeds" in refused(sweep_of(seeds=[]))


@pytest.mark.parametrize("given", [[2], [2, 32, 4], [0, 32], [2, "wide"], 32, "2x32", {"n_layers": "two"}, [True, 32]])
def test_a_shape_written_wrongly_is_refused_in_words_that_show_how_to_write_it(sweep_of, given):
    message = refused(sweep_of(grid={"shapes": [[2, 32], given]}))
    assert "grid.0.shapes.1" in message
    assert "[n_layers, d_model]" in message
    assert "constrained" not in message


@pytest.mark.parametrize("raw", [None, [], [1, 2], "demo", 3])
def test_what_is_not_a_mapping_is_refused_with_the_keys_of_a_sweep(raw):
    assert "mapping with name, data, seq_len" in refused(raw, "x.yaml")


def test_keys_that_are_not_text_are_refused(sweep_of):
    assert "7" in refused({**sweep_of(), 7: 1})


# ---- YAML


def from_yaml(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    return load_config(tmp_path / "x.yaml")


YAML = """\
name: s
data: {source: pydoc, vocab_size: 512}
seq_len: 64
batch_tokens: 512
micro_batch_seqs: 4
shape_rule: small
grid:
  - {topologies: [pre_ln], shapes: [[2, 32]], tokens_per_param: [20], lr: [1e-3, 2.0e-3, 1E-2]}
"""


def test_a_rate_that_yaml_reads_as_text_becomes_the_number_it_says(tmp_path):
    config = from_yaml(tmp_path, YAML)
    assert config.grid[0].lr == [0.001, 0.002, 0.01]
    assert all(type(lr) is float for lr in config.grid[0].lr)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n- b\n", ["a sweep is a mapping"]),
        ("", ["a sweep is a mapping"]),
        ("name: [1, 2\nseq_len: 3\n", ["not YAML", "line 2"]),
        ("name: [*b]\n", ["not YAML", "undefined alias"]),
        ("name: !!python/object:os.system x\n", ["not YAML", "constructor"]),
        ("name: \x07\n", ["not YAML"]),
        ("name: 2024-99-99\n", ["not YAML", "month"]),
        (YAML.replace("[[2, 32]]", "&a [*a]"), ["holds itself"]),
        (YAML + "seq_len: 128\n", ["'seq_len' is given twice", "line 9"]),
        (YAML.replace("vocab_size: 512", "vocab_size: 512, vocab_size: 300"), ["'vocab_size'", "twice", "line 2"]),
        (YAML.replace("lr:", "lr: [1.0], lr:"), ["'lr'", "twice", "line 8"]),
    ],
)
def test_a_file_that_is_not_one_mapping_is_one_line_with_its_name(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        from_yaml(tmp_path, text)
    message = str(error.value)
    assert "x.yaml: " in message
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_a_key_that_overrides_a_merged_one_is_not_a_repeat(tmp_path):
    merged = YAML.replace("  - {", "  - &first {") + "  - {<<: *first, lr: [5.0e-3]}\n"
    config = from_yaml(tmp_path, merged)
    assert config.grid[1].lr == [0.005]
    assert config.grid[1].shapes == config.grid[0].shapes


def test_a_missing_file_a_folder_and_bytes_that_are_no_text_are_one_line_each(tmp_path):
    (tmp_path / "latin").write_bytes(b"name: \xff\xfe\n")
    for path, words in (
        (tmp_path / "no.yaml", "no such file"),
        (tmp_path, "cannot be read"),
        (tmp_path / "latin", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words) as error:
            load_config(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


# ---- right configs


def test_every_shape_rule_completes_a_shape_as_it_describes(sweep_of):
    heads_by_words = [
        ("published", 320, 16), ("small", 48, 3), ("small", 24, 1), ("small", 40, 5), ("head64", 320, 5),
        ("head128", 384, 3),
    ]  # fmt: skip
    for rule, d, heads in heads_by_words:
        config = parse_config(sweep_of(shape_rule=rule, grid={"shapes": [[3, d]]}))
        shape = config.shape(config.grid[0].shapes[0])
        assert (shape.n_layers, shape.d_model, shape.n_heads, shape.n_kv_heads) == (3, d, heads, heads)
        assert shape.vocab_size == 512
        assert 0 <= shape.d_ff - 8 * d / 3 < 16
        assert shape.d_ff % 16 == 0


def test_an_explicit_shape_is_taken_as_written(sweep_of):
    config = parse_config(sweep_of(grid={"shapes": [FULL]}))
    shape = config.shape(config.grid[0].shapes[0])
    assert {name: getattr(shape, name) for name in FULL} == FULL


def test_the_shipped_sweeps_are_right(request):
    folder = request.config.rootpath / "tune_configs"
    names = [load_config(path).name for path in sorted(folder.glob("*.yaml")) if "grid:" in path.read_text()]
    assert {"demo", "depthbench_400m"} <= set(names)
    assert all(a != b for a, b in itertools.combinations(names, 2))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_the_store_cannot_keep_is_refused(sweep_of, seed):
    with pytest.raises(ConfigError, match=r"seeds\.0: .* got "):
        parse_config(sweep_of(seeds=[seed]))


@pytest.mark.parametrize("value", [True, False])
def test_true_and_false_are_taken_where_they_are_asked_for(sweep_of, value):
    assert parse_config(sweep_of(activation_checkpointing=value)).activation_checkpointing is value
    assert parse_config(sweep_of()).activation_checkpointing is False
