"""The next sweep's design against closed forms, brute force, and simulated sweeps with a known best shape."""

import json
import math
from itertools import combinations, pairwise

import numpy as np
import pandas as pd
import pytest

from depthlaw.scaling.fit import LawError, fit
from depthlaw.scaling.next_cells import Cell, NextCellsError, choose_cells, expected_sd, ladder

TOPOLOGIES = ("pre_ln", "hc", "full_attnres")
TARGET = 1e9


def cells(sizes, ratios, tokens_per_n=(5, 20, 80), topologies=TOPOLOGIES):
    """Designs of 12 L d^2 parameters near each size and ratio d / L, trained for 6 N D FLOPs."""
    found = {}
    for t in topologies:
        for size in sizes:
            for ratio in ratios:
                L = max(2, round((size / 12 / ratio**2) ** (1 / 3)))
                d = max(8, 8 * round((size / 12 / L) ** 0.5 / 8))
                N = 12 * L * d * d
                for c in tokens_per_n:
                    found[t, L, d, c] = Cell(t, L, d, N, c, c * N, 6 * N * c * N)
    return list(found.values())


@pytest.fixture(scope="module")
def law(simulated):
    return fit(simulated(sizes=(1e6, 4e6), noise=0.005), starts=16)


@pytest.fixture(scope="module")
def candidates():
    return cells(4e6 * 2.0 ** np.arange(7), (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128, 180))


@pytest.mark.parametrize("compute", [1e17, 1e18, 1e19])
def test_a_design_keeps_to_its_compute_takes_each_cell_once_and_beats_the_plain_ladder(law, candidates, compute):
    plan = choose_cells(law, candidates, compute, TARGET)
    assert len(set(plan.cells)) == len(plan.cells) <= 40
    assert set(plan.cells) <= set(candidates)
    assert plan.flops == pytest.approx(sum(c.flops for c in plan.cells))
    assert 0.9 * compute < plan.flops <= compute
    assert plan.ladder_flops <= compute
    for t in TOPOLOGIES:
        assert plan.sd_after[t] < plan.sd_ladder[t] < plan.sd_before[t]
    assert plan.sd_after == pytest.approx(expected_sd(law, plan.cells, TOPOLOGIES, TARGET), rel=1e-6)
    json.dumps(plan.to_dict(), allow_nan=False)


def test_it_beats_a_ladder_that_uses_up_the_same_compute(law, candidates):
    plain = ladder(candidates, 1e18)
    assert {c.ratio for c in plain} == {20}
    sizes = sorted({round(math.log2(c.N)) for c in plain})
    assert len(sizes) > 1
    assert all(b - a == 2 for a, b in pairwise(sizes))
    assert len(plain) == 4 * 3 * len(sizes)
    plan = choose_cells(law, candidates, sum(c.flops for c in plain), TARGET)
    for t in TOPOLOGIES:
        assert plan.sd_after[t] < 0.75 * plan.sd_ladder[t]


def test_the_standard_deviation_now_is_that_of_the_covariance_along_the_best_shape(law):
    """ln R_opt = rho0 + rho1 ln(N / N0)."""
    plan = choose_cells(law, cells([4e6], [8, 32], topologies=["hc"]), 1e18, TARGET)
    g = np.zeros(len(law.names))
    g[law.names.index("rho0[hc]")], g[law.names.index("rho1")] = 1.0, math.log(TARGET / law.N0)
    assert plan.sd_before == {"hc": pytest.approx(math.sqrt(g @ np.array(law.covariance) @ g), rel=1e-6)}


def test_it_is_as_good_as_the_best_of_all_choices(law):
    few = cells([4e6, 64e6], [4, 16, 64], tokens_per_n=(5, 20), topologies=["hc"])
    assert len(few) == 12
    compute = 3e17
    plan = choose_cells(law, few, compute, TARGET, most=3)

    def mean_variance(chosen):
        return np.mean(np.square(list(expected_sd(law, chosen, ("hc",), TARGET).values())))

    every = [c for n in range(1, 4) for c in combinations(few, n) if sum(x.flops for x in c) <= compute]
    best = min(mean_variance(c) for c in every)
    assert best * (1 - 1e-9) <= mean_variance(plan.cells) <= 1.03 * best


def test_what_cannot_be_designed_is_one_line_that_says_why(law, simulated, candidates):
    with pytest.raises(
        NextCellsError, match=r"compute 1e\+03 FLOPs pays for no run: the cheapest of 864 candidates takes"
    ):
        choose_cells(law, candidates, 1e3, TARGET)
    flat = fit(simulated(noise=0.003), law="chinchilla", starts=8)
    with pytest.raises(NextCellsError, match="law 'chinchilla' has no best shape"):
        choose_cells(flat, candidates, 1e18, TARGET)
    with pytest.raises(LawError, match="mhc"):
        choose_cells(law, cells([4e6], [8], topologies=["mhc"]), 1e18, TARGET)


@pytest.mark.slow
def test_in_simulation_the_best_shape_comes_out_as_certain_as_predicted_and_twice_that_of_a_ladder(
    simulated, truth, candidates
):
    """40 sweeps: pilot at two sizes, then the design or a ladder of the same compute, then a fit of all runs."""
    from_truth = {
        t: rho0 + 0.15 * math.log(TARGET / 8e6) for t, rho0 in {"pre_ln": 2.8, "hc": 2.5, "full_attnres": 3.1}.items()
    }
    plain = ladder(candidates, 1e18)
    compute = sum(c.flops for c in plain)
    off, said = {"design": [], "ladder": []}, {"design": [], "ladder": []}
    for seed in range(40):
        pilot = simulated(sizes=(1e6, 4e6), noise=0.005, seed=100 + seed)
        law = fit(pilot, starts=8)
        plan = choose_cells(law, candidates, compute, TARGET)
        rng = np.random.default_rng(seed)
        for name, chosen, sd in (("design", plan.cells, plan.sd_after), ("ladder", plain, plan.sd_ladder)):
            new = pd.DataFrame(
                [
                    (
                        c.topology,
                        c.N,
                        c.tokens,
                        c.n_layers,
                        c.d_model,
                        truth(c.topology, c.N, c.tokens, c.n_layers, c.d_model),
                    )
                    for c in chosen
                ],
                columns=list(pilot.columns),
            )
            new["val_loss"] *= np.exp(0.005 * rng.standard_normal(len(new)))
            after = fit(pd.concat([pilot, new]), starts=8)
            off[name].append([math.log(after.best_ratio(t, TARGET)) - from_truth[t] for t in TOPOLOGIES])
            said[name].append([sd[t] for t in TOPOLOGIES])
    error = {name: np.sqrt(np.mean(np.square(x))) for name, x in off.items()}
    predicted = {name: np.sqrt(np.mean(np.square(x))) for name, x in said.items()}
    print(error, predicted)
    assert error["design"] < 0.75 * error["ladder"]
    for name in error:
        assert error[name] == pytest.approx(predicted[name], rel=0.35)
