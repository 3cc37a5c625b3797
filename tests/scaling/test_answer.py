"""What an answer says beside its best design: who wins under the law's draws, intervals, the table of designs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from depthlaw.scaling import table
from depthlaw.scaling.assess import assess
from depthlaw.scaling.fit import fit
from depthlaw.scaling.optimum import optimise

LIMITS = {"params": 9e6, "kv_bytes": 150 * 2**20}


@pytest.fixture(scope="module")
def law(simulated):
    """Few runs and much noise, so that the draws disagree on the topology too."""
    frame = simulated(sizes=(1e6, 4e6), ratios=(8, 16, 32, 64), noise=0.04)
    return assess(fit(frame, starts=8), frame, draws=200)


@pytest.fixture(scope="module")
def grids(make_lattice):
    return [make_lattice(t, range(2, 40), range(32, 513, 8)) for t in ("pre_ln", "hc", "full_attnres")]


@pytest.fixture(scope="module")
def answer(law, grids):
    return optimise(law, grids, [f"{k}<={v}" for k, v in LIMITS.items()])


def winners(law, grids):
    """{(topology, L, d): share} from the law's equation in double precision, draw by draw and design by design."""
    fits = []
    for grid in grids:
        for L, d in zip(grid.n_layers.tolist(), grid.d_model.tolist(), strict=True):
            N = 12 * L * d * d
            if N + 2000 * d <= LIMITS["params"] and 2 * 2 * 4096 * L * d <= LIMITS["kv_bytes"]:
                fits.append((grid.label, L, d, N, 20 * (N + 2000 * d)))
    t, L, d, N, D = (np.array(c) for c in zip(*fits, strict=True))
    n, y, r = np.log(N / law.N0), np.log(D / law.D0), np.log(d / L)
    share = {}
    for theta in law.draws:
        v = dict(zip(law.names, theta.tolist(), strict=True))
        loss = np.empty(len(fits))
        for label in law.topologies:
            own = t == label
            q = r[own] - v[f"rho0[{label}]"] - v["rho1"] * n[own]
            size = v[f"a[{label}]"] - math.exp(v["alpha"]) * n[own] + math.exp(v[f"kappa[{label}]"]) * q * q
            loss[own] = np.exp(v["e"]) + np.exp(size) + np.exp(v["b"] - math.exp(v["beta"]) * y[own])
        key = fits[int(loss.argmin())][:3]
        share[key] = share.get(key, 0.0) + 1 / len(law.draws)
    return share


def test_shares_of_draws_are_those_of_a_loop_over_draws_and_designs(law, grids, answer):
    want = winners(law, grids)
    by_topology = {}
    for key, share in want.items():
        by_topology[key[0]] = by_topology.get(key[0], 0.0) + share
    assert len(want) > 10
    assert len(by_topology) > 1
    assert answer.draws == 200
    assert {k: v for k, v in answer.topology_shares.items() if v} == pytest.approx(by_topology, abs=1e-9)
    assert sum(answer.topology_shares.values()) == pytest.approx(1.0)
    assert list(answer.topology_shares.values()) == sorted(answer.topology_shares.values(), reverse=True)
    shares = [c.share for c in answer.contenders]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == min(20, len(want))
    # Designs within 1e-6 of each other may swap a win in single precision.
    for c in answer.contenders:
        assert c.share == pytest.approx(want[c.topology, c.n_layers, c.d_model], abs=1.01 / 200)
    assert answer.best.share == pytest.approx(
        want.get((answer.best.topology, *_shape(answer.best)), 0.0), abs=1.01 / 200
    )


def _shape(c):
    return c.n_layers, c.d_model


def test_one_topology_over_two_lattices_has_the_share_of_both(law, grids, answer):
    half = [
        replace(grids[1], n_layers=grids[1].n_layers[own], d_model=grids[1].d_model[own]) for own in _halves(grids[1])
    ]
    again = optimise(law, [grids[0], *half, grids[2]], [f"{k}<={v}" for k, v in LIMITS.items()])
    assert again.topology_shares == pytest.approx(answer.topology_shares, abs=1e-12)


def _halves(grid):
    return grid.n_layers < 12, grid.n_layers >= 12


def test_blocks_of_designs_do_not_change_who_wins(law, grids, answer, monkeypatch):
    monkeypatch.setattr(table, "DESIGNS_AT_ONCE", 100)
    again = optimise(law, grids, [f"{k}<={v}" for k, v in LIMITS.items()])
    assert again == answer


def test_a_question_beyond_the_limit_of_losses_counts_every_second_draw_and_says_how_many(
    law, grids, answer, monkeypatch
):
    monkeypatch.setattr(table, "MOST_LOSSES", answer.feasible * 150)
    thin = optimise(law, grids, [f"{k}<={v}" for k, v in LIMITS.items()])
    assert thin.draws == 100
    assert thin.best.loss == answer.best.loss
    assert (thin.best.lower, thin.best.upper) == (answer.best.lower, answer.best.upper)
    assert thin.topology_shares == pytest.approx(answer.topology_shares, abs=0.15)


def test_the_interval_is_that_of_the_law_and_the_answer_says_which_kind(law, grids, answer):
    best = answer.best
    lower, upper = law.interval(best.topology, best.backbone_params, best.tokens, best.n_layers, best.d_model)
    assert (best.lower, best.upper) == (pytest.approx(lower[0]), pytest.approx(upper[0]))
    assert "resampled runs" in answer.interval
    assert not law.held_out
    assert "not widened, for no size" in answer.interval
    for inflation, words in ((1.25, ", widened 1.25 times"), (1.0, "not widened, for larger sizes were predicted")):
        checked = replace(law, held_out=({"N": 1e6},), inflation=inflation)
        assert words in optimise(checked, grids, ["params<=1M"]).interval
    plain = optimise(replace(law, draws_base64=""), grids, [f"{k}<={v}" for k, v in LIMITS.items()])
    assert "linearised" in plain.interval
    assert (plain.draws, plain.contenders, plain.topology_shares, plain.best.share) == (0, (), {}, None)
    assert (plain.best.topology, _shape(plain.best), plain.best.loss) == (best.topology, _shape(best), best.loss)


def test_the_table_of_an_answer_has_each_design_once_with_its_roles(answer):
    frame = answer.to_frame()
    assert frame["loss"].is_monotonic_increasing
    assert not frame.duplicated(["topology", "n_layers", "d_model"]).any()
    assert frame["best"].sum() == 1
    assert frame.loc[0, "best"]
    assert frame["best_of_topology"].sum() == len(answer.per_topology) == 3
    assert frame["contender"].sum() == len(answer.contenders)
    assert frame["pareto"].sum() == len(answer.pareto)
    assert (frame["use_params"] <= LIMITS["params"]).all()
    assert (frame["use_kv_bytes"] == frame["kv_bytes"]).all()
    first = frame.iloc[0]
    assert (first.topology, first.n_layers, first.d_model, first.tpot_s) == (
        answer.best.topology, answer.best.n_layers, answer.best.d_model, answer.best.tpot_s,
    )  # fmt: skip


def test_the_front_and_the_shares_are_in_the_json(answer):
    back = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert len(back["pareto"]) == len(answer.pareto) > 3
    assert back["pareto"][0]["loss"] == answer.best.loss
    assert back["topology_shares"] == answer.topology_shares
    assert back["contenders"][0]["share"] == answer.contenders[0].share
