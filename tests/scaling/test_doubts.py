"""What a fit says of single runs, repeated runs and best shapes at the edge of those that were run."""

import numpy as np
import pandas as pd
import pytest

from depthlaw.scaling.fit import fit
from depthlaw.scaling.outliers import noise
from depthlaw.scaling.rows import read_rows


def about(law, word):
    return [note for note in law.notes if word in note]


def test_one_run_five_percent_off_is_named_and_no_other(simulated):
    frame = simulated(noise=0.003)
    assert not about(fit(frame), "outlier")
    frame.loc[17, "val_loss"] *= 1.05
    (note,) = about(fit(frame), "outlier")
    row = frame.iloc[17]
    assert f"{row.topology} {row.n_layers} x {row.d_model}" in note
    assert "(row 17)" in note
    assert f"has loss {row.val_loss:.4g} where the law says" in note


def test_an_outlier_counts_by_the_freedom_that_its_leverage_leaves_it(simulated):
    """On few rows the fit follows each: the residual left is small, and h says how small."""
    frame = simulated(("pre_ln",), sizes=(1e6, 16e6), ratios=(8, 16, 32, 64), tokens_per_n=(5, 80), noise=0.002)
    frame.loc[5, "val_loss"] *= 1.06
    assert any("(row 5)" in note for note in about(fit(frame), "outlier"))


@pytest.mark.parametrize("delta", [1e-4, 1e-3, None, 1.0])
def test_scatter_is_that_of_the_noise_whatever_the_delta(simulated, delta):
    assert fit(simulated(noise=0.004), delta=delta).log_rms == pytest.approx(0.004, rel=0.15)


def test_many_outliers_are_counted_and_laid_at_the_laws_door(simulated):
    frame = simulated(noise=0.003)
    frame.loc[::12, "val_loss"] *= 1.08
    notes = about(fit(frame), "outlier")
    assert len(notes) == 6
    assert "13 more outliers" in notes[-1]
    assert "the law" in notes[-1]


def test_two_seeds_of_each_cell_give_the_noise(simulated):
    both = pd.concat([simulated(noise=0.004, seed=s) for s in (1, 2)], ignore_index=True)
    sd, freedom = noise(read_rows(both))
    first, second = (np.log(v) for v in np.split(both.val_loss.to_numpy(), 2))
    assert freedom == len(first) == 216
    assert sd == pytest.approx(np.sqrt(np.mean((first - second) ** 2) / 2), rel=1e-12)
    (note,) = about(fit(both), "noise between seeds")
    assert f"differ by {100 * sd:.2g} % of the loss (216 repeated)" in note
    assert "does not describe" not in note
    # A law without shape leaves more scatter than the seeds do.
    (note,) = about(fit(both, law="chinchilla"), "noise between seeds")
    assert "the law does not describe all there is" in note


def test_one_seed_a_cell_says_nothing_of_the_noise(simulated):
    frame = simulated(("pre_ln",), noise=0.003)
    assert noise(read_rows(frame.drop_duplicates(["topology", "backbone_params", "tokens"])))[1] == 0
    assert noise(read_rows(pd.concat([frame, frame]).drop_duplicates()))[1] == 0


@pytest.mark.parametrize(("ratios", "side"), [((32, 64, 96, 130, 180), "smallest"), ((2, 3, 4, 6, 8), "largest")])
def test_a_best_shape_past_those_run_is_unidentified_and_says_where_to_look(simulated, ratios, side):
    got = fit(simulated(("pre_ln", "hc"), ratios=ratios, noise=0.001))
    assert got.status == "unidentified"
    for topology in ("pre_ln", "hc"):
        assert f"rho0[{topology}]" in got.unidentified
        said = [x for x in (*got.unidentified.values(), *got.notes) if f"the best d/L of {topology}" in x]
        assert len(said) == 1
        assert f"past the {side} fitted" in said[0]
        assert ("narrower and deeper" if side == "smallest" else "wider and shallower") in said[0]


def test_a_best_shape_past_those_run_is_said_of_laws_without_a_ratio_of_their_own(simulated):
    frame = simulated(("pre_ln",), ratios=(32, 64, 96, 130))
    depth_first = 1.8 + 0.3 * (frame.d_model / 256) ** -0.6 + 2.0 * (frame.n_layers / 8) ** -0.9
    got = fit(frame.assign(val_loss=depth_first + 0.75 * (frame.tokens / 1e8) ** -0.4), law="width_depth")
    assert got.best_ratio("pre_ln", got.N0) < 30
    (note,) = about(got, "the best d/L of pre_ln")
    assert "past the smallest fitted" in note


def test_shapes_within_a_factor_of_three_do_not_identify_the_bowl(simulated):
    got = fit(simulated(("pre_ln",), ratios=(40, 55, 75, 109), noise=0.003))
    assert {"kappa[pre_ln]", "rho0[pre_ln]"} <= set(got.unidentified)
    assert "run at least 4 shapes (n_layers, d_model) a size whose d/L spans a factor 4" in got.unidentified["rho1"]
    assert not about(got, "the best d/L")  # where the bowl itself is unknown, where its bottom lies is no news
