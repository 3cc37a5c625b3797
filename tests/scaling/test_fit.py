"""Fits against a known truth, and what a fit says when the data cannot answer."""

import json

import numpy as np
import pandas as pd
import pytest

from depthlaw.scaling import search as searching
from depthlaw.scaling.fit import LawError, fit
from depthlaw.scaling.law_file import law_from_dict, load_law
from depthlaw.scaling.lm import Minima

KEPT = {"text": {"n_is"}, "{'a': None}": {"context", "unidentified"}}  # of the right kind
POINT = ("hc", [3e6, 5e7], [6e7, 2e9], [6, 12], [192, 512])


@pytest.mark.parametrize("pooling", ["shared", "separate"])
def test_known_truth_is_recovered_exactly_without_noise(simulated, pooling):
    got = fit(simulated(), pooling=pooling)
    assert got.status == "ok"
    assert got.share_at_best > 0.5
    for topology, (size, kappa, rho0) in {"pre_ln": (0.80, 0.05, 2.8), "hc": (0.72, 0.07, 2.5)}.items():
        p = got.parameters(topology)
        n0, y0 = np.log(got.N0 / 8e6), np.log(got.D0 / 1.6e8)
        want = {
            "e": np.log(1.8),
            "a": np.log(size) - 0.30 * n0,
            "alpha": 0.30,
            "b": np.log(0.75) - 0.35 * y0,
            "beta": 0.35,
            "kappa": kappa,
            "rho0": rho0 + 0.15 * n0,
            "rho1": 0.15,
        }
        assert p == pytest.approx(want, rel=1e-6)
    if pooling == "shared":
        assert set(got.shared) == {"e", "alpha", "beta", "b", "rho1"}
        # Same alpha, so worth is (A_pre / A_hc)^(1 / alpha).
        assert got.worth("hc") == pytest.approx((0.80 / 0.72) ** (1 / 0.30), rel=1e-6)
        assert float(got.best_ratio("hc", 8e6)) == pytest.approx(np.exp(2.5), rel=1e-6)


def test_known_truth_lies_within_three_and_a_half_standard_errors_under_noise(simulated, truth):
    off = []
    for seed in range(6):
        got = fit(simulated(noise=0.004, seed=seed), starts=16)
        error = got.log_sd(*POINT)
        off.append((got.log_loss(*POINT) - np.log(truth(POINT[0], *(np.array(v, float) for v in POINT[1:])))) / error)
        assert got.log_rms == pytest.approx(0.004, rel=0.2)
    assert np.max(np.abs(off)) < 3.5
    assert 0.3 < np.sqrt(np.mean(np.square(off))) < 2.0


def test_a_tenth_of_rows_far_off_hardly_moves_the_fit(simulated):
    frame = simulated(noise=0.003)
    spoilt = frame.copy()
    spoilt.loc[::10, "val_loss"] *= 1.2
    clean, robust = fit(frame), fit(spoilt)
    assert robust.parameters("hc")["alpha"] == pytest.approx(clean.parameters("hc")["alpha"], abs=0.02)
    assert robust.delta < 0.02
    # Nor the scatter that near ties and intervals rest on: a plain root mean square would be 15 times as large.
    assert robust.log_rms < 3 * clean.log_rms


@pytest.mark.parametrize(("rested", "said"), [(True, False), (False, True)])
def test_of_equally_good_ends_one_that_came_to_rest_is_taken(simulated, monkeypatch, rested, said):
    def search(*problem):
        ends, delta = searching.search(*problem)
        best = int(ends.objective.argmin())
        twice = [best, best]
        return Minima(ends.theta[twice], ends.objective[twice], np.array([False, rested]), ends.steps), delta

    monkeypatch.setattr("depthlaw.scaling.fit.search", search)
    got = fit(simulated(noise=0.003), starts=4)
    assert (got.status == "not_converged") is said
    assert any("ran out of steps" in n for n in got.notes) is said


def test_order_of_the_rows_does_not_change_the_fit(simulated):
    frame = simulated(noise=0.003)
    shuffled = frame.sample(frac=1.0, random_state=1)
    first, second = fit(frame, starts=16), fit(shuffled, starts=16)
    assert first.theta == second.theta
    assert first.rows_hash == second.rows_hash
    assert sorted(first.rows_used) == sorted(second.rows_used) == list(range(len(frame)))
    assert first.rows_hash != fit(frame.iloc[1:], starts=4).rows_hash


def test_residuals_belong_to_the_rows_they_name(simulated):
    frame = simulated(noise=0.003).sample(frac=1.0, random_state=2)
    got = fit(frame, starts=16)
    for r, i in list(zip(got.residuals, got.rows_used, strict=True))[::17]:
        row = frame.iloc[i]
        predicted = got.predict(row.topology, row.backbone_params, row.tokens, row.n_layers, row.d_model)
        assert r == pytest.approx(np.log(row.val_loss / predicted), abs=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 0.0])
def test_a_row_without_a_usable_loss_is_left_out_with_its_reason(simulated, bad):
    frame = simulated(noise=0.003)
    frame.loc[4, "val_loss"] = bad
    frame.loc[9, "tokens"] = -5
    frame["topology"] = frame["topology"].astype(object)
    frame.loc[11, "topology"] = None
    got = fit(frame, starts=8)
    assert [x.row for x in got.left_out] == [4, 9, 11]
    assert "val_loss is not" in got.left_out[0].reason
    assert "tokens is not positive" in got.left_out[1].reason
    assert got.left_out[2].reason == "no topology"
    assert 4 not in got.rows_used
    assert np.all(np.isfinite(got.residuals))


@pytest.mark.parametrize(
    ("sweep", "lost", "advice"),
    [
        ({"sizes": (4e6,)}, {"alpha", "rho1"}, "run at least two more sizes"),
        ({"tokens_per_n": (20,)}, {"alpha", "beta"}, "run other ratios at the same sizes"),
        ({"ratios": (16,)}, {"kappa[hc]", "rho0[hc]", "rho1"}, "run at least 4 shapes"),
        ({"ratios": (12, 16, 20, 24)}, {"kappa[hc]", "rho0[hc]"}, "whose d/L spans a factor 4"),
    ],
)
def test_what_a_sweep_cannot_tell_is_named_with_the_runs_that_would(simulated, sweep, lost, advice):
    frame = simulated(("pre_ln", "hc"), noise=0.003, **sweep)
    got = fit(frame)
    assert got.status == "unidentified"
    assert lost <= set(got.unidentified)
    assert any(advice in why for why in got.unidentified.values())
    # Inside the data the predictions stay usable.
    inside = frame[frame.topology == "hc"]
    p = got.predict("hc", *(inside[c] for c in ("backbone_params", "tokens", "n_layers", "d_model")))
    assert np.mean(np.abs(p / inside.val_loss - 1)) < 0.006


def test_a_sweep_at_one_ratio_of_tokens_names_its_path(simulated):
    got = fit(simulated(("pre_ln",), noise=0.003, tokens_per_n=(20,)))
    assert "D = 20 N within x1.00" in got.notes[0]
    assert np.isnan(got.worth("pre_ln"))
    assert "cannot be told apart" in got.notes[0]


def test_a_full_grid_is_identified(noisy_law):
    assert noisy_law.status == "ok"
    assert noisy_law.unidentified == {}
    assert noisy_law.notes == ()
    assert noisy_law.ranges["hc"]["L"][0] == 2
    assert noisy_law.ranges[""]["N"][1] > 5e7


def test_noise_that_hides_the_bowl_makes_the_best_shape_unidentified(simulated):
    got = fit(simulated(("pre_ln",), sizes=(4e6, 16e6), ratios=(8, 16, 32, 64), tokens_per_n=(20, 80), noise=0.05))
    assert got.status in ("unidentified", "bound")
    assert {"kappa[pre_ln]", "rho0[pre_ln]"} & ({*got.unidentified} | {*got.at_bound})


def test_a_law_from_its_file_is_the_law_in_memory_to_the_last_bit(noisy_law, tmp_path):
    from dataclasses import replace

    law = replace(noisy_law, context={"shape_rule": "small", "vocab_size": 1024, "nested": {"a": [1, 2]}})
    law.save(tmp_path / "law.json")
    back = load_law(tmp_path / "law.json")
    assert back == law
    assert np.array_equal(back.predict(*POINT), law.predict(*POINT))
    assert np.array_equal(back.log_sd(*POINT), law.log_sd(*POINT))
    assert json.loads((tmp_path / "law.json").read_text())["context"]["vocab_size"] == 1024


@pytest.mark.parametrize("value", [None, "text", -1, [None], {"a": None}, float("nan")])
def test_a_law_with_one_field_that_no_fit_wrote_is_refused_or_harmless(noisy_law, value):
    """Every field in turn: never anything but LawError, at reading or at the first prediction and its interval."""
    whole = noisy_law.to_dict()
    refused = set()
    for name in whole.keys() - {"format"}:
        try:
            law = law_from_dict({**whole, name: value})
            law.predict(*POINT)
            law.interval(*POINT)
            law.doubts()
        except LawError:
            refused.add(name)
    assert {"theta", "names", "covariance", "ranges", "topologies"} <= refused
    if value != -1:
        assert {"N0", "log_rms", "n_is", "context", "unidentified"} - refused <= set(KEPT.get(str(value), ()))


def test_a_file_that_is_no_law_is_refused_in_one_line(tmp_path, noisy_law):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(LawError, match="is not JSON"):
        load_law(tmp_path / "x.json")
    with pytest.raises(LawError, match="cannot read the law file"):
        load_law(tmp_path / "missing.json")
    with pytest.raises(LawError, match="format 0"):
        law_from_dict({**noisy_law.to_dict(), "format": 0})
    cut = {k: v for k, v in noisy_law.to_dict().items() if k != "theta"}
    with pytest.raises(LawError, match="theta"):
        law_from_dict(cut)


def test_nothing_to_fit_is_a_typed_error_of_one_line(simulated):
    frame = simulated(("pre_ln",))
    with pytest.raises(LawError, match="no column val_loss"):
        fit(frame.drop(columns="val_loss"))
    with pytest.raises(LawError, match="no row of 72 can be fitted"):
        fit(frame.assign(val_loss=np.nan))
    with pytest.raises(LawError, match="5 usable rows cannot fit the 8 unknowns"):
        fit(frame.head(5))
    with pytest.raises(LawError, match="delta is -1"):
        fit(frame, delta=-1)
    with pytest.raises(LawError, match="tokens must hold numbers"):
        fit(frame.assign(tokens="many"))


def test_a_topology_that_was_not_fitted_is_an_error_that_lists_those_that_were(noisy_law):
    with pytest.raises(LawError, match="it knows full_attnres, hc, pre_ln"):
        noisy_law.predict("mhc", 1e6, 1e8, 4, 64)
    with pytest.raises(LawError, match="D must be positive"):
        noisy_law.predict("hc", 1e6, 0, 4, 64)


def test_a_mapping_of_arrays_fits_as_a_frame_does(simulated):
    frame = simulated(noise=0.003)
    assert fit({c: frame[c].to_numpy() for c in frame}, starts=8) == fit(pd.DataFrame(frame), starts=8)


def test_missing_values_of_nullable_columns_are_left_out(simulated):
    frame = simulated(noise=0.003).astype({"n_layers": "Int64", "topology": "string"})
    frame.loc[3, "n_layers"] = pd.NA
    frame.loc[5, "topology"] = pd.NA
    assert [x.row for x in fit(frame, starts=8).left_out] == [3, 5]


def test_delta_follows_the_median_absolute_deviation_and_never_falls_below_a_thousandth(simulated):
    frame = simulated(noise=0.004)
    r = np.array(fit(frame, delta=1e-2).residuals)
    assert fit(frame).delta == pytest.approx(1.345 * 1.4826 * np.median(np.abs(r - np.median(r))), rel=1e-6)
    assert fit(simulated(noise=1e-5), starts=8).delta == 1e-3


def test_three_shapes_a_size_do_not_identify_the_bowl_however_far_apart(simulated):
    got = fit(simulated(("pre_ln",), ratios=(4, 24, 128), noise=0.003), starts=16)
    assert {"kappa[pre_ln]", "rho0[pre_ln]", "rho1"} <= set(got.unidentified)
    assert "at most 3 shapes a size" in got.unidentified["rho0[pre_ln]"]


def test_enough_shapes_at_one_size_only_do_not_identify_the_drift(simulated):
    frame = simulated(("pre_ln",), noise=0.003)
    few = frame[(frame.backbone_params < 2e6) | (frame.d_model / frame.n_layers).between(10, 40)]
    got = fit(few, starts=16)
    assert "rho1" in got.unidentified
    assert "at two sizes or more" in got.unidentified["rho1"]
    assert "rho0[pre_ln]" not in got.unidentified


@pytest.mark.parametrize(("column", "value"), [("n_layers", 4.5), ("d_model", 64.25)])
def test_a_depth_or_width_that_is_no_whole_number_is_refused_by_its_row(simulated, column, value):
    frame = simulated().astype({column: float})
    frame.loc[7, column] = value
    with pytest.raises(LawError, match=rf"row 7 \(the first is 0\) has {column} {value}; .* leave the row out"):
        fit(frame)
    frame.loc[7, "val_loss"] = np.nan  # what is left out anyway is not looked at further
    assert fit(frame, starts=8).left_out[0].row == 7
