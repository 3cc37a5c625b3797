"""`depthlaw fit TABLE`: the public tables with one command, and what is wrong with a table in one line."""

import json

import pandas as pd
import pytest

import depthlaw
from depthlaw.platform.bundled import bundled

GEMSTONES = {
    "topology": "@pre_ln",
    "n_layers": "depth",
    "d_model": "width",
    "val_loss": "loss",
    "params": "params_total",
}
MORPH = {"topology": "@pre_ln", "val_loss": "loss", "embedding_rows": "@100864"}


def options(columns):
    return [part for name, at in columns.items() for part in ("--column", f"{name}={at}")]


@pytest.fixture
def tables(request):
    return request.config.rootpath / "tests/scaling/tables"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_both_kinds_of_table_fit_as_python_does_and_say_what_n_counts(run, tables, tmp_path, suffix):
    frame = pd.read_csv(tables / "morph" / "losses.csv")
    table = tmp_path / f"runs.{suffix}"
    frame.to_csv(table, index=False) if suffix == "csv" else frame.to_parquet(table)
    code, out, err = run("fit", table, *options(MORPH))
    assert code == 0
    assert "counted       N is params less 100864 x d_model of embedding and head" in out
    assert f"wrote {tmp_path / 'runs.law.json'}" in err
    assert depthlaw.load_law(tmp_path / "runs.law.json") == depthlaw.fit(frame, columns=MORPH)


def test_gemstones_fit_with_the_published_count_and_delta(run, tables, tmp_path):
    code, out, _ = run(
        *("fit", tables / "gemstones" / "losses_hot_100b.csv", *options(GEMSTONES), "--law", "chinchilla"),
        *("--delta", "1e-3", "--out", tmp_path / "law.json", "--json"),
    )
    law = json.loads(out)
    assert code == 0
    assert law["objective"] == pytest.approx(6.592534e-3, rel=1e-6)
    assert law["n_is"] == "params"


def test_the_published_400m_table_fits_by_iso_size_and_flags_shapes_past_its_edge(run, tmp_path):
    table = bundled("published-400m").runs
    code, out, _ = run("fit", table, "--law", "iso_size", "--delta", "1", "--out", tmp_path / "law.json")
    assert code == 0
    for topology in ("hc", "full_attnres"):
        assert f"the best d/L of {topology}, " in out
    assert "past the smallest fitted (9.14)" in out
    assert "shared  " not in out


def refused(run, *arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (None, [], ["cannot read the table", "No such file"]),
        ("", [], ["is not a table", "write a .csv with a header or a .parquet"]),
        ("a,b\n1,2\n", [], ["no column topology, tokens", "it has a, b"]),
        ("a,b\n1,2\n", ["--column", "tokens"], ["'tokens'; write NAME=COLUMN"]),
        ("a,b\n1,2\n", ["--column", "tokens=a", "--column", "tokens=b"], ["'tokens' is given twice: a and b"]),
        ("a,b\n1,2\n", ["--experiment", "x"], ["is a table, which has no experiments"]),
    ],
)
def test_a_table_that_cannot_be_fitted_is_one_line_and_code_2_and_leaves_no_law(run, tmp_path, text, more, words):
    if text is not None:
        (tmp_path / "t.csv").write_text(text)
    message = refused(run, "fit", tmp_path / "t.csv", *more)
    assert all(word in message for word in words), message
    assert not list(tmp_path.glob("*.json"))


def test_a_parquet_file_that_is_none_is_refused_in_one_line(run, tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"PAR0")
    assert "is not a table" in refused(run, "fit", tmp_path / "t.parquet")
