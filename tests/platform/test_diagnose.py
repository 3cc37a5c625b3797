"""`depthlaw diagnose`: tables that join the store, pictures, JSON, and one line for what cannot be diagnosed."""

import json
import warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.diagnostics import DIAGNOSTICS
from depthlaw.archs.diagnostics.finding import Finding
from depthlaw.archs.diagnostics.run import GROUPS, batched
from depthlaw.archs.diagnostics.skips import skip_scores
from depthlaw.archs.topologies import topology
from depthlaw.platform.cli import main
from depthlaw.platform.config import parse_config
from depthlaw.platform.data_build import build as build_data
from depthlaw.platform.diagnose import kept_trials, of_dataset
from depthlaw.platform.export import export_trial, load, weights_path
from depthlaw.platform.pictures import _maps
from depthlaw.platform.plan import plan
from depthlaw.platform.store import Store
from depthlaw.platform.sweep import _after
from depthlaw.platform.trial import trial_row

TOPOLOGIES = ["pre_ln", "hc(streams=2)", "block_attnres"]


@pytest.fixture(scope="module")
def kept_sweep(tmp_path_factory, sweep_of):
    """(store, specs, dataset) of three finished trials with weights, nothing trained."""
    root = tmp_path_factory.mktemp("kept")
    config = parse_config(sweep_of(grid={"topologies": TOPOLOGIES, "shapes": [[5, 16]], "lr": [1e-3]}))
    dataset = build_data(config.data, root / "data")
    store, specs = Store.create(root / "store"), plan(config, dataset.fingerprint)
    for spec in specs:
        model = build(spec.shape, topology(spec.topology), 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.2)
        export_trial(model, spec, dataset, store)
        store.write_trial(trial_row(spec, 0, "finished", None, val_loss=3.0))
    return store, specs, dataset


@pytest.fixture
def run(run, monkeypatch, kept_sweep):
    monkeypatch.setenv("DEPTHLAW_DATA", str(kept_sweep[2].path.parent))
    return partial(run, "diagnose")


def test_every_name_is_computed_by_exactly_one_function():
    assert sorted(name for group in GROUPS for name in group) == sorted(DIAGNOSTICS)


def test_diagnosing_trials_gives_tables_that_join_the_store_and_pictures(run, kept_sweep, tmp_path):
    store, specs, dataset = kept_sweep
    ids = [spec.hash for spec in specs]
    code, out, err = run(
        *ids, "--storage", store.path, "--out", tmp_path / "d", "--sequences", 6, "--length", 32, "--json"
    )
    assert code == 0, err
    answer = json.loads(out)
    assert [m["trial"] for m in answer["models"]] == ids
    assert "picked by the benchmark's authors" in answer["cautions"][0]
    assert "leaves the training distribution" in answer["cautions"][1]
    frames = {path.stem: pd.read_parquet(path) for path in (tmp_path / "d").glob("*.parquet")}
    assert set(frames) == {*DIAGNOSTICS, "summary", "curves"}
    for name, frame in frames.items():
        joined = frame.merge(store.trials()[["trial", "val_loss", "recipe_hash"]], on="trial")
        assert len(joined) == len(frame) > 0, name
        assert list(frame)[:4] == ["trial", "topology", "n_layers", "d_model"]
    assert set(frames["rank"]["topology"]) == {"hc(streams=2)"}
    assert set(frames["dead_zone"]["topology"]) == {"block_attnres"}
    assert set(frames["jacobian"]["topology"]) == {"pre_ln", "hc(streams=2)"}
    # The numbers are those of the library on the same text.
    checkpoint = load(weights_path(store, ids[0]))
    causal, _ = skip_scores(checkpoint.model, batched(*of_dataset(checkpoint, dataset, 6, 32)))
    rows = frames["causal"].query("trial == @ids[0]")
    assert len(rows) == 10
    for s, block, score in zip(rows["skipped"], rows["block"], rows["score"], strict=True):
        assert score == causal.values["score"][s, block]
    assert answer["models"][0]["summary"]["causal"]["share_late"] == causal.summary["share_late"]
    pictures = {path.name for path in (tmp_path / "d").glob("*.png")}
    assert pictures == {f"{name}.png" for name in DIAGNOSTICS} | {"causal_curve.png", "permutation_curve.png"}
    assert all((tmp_path / "d" / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert set(answer["files"]) == {str(p) for p in (tmp_path / "d").iterdir()}


def test_the_terminal_shows_a_line_a_model_and_the_cautions(run, kept_sweep, tmp_path):
    store, specs, _ = kept_sweep
    code, out, err = run(
        weights_path(store, specs[1].hash), "--out", tmp_path / "d", "--sequences", 2, "--length", 16,
        "--only", "causal", "--only", "rank",
    )  # fmt: skip
    assert code == 0, err
    header, line, *notes = out.splitlines()
    assert header.split() == ["trial", "model", "L", "d", "loss", "causal", ">", "0.45", "rank"]  # what was asked for
    assert line.split()[:4] == [specs[1].hash, "hc(streams=2)", "5", "16"]
    assert "-" not in line.split()
    assert "training distribution" in "".join(notes)
    assert {p.name for p in (tmp_path / "d").iterdir()} == {
        "causal.parquet", "rank.parquet", "summary.parquet", "curves.parquet",
        "causal.png", "causal_curve.png", "rank.png",
    }  # fmt: skip


def test_what_does_not_apply_to_one_of_several_models_is_a_dash(run, kept_sweep, tmp_path):
    store, specs, _ = kept_sweep
    ids = [spec.hash for spec in specs]
    code, out, err = run(
        *ids, "--storage", store.path, "--out", tmp_path / "d", "--sequences", 2, "--length", 16, "--only", "rank"
    )
    assert code == 0, err
    header, *lines = out.splitlines()[:4]
    assert header.split() == ["trial", "model", "L", "d", "loss", "rank"]
    assert [line.split()[0] for line in lines] == ids
    assert [line.split()[-1] == "-" for line in lines] == [spec.topology != "hc(streams=2)" for spec in specs]


def test_mistakes_are_one_line_and_code_2(run, kept_sweep, tmp_path, monkeypatch):
    store, specs, _ = kept_sweep
    path = weights_path(store, specs[0].hash)
    out = ("--out", tmp_path / "d")
    for words, expected in (
        (("nothing", *out), "nothing: no such file or folder; for a trial's id give its store too, with --storage"),
        (("nothing", *out, "--storage", store.path), "has no weights of 'nothing'; it has those of: "),
        ((path, *out, "--only", "casual"), "unknown diagnostic 'casual'; choose from angular, causal"),
        ((path, *out, "--text", tmp_path / "x"), "tokenizer.json: no such file; --text needs the tokenizer"),
    ):
        code, printed, err = run(*words)
        assert (code, printed, err.count("\n")) == (2, "", 1), err
        assert expected in err
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path))
    code, _, err = run(path, *out)
    assert (code, err.count("\n")) == (2, 1)
    assert "set DEPTHLAW_DATA to where it is" in err
    assert not (tmp_path / "d").exists()


def test_kept_trials_of_a_sweep_are_diagnosed_once(kept_sweep):
    store, specs, dataset = kept_sweep
    ids = [spec.hash for spec in specs]
    folders = kept_trials(store, [*ids, "no weights"], ["pruning", "rank"], dataset, lambda text: None)
    assert [folder.name for folder in folders] == ids
    frame = pd.read_parquet(folders[0] / "pruning.parquet")
    assert np.isfinite(frame["loss_increase"]).sum() == 5
    assert set(frame["trial"]) == {ids[0]}
    assert not (folders[0] / "rank.parquet").exists()  # one stream
    before = (folders[0] / "pruning.parquet").stat().st_mtime_ns
    kept_trials(store, ids, ["pruning"], dataset, lambda text: None)
    assert (folders[0] / "pruning.parquet").stat().st_mtime_ns == before
    kept_trials(store, ids[:1], ["dead_zone", "angular"], dataset, lambda text: None)
    assert (folders[0] / "angular.parquet").exists()


def test_a_complete_sweep_tells_its_progress_and_what_has_no_weights(kept_sweep, sweep_of, monkeypatch):
    store, specs, dataset = kept_sweep
    monkeypatch.setattr("depthlaw.platform.diagnose.EVERY_S", 0)
    more = parse_config(sweep_of(keep_checkpoints="all", diagnostics=["streams"], grid={"shapes": [[1, 16]]}))
    without = plan(more, dataset.fingerprint)[0]
    store.write_trial(trial_row(without, 0, "finished", None, val_loss=3.0))
    told = []
    _after([*specs, without], more, store, dataset, told.append)
    assert told[0].message == "1 of 4 trials were trained without keeping weights"
    assert any(p.message.startswith(f"{specs[1].hash}: rank, streams") for p in told)
    assert all((p.done, p.planned, p.flops_done / p.flops_planned) == (4, 4, 1) for p in told)


@pytest.mark.engine
def test_a_sweep_keeps_the_best_weights_of_a_cell_and_diagnoses_them(tmp_path, sweep_of, monkeypatch, capsys):
    """Trained by DeepSpeed on Ray: what is exported has the loss that the trial's row has."""
    import yaml

    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "data"))
    options = {"keep_checkpoints": "best", "diagnostics": ["pruning"], "zero_stage": 3, "validation": {"windows": 16}}
    config = sweep_of(**options, grid={"shapes": [[2, 16]], "lr": [4e-3, 8e-3]})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(config))
    for _ in range(2):  # the second run finds everything done
        with pytest.raises(SystemExit) as end:
            main(["sweep", str(tmp_path / "s.yaml"), "--storage", str(tmp_path / "store")])
        assert not end.value.code, capsys.readouterr().err
    store = Store(tmp_path / "store")
    trials = store.trials()
    best = trials.sort_values("val_loss").iloc[0]
    assert len(trials) == 2
    assert [path.name for path in (store.path / "weights").glob("*.json")] == [f"{best['trial']}.json"]
    checkpoint = load(weights_path(store, best["trial"]))
    dataset = build_data(parse_config(config).data, tmp_path / "data")
    inputs, targets = of_dataset(checkpoint, dataset, 16)
    with torch.no_grad():
        assert float(checkpoint.model(inputs, targets)) == pytest.approx(best["val_loss"], abs=1e-4)
    frame = pd.read_parquet(store.path / "diagnostics" / best["trial"] / "pruning.parquet")
    assert len(frame) == 2


def test_a_map_that_is_undefined_for_every_block_is_drawn_without_a_warning():
    """A model of one block has no pair of blocks."""
    import matplotlib.pyplot as plt

    nothing = Finding({"from": np.arange(1), "to": np.arange(1)}, {"score": np.full((1, 1), np.nan)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = _maps(plt, "causal", [("pre_ln 1 x 32", nothing)])
    assert figure.axes[0].get_title() == "pre_ln 1 x 32"
    plt.close(figure)
