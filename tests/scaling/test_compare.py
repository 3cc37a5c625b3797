"""What a topology is worth: against the truth that runs were drawn from, and draw by draw."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from depthlaw.scaling.assess import assess
from depthlaw.scaling.compare import compare
from depthlaw.scaling.fit import LawError, fit

# The simulated sweeps' size terms: pre_ln 0.80, hc 0.72, full_attnres 0.68, all to the power -0.3 of N.
TRUE = {"pre_ln": 1.0, "hc": (0.80 / 0.72) ** (1 / 0.3), "full_attnres": (0.80 / 0.68) ** (1 / 0.3)}


@pytest.fixture(scope="module")
def law(simulated):
    frame = simulated(noise=0.003)
    return assess(fit(frame, starts=8), frame, draws=300)


def test_worth_is_that_of_the_truth_within_an_interval_that_excludes_one(law):
    found = compare(law)
    assert [t.topology for t in found.topologies] == ["full_attnres", "hc", "pre_ln"]
    for t in found.topologies:
        assert t.lower <= TRUE[t.topology] <= t.upper
        assert t.doubt == ""
        if t.topology != "pre_ln":
            assert 1.0 < t.lower < t.worth < t.upper
            assert t.better_in == 1.0
            assert t.ratio_lower < t.best_ratio < t.ratio_upper
    assert (found.draws, found.N, found.D) == (300, law.N0, law.D0)


def test_each_draw_is_worth_what_a_law_of_that_draw_says(law):
    for topology, reference in (("hc", "pre_ln"), ("pre_ln", "full_attnres")):
        got = law.worth_draws(topology, reference)
        one_by_one = [replace(law, theta=tuple(row.tolist())).worth(topology, reference) for row in law.draws[:20]]
        assert got[:20] == pytest.approx(one_by_one, rel=1e-12)
        # Closed form: one alpha, so x = exp((a_reference - a) / alpha).
        name = dict(zip(law.names, law.draws.T, strict=True))
        x = np.exp((name[f"a[{reference}]"] - name[f"a[{topology}]"]) / np.exp(name["alpha"]))
        assert got == pytest.approx(x, rel=1e-9)
        row = next(t for t in compare(law, reference).topologies if t.topology == topology)
        assert row.lower == pytest.approx(np.quantile(x, 0.025), rel=0.02)
        assert row.upper == pytest.approx(np.quantile(x, 0.975), rel=0.02)
        assert row.better_in == np.mean(x > 1)


def test_without_draws_there_is_no_interval_and_what_the_data_cannot_tell_is_no_number(law):
    bare = compare(replace(law, draws_base64="", unidentified={"alpha": "x", "kappa[hc]": "y"}))
    by_name = {t.topology: t for t in bare.topologies}
    assert bare.draws == 0
    assert (by_name["hc"].worth, by_name["hc"].lower) == (None, None)
    assert by_name["hc"].doubt == "the data do not identify alpha"
    assert by_name["pre_ln"].worth == 1.0
    shape_only = compare(replace(law, unidentified={"kappa[hc]": "y"}))
    assert all(t.worth is not None for t in shape_only.topologies)
    with pytest.raises(LawError, match="not fitted on the reference 'mhc'; it knows full_attnres, hc, pre_ln"):
        compare(law, "mhc")


def test_a_worth_beyond_a_thousand_is_not_a_number_and_json_stays_json(law):
    steep = dict(zip(law.names, law.theta, strict=True)) | {"alpha": math.log(1e-3)}
    theta = tuple(steep[name] for name in law.names)
    draws = np.where(np.array(law.names) == "alpha", math.log(1e-3), law.draws)
    flat = with_draws(replace(law, theta=theta), draws)
    row = next(t for t in compare(flat).topologies if t.topology == "hc")
    assert row.worth is None
    assert "sees no size of pre_ln between 1/1000 and 1000" in row.doubt
    assert np.isinf(flat.worth_draws("hc")).all()
    assert (flat.worth_draws("pre_ln", "hc") == 0).all()
    json.dumps(compare(flat).to_dict(), allow_nan=False)


def with_draws(law, draws):
    import base64

    return replace(law, draws_base64=base64.b64encode(draws.astype("<f8").tobytes()).decode())


def test_a_law_of_one_size_shows_the_profile_of_its_best_shape_and_of_others_the_draws(simulated, law):
    frame = simulated(sizes=(16e6,), tokens_per_n=(20,), noise=0.003)
    small = assess(fit(frame, "iso_size", starts=8), frame, draws=100)
    for t in compare(small).topologies:
        assert (t.ratio_lower, t.ratio_upper) == small.profiles[f"best d/L[{t.topology}]"]
        assert ("holds at the size and training fitted" in t.doubt) == (t.worth is None) == (t.topology != "pre_ln")
    assert (compare(small).ratio_by, compare(law).ratio_by) == ("the profile likelihood", "the same")
    for t in compare(law).topologies:
        drawn = np.quantile(law.best_ratio_draws(t.topology, law.N0), (0.025, 0.975))
        assert (t.ratio_lower, t.ratio_upper) == pytest.approx(tuple(drawn))


def test_what_is_said_of_several_topologies_is_said_once(simulated):
    frame = simulated(sizes=(16e6,), ratios=(16, 22, 30, 40), tokens_per_n=(20,), noise=0.003)
    small = assess(fit(frame, "iso_size", starts=8), frame, draws=20)
    (said,) = [line for line in small.doubts() if "shapes a size" in line]
    own = ", ".join(f"{p}[{t}]" for t in small.topologies for p in ("kappa", "rho"))
    assert said.startswith(f"the data do not identify {own}: its topology has at most 4 shapes a size, d/L ")
