"""Published sweeps: objectives and held-out errors that an independent fit of the same tables reached.

Tables: Gemstones (McLeish et al. 2025) and Morph (Bian et al. 2025), MIT licences beside them.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from depthlaw.scaling.fit import fit

TABLES = Path(__file__).parent / "tables"
PUBLISHED_400M = Path(__file__).parents[2] / "bundled" / "published-400m" / "runs.csv"


GEMSTONES = {
    "topology": "@pre_ln",
    "d_model": "width",
    "n_layers": "depth",
    "val_loss": "loss",
    "params": "params_total",
}
GEMSTONES_BACKBONE = {**GEMSTONES, "embedding_rows": "@50304"}  # tied
MORPH = {"topology": "@pre_ln", "val_loss": "loss", "embedding_rows": "@100864"}  # 50432 each for input and output


@pytest.fixture(scope="module")
def gemstones():
    return pd.read_csv(TABLES / "gemstones" / "losses_hot_100b.csv")


@pytest.fixture(scope="module")
def morph():
    return pd.read_csv(TABLES / "morph" / "losses.csv")


def predict(law, frame, columns):
    """From the law's own file of what N counts: the table's parameters less the embedding rows."""
    N = (
        frame[columns.get("params", "params")]
        - float(columns["embedding_rows"][1:]) * frame[columns.get("d_model", "d_model")]
    )
    return law.predict("pre_ln", N, *(frame[columns.get(c, c)] for c in ("tokens", "n_layers", "d_model")))


@pytest.mark.parametrize(
    ("law", "delta", "want"),
    [
        ("chinchilla", 1e-4, 6.923289e-4),
        ("chinchilla", 1e-3, 6.592534e-3),
        ("width_depth", 1e-4, 4.1994617e-4),
        ("width_depth_params", 1e-4, 2.9480528e-4),
    ],
)
def test_laws_reach_the_reference_objectives_on_gemstones(gemstones, law, delta, want):
    """N is the published total, the embedding included."""
    got = fit(gemstones, law=law, delta=delta, columns=GEMSTONES)
    assert got.objective <= want * (1 + 1e-6)
    assert got.objective == pytest.approx(want, rel=1e-6)
    assert got.share_at_best > 0.9
    assert got.n_is == "params"
    assert got.counting.startswith("N is params (column params_total): all parameters, embedding and head included")


def test_shape_law_predicts_larger_gemstones_better_than_chinchilla(gemstones):
    """Fit below 1e9 parameters, test above. Reference: mean |ln ratio| 0.91 and 1.14 %, Spearman 0.978 and 0.948."""
    rows = gemstones[gemstones.tokens >= 5e9]
    small, large = rows[rows.params_total < 1e9], rows[rows.params_total >= 1e9]
    error, rank, pooled = {}, {}, {}
    for name in ("shape", "chinchilla"):
        got = fit(small, law=name, delta=1e-2, columns=GEMSTONES_BACKBONE)
        assert got.status == "ok"
        off = np.log(predict(got, large, GEMSTONES_BACKBONE) / large.loss)
        error[name] = 100 * np.mean(np.abs(off))
        pooled[name] = large.loss.rank().corr(pd.Series(off, large.index).add(np.log(large.loss)).rank())
        # Shapes compared at equal tokens: what a choice between designs rests on.
        each = large.assign(p=predict(got, large, GEMSTONES_BACKBONE)).groupby("tokens")
        rank[name] = np.mean([g.p.rank().corr(g.loss.rank()) for _, g in each])
    assert error["shape"] == pytest.approx(0.91, abs=0.01)
    assert error["chinchilla"] == pytest.approx(1.14, abs=0.01)
    assert pooled["shape"] == pytest.approx(0.978, abs=5e-4)
    assert pooled["chinchilla"] == pytest.approx(0.948, abs=5e-4)
    assert rank["shape"] > 0.97
    assert rank["chinchilla"] < 0.85


def test_counting_of_a_table_is_recorded_in_the_law(gemstones, morph):
    assert fit(morph, starts=4, columns=MORPH).counting.startswith("N is params less 100864 x d_model of embedding")
    got = fit(gemstones, starts=4, columns=GEMSTONES_BACKBONE)
    assert got.n_is == "backbone_params"
    assert got.units["backbone_params"] == "parameters without embedding and head"
    assert got.ranges[""]["N"][0] == (gemstones.params_total - 50304 * gemstones.width).min()


def test_shape_law_fitted_on_27_morph_models_predicts_all_76(morph):
    got = fit(morph[morph.in_authors_fit_set == 1], law="shape", delta=1e-2, columns=MORPH)
    assert np.mean((predict(got, morph, MORPH) - morph.loss) ** 2) == pytest.approx(1.36e-4, rel=0.02)
    by_default = fit(morph[morph.in_authors_fit_set == 1], columns=MORPH)
    assert np.mean((predict(by_default, morph, MORPH) - morph.loss) ** 2) < 1.5e-4


def test_a_floor_that_runs_to_nothing_is_reported_as_bound(morph):
    got = fit(morph[morph.in_authors_fit_set == 1], law="chinchilla", delta=1e-2, columns=MORPH)
    assert got.status == "bound"
    assert got.at_bound == ("e",)


def test_iso_size_finds_the_published_best_shapes_at_400m():
    """Reference, by least squares: pre_ln kappa 0.0301, best d/L 68.6; sandwich_ln 0.0438, 46.7.

    The fit weighs relative errors and the reference absolute ones, over losses that differ by 0.9 %.
    """
    got = fit(pd.read_csv(PUBLISHED_400M), law="iso_size", delta=1.0)
    want = {"pre_ln": (0.0301, 68.6), "sandwich_ln": (0.0438, 46.7)}
    for topology, (kappa, ratio) in want.items():
        assert got.parameters(topology)["kappa"] == pytest.approx(kappa, rel=3e-3)
        assert got.best_ratio(topology, 4e8) == pytest.approx(ratio, rel=2e-3)
    for topology in ("hc", "full_attnres"):
        assert got.best_ratio(topology, 4e8) < 10
        edge = [x for x in (*got.unidentified.values(), *got.notes) if f"d/L of {topology}," in x]
        assert len(edge) == 1
        assert "is past the smallest fitted (9.14): run narrower and deeper shapes" in edge[0]
    assert not any("d/L of pre_ln" in x for x in (*got.unidentified.values(), *got.notes))


@pytest.mark.parametrize("topology", ["pre_ln", "sandwich_ln", "mhc"])
def test_iso_size_is_the_parabola_that_polyfit_finds(topology):
    table = pd.read_csv(PUBLISHED_400M)
    table = table[table.topology == topology]
    square, slope, level = np.polyfit(np.log(table.d_model / table.n_layers), table.val_loss, 2)
    got = fit(table, law="iso_size", delta=1.0).parameters(topology)
    assert got["kappa"] == pytest.approx(square, rel=5e-3)
    assert got["rho"] == pytest.approx(-slope / 2 / square, abs=1e-3)
    assert np.exp(got["c"]) == pytest.approx(level - slope**2 / 4 / square, rel=1e-5)
