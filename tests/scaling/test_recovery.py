"""Every law against sweeps whose truth is written out here in plain terms, not through the law."""

import numpy as np
import pytest

from depthlaw.scaling.fit import fit
from depthlaw.scaling.laws import law

LEVEL = {"pre_ln": 0.80, "hc": 0.70}


def tokens(D):
    return 0.75 * (D / 1.6e8) ** -0.35


TRUTH = {
    "chinchilla": lambda A, N, D, L, d: 1.8 + A * (N / 8e6) ** -0.30 + tokens(D),
    "shape": lambda A, N, D, L, d: (
        1.8
        + A * np.exp((0.02 + 0.05 * A) * (np.log(d / L) - 2.0 - A - 0.15 * np.log(N / 8e6)) ** 2) * (N / 8e6) ** -0.30
        + tokens(D)
    ),
    "width_depth": lambda A, N, D, L, d: 1.8 + A * (d / 256) ** -0.60 + 0.6 * A * (L / 8) ** -0.90 + tokens(D),
    "width_depth_params": lambda A, N, D, L, d: (
        1.8 + 0.5 * A * (d / 256) ** -0.70 + 0.3 * A * (L / 8) ** -1.10 + A * (N / 8e6) ** -0.30 + tokens(D)
    ),
    "morph": lambda A, N, D, L, d: (1.8 + A * (N / 8e6) ** -0.30 + tokens(D)) * (1 + 0.02 * A * (d / L / 16) ** 0.60),
    "iso_size": lambda A, N, D, L, d: 2.7 + A + 0.03 * A * (np.log(d / L) - 3.0 - A) ** 2,
}


def sweep(simulated, name, noise=0.0, seed=0):
    only = {"sizes": (16e6,), "tokens_per_n": (20,)} if name == "iso_size" else {}
    frame = simulated(tuple(LEVEL), **only)
    where = [frame[c].to_numpy(float) for c in ("backbone_params", "tokens", "n_layers", "d_model")]
    true = TRUTH[name](frame.topology.map(LEVEL).to_numpy(), *where)
    return frame.assign(val_loss=true * np.exp(noise * np.random.default_rng(seed).standard_normal(len(frame)))), true


def expected(name, A, fitted):
    """The parameters of a topology at the fit's centre."""
    N0, D0, L0, d0 = fitted.N0, fitted.D0, fitted.L0, fitted.d0
    power = {
        "e": np.log(1.8),
        "b": np.log(tokens(D0)),
        "beta": 0.35,
        "a": np.log(A * (N0 / 8e6) ** -0.30),
        "alpha": 0.30,
    }
    return {
        "chinchilla": power,
        "shape": {**power, "kappa": 0.02 + 0.05 * A, "rho0": 2.0 + A + 0.15 * np.log(N0 / 8e6), "rho1": 0.15},
        "width_depth": {
            **{k: power[k] for k in ("e", "b", "beta")},
            "c_w": np.log(A * (d0 / 256) ** -0.60),
            "w": 0.60,
            "c_l": np.log(0.6 * A * (L0 / 8) ** -0.90),
            "l": 0.9,
        },
        "width_depth_params": {
            **power,
            "c_w": np.log(0.5 * A * (d0 / 256) ** -0.70),
            "w": 0.70,
            "c_l": np.log(0.3 * A * (L0 / 8) ** -1.10),
            "l": 1.1,
        },
        "morph": {**power, "g": np.log(0.02 * A * (d0 / L0 / 16) ** 0.60), "eta": 0.60},
        "iso_size": {"c": np.log(2.7 + A), "kappa": 0.03 * A, "rho": 3.0 + A},
    }[name]


@pytest.mark.parametrize("name", TRUTH)
def test_parameters_are_recovered_from_a_sweep_without_noise(simulated, name):
    frame, _ = sweep(simulated, name)
    got = fit(frame, law=name)
    assert got.objective < 1e-12
    for topology, A in LEVEL.items():
        assert got.parameters(topology) == pytest.approx(expected(name, A, got), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("name", TRUTH)
def test_parameters_lie_within_four_standard_errors_under_noise(simulated, name):
    """Every unknown that the data identify, and neither all far inside (errors overstated) nor many."""
    frame, _ = sweep(simulated, name, noise=0.003, seed=2)
    got = fit(frame, law=name)
    positive = {p.name for p in law(name).parameters if p.positive}
    off = []
    for k, unknown in enumerate(got.names):
        base, _, owner = unknown.rstrip("]").partition("[")
        value = expected(name, LEVEL[owner or "hc"], got)[base]
        if unknown not in (*got.unidentified, *got.at_bound):
            true = np.log(value) if base in positive else value
            off.append((got.theta[k] - true) / np.sqrt(got.covariance[k][k]))
    assert len(off) >= len(got.names) - 4
    assert np.max(np.abs(off)) < 4.0
    assert 0.2 < np.sqrt(np.mean(np.square(off))) < 2.0


@pytest.mark.parametrize("name", TRUTH)
def test_predictions_are_nearer_to_the_truth_than_the_noise_is(simulated, name):
    """Whether or not each parameter is identified; the bound is twice what K unknowns on m rows leave on average."""
    frame, true = sweep(simulated, name, noise=0.005, seed=1)
    got = fit(frame, law=name)
    off = np.empty(len(frame))
    for topology in LEVEL:
        of = (frame.topology == topology).to_numpy()
        rows = frame[of]
        p = got.predict(topology, rows.backbone_params, rows.tokens, rows.n_layers, rows.d_model)
        off[of] = np.log(p / true[of])
    assert np.sqrt(np.mean(off**2)) < 2.0 * 0.005 * np.sqrt(len(got.names) / len(frame))


def test_shape_pooled_over_topologies_is_recovered_where_they_differ_in_level_only(simulated):
    frame = simulated(tuple(LEVEL))
    where = [frame[c].to_numpy(float) for c in ("backbone_params", "tokens", "n_layers", "d_model")]
    A = frame.topology.map(LEVEL).to_numpy()
    N, D, L, d = where
    bowl = np.exp(0.06 * (np.log(d / L) - 2.8) ** 2)
    got = fit(frame.assign(val_loss=1.8 + A * bowl * (N / 8e6) ** -0.30 + tokens(D)), pooling="shared-shape")
    assert got.names == ("e", "alpha", "b", "beta", "kappa", "rho0", "rho1", "a[hc]", "a[pre_ln]")
    assert got.shared["kappa"] == pytest.approx(0.06, rel=1e-5)
    assert got.shared["rho0"] == pytest.approx(2.8, rel=1e-5)
    assert got.worth("hc") == pytest.approx((0.80 / 0.70) ** (1 / 0.30), rel=1e-4)


def test_worth_compares_best_shapes_under_a_law_of_width_and_depth(simulated):
    """By brute force: the loss of hc at its best of many shapes of N0, and the N at which pre_ln's best reaches it."""
    frame, _ = sweep(simulated, "width_depth")
    got = fit(frame, law="width_depth")
    L = np.exp(np.linspace(np.log(0.5), np.log(500), 20001))
    c = got.N0 / (got.L0 * got.d0**2)  # the law's best shape takes N = c L d^2

    def best(topology, N):
        return float(np.min(got.predict(topology, N, got.D0, L, np.sqrt(N / c / L))))

    goal = best("hc", got.N0)
    worth = got.worth("hc")
    assert worth > 1.2
    assert best("pre_ln", worth * got.N0) == pytest.approx(goal, rel=1e-7)
