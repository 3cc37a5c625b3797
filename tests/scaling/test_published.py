"""Published sweeps: objectives and held-out errors that an independent fit of the same tables reached.

Tables: Gemstones (McLeish et al. 2025) and Morph (Bian et al. 2025), MIT licences beside them.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from depthlaw.scaling.fit import fit

TABLES = Path(__file__).parent / "tables"


@pytest.fixture(scope="module")
def gemstones():
    t = pd.read_csv(TABLES / "gemstones" / "losses_hot_100b.csv")
    named = {"width": "d_model", "depth": "n_layers", "loss": "val_loss"}
    return t.rename(columns=named).assign(topology="pre_ln", backbone_params=t.params_total - 50304 * t.width)


@pytest.fixture(scope="module")
def morph():
    t = pd.read_csv(TABLES / "morph" / "losses.csv").rename(columns={"loss": "val_loss"})
    return t.assign(topology="pre_ln", backbone_params=t.params - 2 * 50432 * t.d_model)


def predict(law, frame):
    return law.predict("pre_ln", *(frame[c] for c in ("backbone_params", "tokens", "n_layers", "d_model")))


@pytest.mark.parametrize(("delta", "want"), [(1e-4, 6.923289e-4), (1e-3, 6.592534e-3)])
def test_chinchilla_reaches_the_reference_objective_on_gemstones(gemstones, delta, want):
    total = gemstones.assign(backbone_params=gemstones.params_total)
    got = fit(total, law="chinchilla", delta=delta)
    assert got.objective <= want * (1 + 1e-6)
    assert got.objective == pytest.approx(want, rel=1e-6)
    assert got.share_at_best > 0.7


def test_shape_law_predicts_larger_gemstones_better_than_chinchilla(gemstones):
    """Fit below 1e9 parameters, test above. Reference: mean |ln ratio| 0.91 and 1.14 %, Spearman 0.978 and 0.948."""
    rows = gemstones[gemstones.tokens >= 5e9]
    small, large = rows[rows.params_total < 1e9], rows[rows.params_total >= 1e9]
    error, rank, pooled = {}, {}, {}
    for name in ("shape", "chinchilla"):
        got = fit(small, law=name, delta=1e-2)
        assert got.status == "ok"
        off = np.log(predict(got, large) / large.val_loss)
        error[name] = 100 * np.mean(np.abs(off))
        pooled[name] = large.val_loss.rank().corr(pd.Series(off, large.index).add(np.log(large.val_loss)).rank())
        # Shapes compared at equal tokens: what a choice between designs rests on.
        each = large.assign(p=predict(got, large)).groupby("tokens")
        rank[name] = np.mean([g.p.rank().corr(g.val_loss.rank()) for _, g in each])
    assert error["shape"] == pytest.approx(0.91, abs=0.01)
    assert error["chinchilla"] == pytest.approx(1.14, abs=0.01)
    assert pooled["shape"] == pytest.approx(0.978, abs=5e-4)
    assert pooled["chinchilla"] == pytest.approx(0.948, abs=5e-4)
    assert rank["shape"] > 0.97
    assert rank["chinchilla"] < 0.85


def test_shape_law_fitted_on_27_morph_models_predicts_all_76(morph):
    got = fit(morph[morph.in_authors_fit_set == 1], law="shape", delta=1e-2)
    assert np.mean((predict(got, morph) - morph.val_loss) ** 2) == pytest.approx(1.36e-4, rel=0.02)
    by_default = fit(morph[morph.in_authors_fit_set == 1])
    assert np.mean((predict(by_default, morph) - morph.val_loss) ** 2) < 1.5e-4


def test_a_floor_that_runs_to_nothing_is_reported_as_bound(morph):
    got = fit(morph[morph.in_authors_fit_set == 1], law="chinchilla", delta=1e-2)
    assert got.status == "bound"
    assert got.at_bound == ("e",)
