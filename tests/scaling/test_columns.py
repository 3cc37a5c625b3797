"""Plain tables by a map of columns, and what N counts."""

import numpy as np
import pytest

from depthlaw.scaling.columns import read_columns
from depthlaw.scaling.fit import LawError, fit

NAMES = {"tokens": "TOK", "n_layers": "depth", "d_model": "width", "val_loss": "loss", "topology": "@pre_ln"}


@pytest.fixture
def table(simulated):
    """A table with other names, whose parameters include a tied embedding of 1000 rows."""
    frame = simulated(("pre_ln",), noise=0.003)
    total = frame.backbone_params + 1000 * frame.d_model
    named = {"tokens": "TOK", "n_layers": "depth", "d_model": "width", "val_loss": "loss"}
    return frame.assign(total=total).rename(columns=named).drop(columns=["topology", "backbone_params"])


def test_renamed_columns_and_constants_give_the_fit_of_the_frame_itself(simulated, table):
    frame = simulated(("pre_ln",), noise=0.003)
    got = fit(table, columns={**NAMES, "params": "total", "embedding_rows": "@1000"}, starts=8)
    own = fit(frame, starts=8)
    assert got.theta == own.theta
    assert got.rows_hash == own.rows_hash
    assert got.n_is == own.n_is == "backbone_params"
    assert own.counting.startswith("N is backbone_params: all parameters but embedding and head")
    assert got.counting.startswith("N is params (column total) less 1000 x d_model of embedding and head")


def test_parameters_alone_are_all_of_n(table):
    got = fit(table, columns={**NAMES, "params": "total"}, starts=8)
    assert got.n_is == "params"
    assert got.ranges[""]["N"] == (table.total.min(), table.total.max())
    assert got.units["params"] == "parameters, embedding and head included"
    assert "backbone_params" not in got.units


def test_embedding_rows_may_be_a_column(table):
    rows = np.where(np.arange(len(table)) % 2, 1000, 2000)
    read = read_columns(table.assign(rows=rows), {**NAMES, "params": "total", "embedding_rows": "rows"})
    np.testing.assert_array_equal(read.values["N"], table.total - rows * table.width)


def test_the_backbone_comes_before_all_parameters_unless_those_are_named(simulated):
    frame = simulated(("pre_ln",)).assign(params=1e9)
    assert read_columns(frame).n_is == "backbone_params"
    assert read_columns(frame, {"params": "params"}).n_is == "params"
    assert set(read_columns(frame, {"params": "params"}).values["N"]) == {1e9}


def test_the_column_of_runs_is_read_by_its_own_or_another_name_and_need_not_be_there(simulated):
    frame = simulated(("pre_ln",))
    names = [f"{L}x{d}" for L, d in zip(frame.n_layers, frame.d_model, strict=True)]
    assert read_columns(frame).run is None
    assert read_columns(frame.assign(run=names)).run.tolist() == names
    assert read_columns(frame.assign(model=names), {"run": "model"}).run.tolist() == names


def test_what_n_counts_survives_the_law_file(table, tmp_path):
    from depthlaw.scaling.law_file import load_law

    got = fit(table, columns={**NAMES, "params": "total"}, starts=4)
    got.save(tmp_path / "law.json")
    assert load_law(tmp_path / "law.json") == got


def test_a_model_whose_embedding_is_all_of_it_is_left_out(table):
    got = fit(table, columns={**NAMES, "params": "total", "embedding_rows": "@20000"}, starts=4)
    assert got.left_out
    assert all("backbone_params is not positive" in x.reason for x in got.left_out)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"tokens": "TOKENS"}, ["no column TOKENS", "it has TOK, depth, width, loss, total", "tokens=COLUMN"]),
        ({}, ["no column topology, tokens, n_layers, d_model, val_loss, backbone_params"]),
        ({"toks": "TOK"}, ["'toks', which a fit does not read; it reads topology, tokens"]),
        ({"backbone_params": "total", "embedding_rows": "@9"}, ["N is given as total, and embedding_rows besides"]),
        ({"backbone_params": "total", "params": "total"}, ["and params besides", "not both"]),
        ({"params": "@many"}, ["must hold numbers (params", "many"]),
        (dict.fromkeys((*NAMES, "params"), "@1"), ["every column of the fit is a constant"]),
    ],
)
def test_a_map_that_does_not_fit_the_table_is_one_line_that_says_what_exists(table, columns, words):
    given = {**NAMES, **columns} if columns else {}
    with pytest.raises(LawError) as error:
        fit(table, columns=given)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value
