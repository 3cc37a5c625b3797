"""Held-out sizes, the inflation they call for, and which law and pooling they choose."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from depthlaw.scaling.assess import assess
from depthlaw.scaling.choose import _worse, choose, spearman
from depthlaw.scaling.fit import FitRefusedError, LawError, fit
from depthlaw.scaling.rolling import HeldOut, groups, inflation, rolling_origin
from depthlaw.scaling.rows import read_rows


def test_sizes_are_told_apart_by_gaps_and_never_span_more_than_three():
    assert groups(np.array([1e6, 4e6, 1.1e6, 4.4e6, 17e6])).tolist() == [0, 1, 0, 1, 2]
    ladder = 1e6 * 1.2 ** np.arange(12)  # no gap anywhere
    assert groups(ladder).tolist() == [0] * 7 + [1] * 5


def test_each_size_is_predicted_from_those_below_it_alone(simulated):
    frame = simulated(("pre_ln", "hc"), noise=0.004)
    rows = read_rows(frame)
    held = rolling_origin(rows, "shape", "shared")
    assert [round(h.N / 1e6) for h in held] == [16, 65]
    for h, cut in zip(held, (1e7, 4e7), strict=True):
        by_hand = fit(frame[frame.backbone_params < cut], starts=16)
        assert rows.N[h.rows].min() > cut
        at = [(rows.topology[i], rows.N[i], rows.D[i], rows.L[i], rows.d[i]) for i in h.rows]
        want = [np.log(rows.loss[i]) - float(by_hand.log_loss(*a)) for i, a in zip(h.rows, at, strict=True)]
        assert h.error == pytest.approx(want, abs=1e-7)
        assert h.sd == pytest.approx([np.hypot(float(by_hand.log_sd(*a)), by_hand.log_rms) for a in at], rel=1e-3)


def test_sizes_that_smaller_ones_cannot_predict_are_passed_over(simulated):
    frame = simulated(("pre_ln",), noise=0.004)
    assert rolling_origin(read_rows(simulated(("pre_ln",), sizes=(1e6, 4e6))), "shape", "shared") == ()
    # Sizes within a factor 3 cannot tell an exponent; seven rows cannot fit eight unknowns.
    assert rolling_origin(read_rows(simulated(("pre_ln",), sizes=(1e6, 1.5e6, 9e6))), "shape", "shared") == ()
    few = pd.concat([frame[frame.backbone_params < 8e6].iloc[::6], frame[frame.backbone_params > 8e6]])
    assert [round(h.N / 1e6) for h in rolling_origin(read_rows(few), "shape", "shared")] == [65]
    new = frame.assign(topology=np.where(frame.backbone_params > 4e7, "hc", "pre_ln"))
    assert [round(h.N / 1e6) for h in rolling_origin(read_rows(new), "shape", "shared")] == [16]


def size(z, sd=0.01):
    return HeldOut(1e7, np.arange(len(z)), np.array(z) * sd, np.full(len(z), sd))


def test_inflation_is_one_for_expected_errors_and_grows_with_a_bias_but_not_with_one_outlier():
    rng = np.random.default_rng(0)
    z = rng.standard_normal(4000)
    assert inflation(()) == 1.0
    assert inflation((size(0.2 * z),)) == 1.0
    # Huber's deviance scale of normal errors is 0.93 of their standard deviation, in sd as in the error.
    assert inflation((size(3.0 * z),)) == pytest.approx(3 * 0.93, rel=0.02)
    assert inflation((size(5.0 + 0.1 * z),)) == pytest.approx(5.0, rel=0.01)
    assert inflation((size(np.append(3.0 * z[:60], 500.0)),)) < 3.5
    assert inflation((size(np.full(9, 3.0)), size(np.full(99, 4.0)))) == pytest.approx(np.sqrt(12.5))


def test_a_law_of_the_wrong_form_is_inflated_and_its_intervals_then_hold(simulated):
    frame = simulated(("pre_ln",), sizes=(1e6, 4e6, 16e6, 64e6, 256e6, 1024e6), noise=0.003)
    # A power of size that fades: no chinchilla-like law has it.
    frame["val_loss"] = np.exp(
        1.0 - 0.10 * np.log(frame.backbone_params / 1e6) + 0.012 * np.log(frame.backbone_params / 1e6) ** 2
    ) * np.exp(0.003 * np.random.default_rng(0).standard_normal(len(frame)))
    small = frame[frame.backbone_params < 5e8]
    law = assess(fit(small, "chinchilla", starts=16), small, 200)
    assert law.inflation > 1.5
    assert len(law.held_out) == 3
    large = frame[frame.backbone_params > 5e8]
    at = ("pre_ln", *(large[c] for c in ("backbone_params", "tokens", "n_layers", "d_model")))

    def share(inflated):
        low, high = law.interval(*at, inflated=inflated)
        return np.mean((low <= large.val_loss) & (large.val_loss <= high))

    assert share(True) > share(False)


def test_the_law_behind_the_data_is_chosen_and_the_others_are_shown(simulated):
    law = choose(simulated(("pre_ln",), ratios=(4, 12, 36, 108), tokens_per_n=(5, 80), noise=0.003), starts=8)
    assert law.law == "shape"
    fitted = {c["law"]: c for c in law.choice["candidates"] if "refused" not in c}
    mine, other = fitted["shape"], fitted["chinchilla"]
    assert mine["held_out"] < 0.5 * other["held_out"]
    assert mine["rank"] > other["rank"]
    assert mine["aicc"] < other["aicc"]
    assert mine["unknowns"] == len(law.names) == 8
    assert {c["law"] for c in law.choice["candidates"] if "refused" in c} == {"iso_size"}
    assert "held-out sizes" in law.choice["why"]


def test_what_topologies_share_is_chosen_too(simulated):
    frame = simulated(("pre_ln", "hc"), ratios=(4, 12, 36, 108), tokens_per_n=(5, 80), noise=0.003)
    law = choose(frame, "shape", starts=8)
    assert law.pooling != "separate"  # every exponent of the truth is common
    assert len(law.choice["candidates"]) == 3
    # A truth in which one topology has other exponents.
    other = simulated(("hc",), ratios=(4, 12, 36, 108), tokens_per_n=(5, 80), noise=0.003, seed=1)
    N, D = other.backbone_params / 8e6, other.tokens / 1.6e8
    q = np.log(other.d_model / other.n_layers) - 2.5
    bowl = np.exp(0.07 * q**2)
    other["val_loss"] *= (1.5 + 0.9 * bowl * N**-0.45 + 0.6 * D**-0.25) / other.val_loss
    noise = np.exp(0.003 * np.random.default_rng(0).standard_normal(len(other)))
    both = pd.concat([frame[frame.topology == "pre_ln"], other.assign(val_loss=other.val_loss * noise)])
    assert choose(both, "shape", starts=8).pooling == "separate"


def test_without_an_effect_of_shape_the_smaller_law_is_chosen(simulated):
    frame = simulated(("pre_ln",), sizes=(1e6, 4e6, 16e6), ratios=(4, 12, 36, 108))
    N, D = frame.backbone_params / 8e6, frame.tokens / 1.6e8
    noise = np.exp(0.004 * np.random.default_rng(3).standard_normal(len(frame)))
    frame["val_loss"] = (1.8 + 0.8 * N**-0.3 + 0.75 * D**-0.35) * noise
    law = choose(frame, starts=8)
    assert law.law == "chinchilla"
    assert "one held-out size" in law.choice["why"]
    assert "least AICc" in law.choice["why"]
    # Compared and never chosen, though without an effect of shape it predicts as well.
    assert "morph" in {c["law"] for c in law.choice["candidates"]}


def test_a_part_of_the_choice_can_be_kept(simulated):
    frame = simulated(("pre_ln", "hc"), sizes=(1e6, 4e6), ratios=(4, 12, 36, 108), tokens_per_n=(5, 80), noise=0.003)
    law = choose(frame, "chinchilla", starts=8)
    # Shared-shape is shared for a law without shape, so it is not listed twice.
    assert [(c["law"], c["pooling"]) for c in law.choice["candidates"]] == [
        ("chinchilla", "shared"),
        ("chinchilla", "separate"),
    ]
    law = choose(frame, "shape", "separate", starts=8)
    assert [(c["law"], c["pooling"]) for c in law.choice["candidates"]] == [("shape", "separate")]
    assert law.theta == fit(frame, pooling="separate", starts=8).theta
    with pytest.raises(LawError, match="unknown law 'power'"):
        choose(frame, "power")
    with pytest.raises(FitRefusedError, match="no law can be fitted"):
        choose(frame.head(3))


def test_one_size_leaves_the_choice_to_aicc_and_says_so(simulated):
    law = choose(simulated(("pre_ln",), sizes=(4e6,), tokens_per_n=(20,), noise=0.002), starts=8)
    assert law.choice["why"] == "least AICc: no size could be held out"
    aicc = [c["aicc"] for c in law.choice["candidates"] if "refused" not in c and c["law"] != "morph"]
    assert next(c["aicc"] for c in law.choice["candidates"] if c["law"] == law.law) == min(aicc)
    assert all(c["held_out"] is None for c in law.choice["candidates"] if "refused" not in c)


def test_a_difference_counts_beyond_one_clustered_standard_error():
    cluster = np.repeat(["a", "b", "c", "d"], 25)
    rng = np.random.default_rng(1)
    by_cluster = np.repeat([1.0, -1.0, 0.9, -0.6], 25)
    # Within clusters all agree, so 100 rows are 4: the mean 0.075 is well inside its error of about 0.5.
    assert not _worse(by_cluster, cluster)
    assert _worse(0.075 + 0.01 * rng.standard_normal(100), cluster)
    assert not _worse(-0.075 + 0.01 * rng.standard_normal(100), cluster)
    assert not _worse(np.ones(25), cluster[:25])


def test_rank_correlation_is_that_of_scipy_with_ties():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 6, 40).astype(float), rng.standard_normal(40)
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert spearman(a, a) == pytest.approx(1.0)
    assert spearman(np.ones(40), b) == 0.0
