"""A store that cannot give a figure still gives a report, which says what lacks."""

import html
import re

import pandas as pd
import pytest

from depthlaw.platform import report as package
from depthlaw.platform.report import gather as gathering
from depthlaw.platform.report import report, shapes
from depthlaw.platform.store import StoreError


@pytest.fixture
def one_figure(monkeypatch):
    """For what does not hang on the figures: they are what takes time."""
    monkeypatch.setattr(package, "figures", lambda: [shapes.loss_by_shape])


def text_of(store, tmp_path, **options):
    done = report(store, None, tmp_path / "r", **options)
    page = re.sub(r'src="data:[^"]*"', "", done.page.read_text(encoding="utf-8"))
    return done, html.unescape(re.sub(r"<[^>]+>", " ", page))


def test_an_empty_store_says_that_nothing_was_run(store, tmp_path):
    done, text = text_of(store, tmp_path)
    assert not done.answered
    assert done.figures == ()
    assert "There is no answer: the store has no trial with an outcome yet." in text
    assert text.count("Not here: ") >= 10


def test_a_store_where_nothing_finished_shows_why(store, trial_row, tmp_path):
    store.write_plan("e", [{"trial": "t"}, {"trial": "later"}])
    store.write_trial(trial_row(status="diverged", reason="loss nan is not finite, at step 3"))
    done, text = text_of(store, tmp_path)
    assert not done.answered
    assert "loss nan is not finite, at step 3" in text
    assert "1 planned trials have no outcome yet" in text
    assert "1 cells have no finished trial" in text
    assert "no row of 1 can be fitted" in text


def test_one_trial_gives_its_loss_and_why_there_is_no_law(store, trial_row, tmp_path):
    store.write_trial(trial_row(val_loss=3.125))
    done, text = text_of(store, tmp_path)
    assert not done.answered
    assert "no law can be fitted" in text
    assert "The least loss that was measured is 3.1250 nats a token, of pre_ln with 4 layers of width 64" in text
    assert [path.name for path in done.figures] == ["loss-by-shape-01.svg"]
    assert "no cell was run at more than one learning rate" in text
    assert "no finished cell has its training FLOPs" in text


def test_several_recipes_are_not_mixed(store, trial_row, tmp_path):
    for k in (1, 2):
        store.write_plan(f"sweep{k}", [{"trial": f"t{k}"}])
        store.write_trial(trial_row(f"t{k}", recipe_hash=f"r{k}", experiment=f"sweep{k}"))
    done, text = text_of(store, tmp_path)
    assert not done.answered
    assert "2 recipes" in text
    assert "choose one of sweep1, sweep2 with --experiment" in text
    assert done.figures == ()
    one, text = text_of(store, tmp_path, experiment="sweep2")
    assert "2 recipes" not in text
    assert [path.name for path in one.figures] == ["loss-by-shape-01.svg"]


def test_an_experiment_that_is_not_there_is_the_askers_mistake(store, tmp_path):
    with pytest.raises(StoreError, match="no experiment 'none'"):
        report(store, None, tmp_path / "r", experiment="none")


def test_a_damaged_part_is_left_out_and_named(store, trial_row, tmp_path):
    store.write_trial(trial_row(val_loss=3.0))
    (store.path / "trials" / "x-0-finished.parquet").write_bytes(b"PAR1 no more")
    with pytest.warns(UserWarning, match="left out"):
        _, text = text_of(store, tmp_path)
    assert "could not be read and is left out: trials/x-0-finished.parquet" in text


def test_a_file_among_the_diagnostics_that_is_none_is_named(store, trial_row, tmp_path):
    store.write_trial(trial_row("t", val_loss=3.0))
    folder = store.path / "diagnostics" / "t"
    folder.mkdir(parents=True)
    (folder / "lens.parquet").write_bytes(b"no table")
    pd.DataFrame({"value": [1.0]}).to_parquet(folder / "summary.parquet")
    _, text = text_of(store, tmp_path)
    assert "diagnostics/t/lens.parquet (not a table" in text
    assert "diagnostics/t/summary.parquet (not a table: it has no column trial)" in text
    assert "the store has no diagnostics" in text


def test_no_budget_that_can_be_met_is_said_with_the_conflict(made, tmp_path, one_figure):
    done = report(made.store, made.law, tmp_path / "r", budgets=["params<=10"], hardware="cpu")
    text = html.unescape(done.page.read_text(encoding="utf-8"))
    assert not done.answered
    assert re.search(r"There is no answer: no design of [\d,]+ meets params alone", text)
    assert any(path.name.startswith("loss-by-shape") for path in done.figures)


def test_a_law_of_other_rows_is_remarked(made, store, trial_row, tmp_path):
    store.write_trial(trial_row(val_loss=3.0))
    text = report(store, made.law, tmp_path / "r").page.read_text(encoding="utf-8")
    assert f"rests on {len(made.law.rows_used)} rows, and this store has 1" in text
    assert "this store has" not in made.html


def test_without_a_law_one_is_chosen_as_fit_does(made, tmp_path, monkeypatch, one_figure):
    asked = []

    def fit(store, law, **options):
        asked.append((store.path, law, options))
        return made.law

    monkeypatch.setattr(gathering, "fit", fit)
    done = report(made.store, out=tmp_path / "r", hardware="cpu")
    assert asked == [(made.store.path, "auto", {"pooling": "auto", "experiment": None})]
    assert done.answered


def test_one_topology_and_one_size_make_a_report(store, sweep_of, write_study, tmp_path, truth):
    from depthlaw.platform.config import parse_config
    from depthlaw.platform.query import fit

    shapes = [[1, 136], [2, 96], [4, 72], [8, 48], [16, 32]]
    config = parse_config(sweep_of(grid={"shapes": shapes, "tokens_per_backbone_param": [20], "lr": [8e-3]}))

    def outcome(spec):
        loss = truth("pre_ln", int(spec.costs.backbone_params), spec.tokens, spec.n_layers, spec.d_model)
        return {"status": "finished", "val_loss": loss * (1 + 1e-3 * (-1) ** spec.n_layers)}

    write_study(store, config, outcome)
    law = fit(store, "iso_size", draws=20)
    done = report(store, law, tmp_path / "r")
    text = html.unescape(done.page.read_text(encoding="utf-8"))
    assert done.answered
    assert "so nothing here says how far off the law is at the next" in text
    assert "the best design is pre_ln" in text
