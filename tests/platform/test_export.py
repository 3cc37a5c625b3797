"""Exported weights: whole, reloadable, refused in one line when they are not, and kept as a sweep was told."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthlaw.archs.backbone import build
from depthlaw.archs.topologies import topology
from depthlaw.platform.config import ConfigError, parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.export import ExportError, export_trial, keep, kept, load, weights_path
from depthlaw.platform.plan import plan
from depthlaw.platform.store import Store
from depthlaw.platform.trial import trial_row


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    from depthlaw.platform.data_config import DataConfig

    return build_data(DataConfig(source="pydoc", vocab_size=512), tmp_path_factory.mktemp("data"))


@pytest.fixture
def exported(tmp_path, sweep_of, data):
    """(store, specs, models) of four trained-like trials of two cells, all exported."""
    config = parse_config(sweep_of(grid={"topologies": ["pre_ln", "hc(streams=2)"]}))
    store, specs, models = Store.create(tmp_path / "store"), plan(config, data.fingerprint), []
    for k, spec in enumerate(specs):
        model = build(spec.shape, topology(spec.topology), k)
        export_trial(model, spec, data, store)
        models.append(model)
    return store, specs, models


def test_an_exported_model_is_the_same_to_the_last_bit_and_says_what_it_is(exported, data):
    store, specs, models = exported
    tokens = torch.arange(12)[None]
    for spec, model in zip(specs, models, strict=True):
        found = load(weights_path(store, spec.hash))
        assert torch.equal(found.model.logits(tokens), model.logits(tokens))
        assert not found.model.training
        assert (found.name, found.about["topology"]) == (spec.hash, spec.topology)
        assert found.about["spec"] == json.loads(json.dumps(spec.to_dict()))
        assert found.about["data"]["config"] == {
            "source": "pydoc", "tokenizer": "bpe", "vocab_size": 512, "validation_fraction": 0.02
        }  # fmt: skip
    # It is an ordinary safetensors file.
    tensors = load_file(weights_path(store, specs[0].hash))
    assert tensors["branches.0.qkv"].shape == (96, 32)


def one_line(path, *words):
    with pytest.raises(ExportError) as error:
        load(path)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_what_is_no_whole_checkpoint_is_refused_in_one_line(exported, tmp_path):
    store, specs, _ = exported
    path = weights_path(store, specs[0].hash)
    one_line(tmp_path / "x.pt", "x.pt is no checkpoint", ".safetensors")
    one_line(tmp_path / "x.safetensors", "x.json: no such file")
    whole, about = path.read_bytes(), json.loads(path.with_suffix(".json").read_text())
    path.write_bytes(whole[:-10])
    one_line(path, "not a whole safetensors file")
    path.write_bytes(whole)
    tensors = load_file(path)
    save_file({k: v for k, v in tensors.items() if k != "final_norm"}, path)
    one_line(path, "lacks tensor 'final_norm'")
    save_file(tensors | {"extra": torch.ones(1)}, path)
    one_line(path, "has an unknown tensor 'extra'")
    save_file(tensors | {"final_norm": torch.ones(3)}, path)
    one_line(path, "final_norm is (3,), the model has (32,)")
    for change, word in (
        ({"format_version": 99}, "version 99"),
        ({"topology": "resnet"}, "unknown topology 'resnet'"),
        ({"shape": {"n_layers": 1}}, "describes no model"),
    ):
        path.with_suffix(".json").write_text(json.dumps(about | change))
        one_line(path, word)
    path.with_suffix(".json").write_text("[]")
    one_line(path, "not a JSON object")


def test_best_leaves_the_lowest_loss_of_each_cell_and_touches_no_other_trial(exported, data):
    store, specs, models = exported
    losses = [3.0, 2.5, 2.8, 2.9]  # pre_ln at two rates, then hc
    for spec, loss in zip(specs, losses, strict=True):
        store.write_trial(trial_row(spec, 0, "finished", None, val_loss=loss))
    other = replace(specs[0], seed=7)  # of another sweep
    export_trial(models[0], other, data, store)
    ids = [spec.hash for spec in specs]
    assert keep(store, ids, "all") == sorted(ids) == sorted(kept(store, ids))
    assert keep(store, ids, "best") == sorted([ids[1], ids[2]])
    assert kept(store, [spec.hash for spec in specs]) == [specs[1].hash, specs[2].hash]
    assert kept(store, [other.hash]) == [other.hash]
    assert len(list(weights_path(store, "x").parent.iterdir())) == 6


def test_diagnostics_in_a_config_need_weights_and_known_names(sweep_of):
    assert parse_config(sweep_of()).keep_checkpoints == "none"
    assert parse_config(sweep_of(keep_checkpoints="best", diagnostics=["causal"])).diagnostics == ["causal"]
    with pytest.raises(ConfigError, match="diagnostics need weights: set keep_checkpoints to best or all"):
        parse_config(sweep_of(diagnostics=["causal"]))
    with pytest.raises(ConfigError, match=r"diagnostics\.0.*'causal', 'pruning'.*got 'casual'"):
        parse_config(sweep_of(keep_checkpoints="all", diagnostics=["casual"]))
    with pytest.raises(ConfigError, match="keep_checkpoints"):
        parse_config(sweep_of(keep_checkpoints="last"))


def test_keeping_weights_changes_no_trial_s_hash(sweep_of):
    plain, keeping = (plan(parse_config(sweep_of(**more))) for more in ({}, {"keep_checkpoints": "all"}))
    assert [spec.hash for spec in plain] == [spec.hash for spec in keeping]
