"""The data sets that come with the package: their laws are those of their runs, and questions need no file."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import depthlaw
from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform.bundled import DATA, BundledError, bundled
from depthlaw.platform.config import load_config
from depthlaw.platform.lr_search import stored_outcomes
from depthlaw.platform.plan import wanted
from depthlaw.platform.query import fit
from depthlaw.platform.store import Store
from depthlaw.platform.tables import is_table, read_table
from depthlaw.scaling.law_file import load_law

TINY = Path(__file__).resolve().parents[2] / "tune_configs" / "tiny.yaml"


@pytest.mark.parametrize("name", DATA)
def test_the_law_beside_the_runs_is_what_fit_finds_in_them(name):
    data = bundled(name)
    there = load_law(data.law)
    rows = read_table(data.runs) if is_table(data.runs) else Store(data.runs)
    got = fit(rows, there.law, pooling=there.pooling, draws=0)
    assert got.rows_hash == there.rows_hash
    assert got.topologies == there.topologies
    assert got.objective == pytest.approx(there.objective, rel=1e-6)
    N, D, L, d = (np.sqrt(np.prod(there.ranges[""][axis])) for axis in "NDLd")
    for one in there.topologies:
        assert got.predict(one, N, D, L, d) == pytest.approx(there.predict(one, N, D, L, d), rel=1e-5)


def test_fit_of_a_data_set_writes_its_law_here_and_nothing_in_the_package(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home = bundled("published-400m").runs.parent
    before = {path: path.stat().st_mtime_ns for path in home.iterdir()}
    code, out, err = run("fit", "--data", "published-400m", "--draws", 0)
    assert code == 0
    assert "run at least 4 shapes" in out
    assert bundled("published-400m").limits in err
    assert [path.name for path in tmp_path.iterdir()] == ["published-400m.law.json"]
    here, there = load_law(tmp_path / "published-400m.law.json"), load_law(home / "law.json")
    assert (here.law, here.rows_hash) == (there.law, there.rows_hash)
    assert {path: path.stat().st_mtime_ns for path in home.iterdir()} == before
    assert "leave --column out" in run("fit", "--data", "tiny", "--column", "tokens=D")[2]


@pytest.mark.parametrize("name", DATA)
def test_every_data_set_says_where_it_is_from_and_what_it_cannot_tell(name):
    data = bundled(name)
    assert len((data.runs.parent / "SOURCE.md").read_text().split()) > 20
    assert len(data.limits.split()) > 15
    assert load_law(data.law).draws_base64


def test_the_published_table_counts_the_parameters_of_pre_ln_at_each_shape_and_20_tokens_for_each():
    table = read_table(bundled("published-400m").runs)
    rule = shape_rule("published")
    for row in table.itertuples():
        assert row.params == Costs(topology("pre_ln"), rule.shape(row.n_layers, row.d_model, 50280)).params
        assert row.tokens == 20 * row.params
    assert len(table) == 54
    assert table.val_loss.between(2.68, 2.80).all()


def test_an_optimum_needs_no_file_and_says_the_limits(run):
    code, out, err = run("optimum", "--data", "published-400m", "params<=400M", "--tokens", "8B", "--json")
    by_file = run("optimum", bundled("published-400m").law, "params<=400M", "--tokens", "8B", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(by_file[1])
    assert bundled("published-400m").limits in err
    assert json.loads(out)["best"]["topology"] == "hc"


def test_compare_takes_a_bundled_data_set(run):
    code, out, _ = run("compare", "--data", "published-400m", "--json")
    assert code == 0
    assert json.loads(out)["reference"] == "pre_ln"


def test_the_tiny_sweep_is_whole_and_is_what_its_file_asks_for():
    """Six topologies, three sizes of four shapes each, two amounts of training; nothing asked for is missing."""
    store, config = Store(bundled("tiny").runs), load_config(TINY)
    trials, cells = store.trials(), store.cells()
    (fingerprint,) = set(trials["data_fingerprint"])
    asked = wanted(config, stored_outcomes(store), fingerprint)
    assert (asked.later, asked.searching, asked.stuck) == ([], 0, [])
    assert {spec.hash for spec in asked.trials} == set(trials["trial"])
    assert set(trials["status"]) <= {"finished", "diverged"}
    assert len(cells) == 6 * 3 * 4 * 2
    assert cells["val_loss"].notna().all()
    assert set(cells.groupby("topology").apply(lambda own: len(set(zip(own.n_layers, own.d_model, strict=True))))) == {
        12
    }
    assert store.unreadable_parts == {}
    assert len(store.steps(trial=trials["trial"].iloc[0], names="train_loss")) == trials["steps"].iloc[0]


def test_the_tiny_sweep_answers_about_small_models(run):
    code, out, err = run("optimum", "--data", "tiny", "params<=400k", "--tokens", "2M", "--hardware", "cpu", "--json")
    assert code == 0
    assert bundled("tiny").limits in err
    best, cells = json.loads(out)["best"], Store(bundled("tiny").runs).cells()
    assert best["params"] <= 400_000
    assert cells["val_loss"].min() - 0.2 < best["loss"] < cells["val_loss"].median()


def test_a_law_of_one_size_says_which_designs_it_considers(run):
    least, most = 399, 414
    code, out, _ = run("optimum", "--data", "published-400m", "params<=1B", "--tokens", "8B")
    assert code == 0
    assert f"only designs of {least}M to {most}M params are considered, the one size that this law holds for" in out
    code, _, err = run("optimum", "--data", "published-400m", "params<=300M", "--tokens", "8B")
    assert code == 1
    assert f"(only designs of {least}M to {most}M params are considered, the one size of this law)" in err


def test_a_loss_that_guessing_beats_is_doubted(run, study, tmp_path):
    depthlaw.fit(study.store, draws=0).save(tmp_path / "law.json")
    for tokens, doubted in (("100", True), ("2M", False)):
        _, out, _ = run("optimum", tmp_path / "law.json", "params<=1M", "--tokens", tokens)
        assert ("is above ln 512 = 6.24, that of guessing" in " ".join(out.split())) == doubted


def test_the_command_that_fit_proposes_gives_an_answer(run, tmp_path):
    table = tmp_path / "runs.csv"
    shutil.copy(bundled("published-400m").runs, table)
    code, _, err = run("fit", table, "--law", "iso_size")
    assert code == 0
    words = shlex.split(err.partition("next: depthlaw ")[2])
    assert words[2] == "params<=414M"
    assert run(*words)[0] == 0


@pytest.mark.parametrize(
    "arguments", [["optimum"], ["optimum", "law.json", "--data", "published-400m"], ["compare"], ["fit"]]
)
def test_a_law_and_a_data_set_exclude_each_other_and_one_is_needed(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: give one of the two")


def test_an_unknown_data_set_is_an_error_that_names_those_that_exist(run):
    with pytest.raises(BundledError, match="choose one of published-400m, tiny"):
        bundled("published")
    code, _, err = run("optimum", "--data", "../law", "params<=1M")
    assert code == 2
    assert "no bundled data set '../law'" in err


def test_a_comparison_says_once_what_it_doubts_of_several_topologies(run):
    code, out, _ = run("compare", "--data", "published-400m")
    assert code == 0
    (said,) = [line for line in out.splitlines() if "holds at the size and training fitted" in line]
    assert said.startswith("block_attnres, deepnorm, full_attnres, hc, keel, lns, mhc, moda, sandwich_ln: law iso_size")
    assert "the data do not identify a[hc]" in next(
        line for line in run("compare", "--data", "tiny")[1].splitlines() if line.startswith("hc ")
    )


def test_what_an_answer_sends_to_for_what_to_run_says_it(run, tmp_path):
    code, out, _ = run("optimum", "--data", "published-400m", "params<=410M", "tpot<=1ms", "--tokens", "8B")
    assert code == 0
    assert "the data do not identify kappa[hc], rho[hc] of the law; `depthlaw report` says what to run instead" in out
    assert run("report", "--data", "published-400m", "--out", tmp_path / "r.html")[0] == 0
    page = (tmp_path / "r.html").read_text()
    assert "run shapes further from the best d/L, more of them, or more seeds" in page
