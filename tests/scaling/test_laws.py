"""Laws, their Jacobians and the engine that fits them."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from depthlaw.scaling.fit import make_problem
from depthlaw.scaling.laws import LAWS, Centre, Chinchilla, LawError, Parameter, features, law
from depthlaw.scaling.lm import huber, minimise, objective
from depthlaw.scaling.pooling import POOLINGS, layout
from depthlaw.scaling.rows import read_rows
from depthlaw.scaling.search import latin_hypercube, search

CENTRE = Centre(8e6, 1.6e8, 6.0, 256.0)


def problem_of(frame, name="shape", pooling="shared"):
    rows, chosen = read_rows(frame), law(name)
    return make_problem(rows, chosen, layout(chosen, rows.topologies, pooling), CENTRE)


@pytest.mark.parametrize("name", sorted(LAWS))
@pytest.mark.parametrize("pooling", POOLINGS)
def test_jacobian_equals_complex_step_at_random_parameters(simulated, name, pooling):
    problem = problem_of(simulated(noise=0.01), name, pooling)
    theta = latin_hypercube(problem, 7, seed=3)
    analytic = problem.jacobian(theta)
    step = 1e-30
    for k in range(theta.shape[1]):
        moved = theta.astype(complex)
        moved[:, k] += 1j * step
        np.testing.assert_allclose(analytic[:, :, k], problem.residual(moved).imag / step, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", sorted(LAWS))
def test_one_design_a_row_of_them_and_a_mesh_have_the_same_loss_and_jacobian(name):
    chosen = law(name)
    p = np.array([np.mean(q.start) for q in chosen.parameters])
    L, d = np.meshgrid([2.0, 8.0, 30.0], [64.0, 512.0])
    mesh = features(12 * L * d**2, 1e9, L, d, CENTRE)
    one = features(12 * L[1, 2] * d[1, 2] ** 2, 1e9, L[1, 2], d[1, 2], CENTRE)
    for of in (chosen.log_loss, chosen.jacobian):
        row = of(p[:, None], mesh.take(1))
        assert np.array_equal(of(p[:, None, None], mesh)[1], row)
        np.testing.assert_allclose(np.squeeze(of(p, one)), row[2], rtol=1e-14)  # scalars may come as one row


def test_shape_law_is_the_sum_of_three_terms_written_out(simulated, truth):
    frame = simulated(("hc",))
    N, D, L, d = (frame[c].to_numpy(float) for c in ("backbone_params", "tokens", "n_layers", "d_model"))
    p = np.array([np.log(1.8), np.log(0.72), 0.30, np.log(0.75), 0.35, 0.07, 2.5, 0.15])[:, None]
    got = np.exp(law("shape").log_loss(p, features(N, D, L, d, CENTRE)))
    np.testing.assert_allclose(got, truth("hc", N, D, L, d), rtol=1e-13)


@pytest.mark.parametrize("name", ["width_depth", "width_depth_params"])
def test_best_shape_of_width_and_depth_is_that_of_a_search_over_shapes_of_one_size(name):
    """N = c L d^2 with the centre's own c, as `_best_ln_ratio` assumes; 20001 depths from 0.1 to 1000."""
    p = {"e": 0.5, "c_w": -0.2, "w": 0.3, "c_l": -1.0, "l": 0.7, "a": -1.0, "alpha": 0.2, "b": -1.0, "beta": 0.4}
    p = np.array([p[q.name] for q in law(name).parameters])[:, None]
    L = np.exp(np.linspace(np.log(0.1), np.log(1000), 20001))
    for size in (1e6, 8e6, 1e9):
        c = CENTRE.N0 / (CENTRE.L0 * CENTRE.d0**2)
        d = np.sqrt(size / c / L)
        found = np.argmin(law(name).log_loss(p, features(size, 1e9, L, d, CENTRE)))
        assert 100 < found < 19900
        best = law(name).best_ln_ratio(p, np.log([size / CENTRE.N0]), CENTRE)
        assert best == pytest.approx(np.log(d[found] / L[found]), abs=2e-3)


def test_morph_has_no_best_shape_for_it_is_monotone_in_the_ratio(simulated):
    from depthlaw.scaling.fit import fit

    got = fit(simulated(("pre_ln",), noise=0.003), law="morph")
    assert got.best_ratio("pre_ln", 8e6) is None
    assert np.ptp(np.sign(np.diff(got.predict("pre_ln", 8e6, 1e8, np.arange(2, 30), 256)))) == 0
    assert any("always at a bound" in note for note in got.notes)


@pytest.mark.parametrize(("sweep", "what"), [({"sizes": (4e6, 16e6)}, "N"), ({"sizes": (4e6,)}, "D")])
def test_iso_size_refuses_tables_of_several_sizes_or_amounts_of_training(simulated, sweep, what):
    from depthlaw.scaling.fit import FitRefusedError, fit

    with pytest.raises(FitRefusedError, match=rf"iso_size is for tables of one size, and {what} goes from"):
        fit(simulated(**sweep), law="iso_size")


def test_pooling_by_shape_leaves_each_topology_only_its_level():
    assert layout(law("shape"), ("x", "y"), "shared-shape").names == (
        *("e", "alpha", "b", "beta", "kappa", "rho0", "rho1", "a[x]", "a[y]"),
    )
    own = {
        "iso_size": {"c"},
        "width_depth_params": {"a"},
        "width_depth": {"c_w", "c_l"},
        "chinchilla": {"a"},
        "morph": {"a"},
    }
    for name, levels in own.items():
        names = layout(law(name), ("x", "y"), "shared-shape").names
        assert {n.removesuffix("[x]") for n in names if n.endswith("[x]")} == levels


def test_shared_pooling_gives_each_topology_only_its_own_size_and_shape(simulated):
    assert layout(law("shape"), ("x", "y"), "shared").names == (
        *("e", "alpha", "b", "beta", "rho1", "a[x]", "kappa[x]", "rho0[x]", "a[y]", "kappa[y]", "rho0[y]"),
    )
    assert len(layout(law("shape"), ("x", "y"), "separate").names) == 16
    assert layout(law("chinchilla"), ("x", "y"), "shared").names == ("e", "alpha", "b", "beta", "a[x]", "a[y]")


def test_huber_is_half_a_square_inside_and_a_line_outside():
    np.testing.assert_allclose(huber(np.array([0.05, -0.1, 0.3]), 0.1), [0.00125, 0.005, 0.1 * (0.3 - 0.05)])


@pytest.mark.parametrize("delta", [1.0, 3e-3, 1e-3])
@pytest.mark.parametrize("name", sorted(LAWS))
def test_engine_reaches_the_objective_of_scipy_least_squares(simulated, name, delta):
    frame = simulated(("pre_ln", "hc"), noise=0.004)
    if name in ("chinchilla", "morph"):
        frame = frame[frame.d_model / frame.n_layers < 20]
    if name == "iso_size":
        frame = frame[frame.backbone_params.between(1e7, 3e7)]
    problem = problem_of(frame, name)
    low, high = problem.ranges("bounds")
    ends = minimise(problem.residual, problem.jacobian, latin_hypercube(problem, 32, 0), low, high, delta)
    best = ends.theta[np.argmin(ends.objective)]
    # scipy minimises sum of delta^2 rho((r / delta)^2) / 2 with the same Huber; it starts near, and from the side.
    oracle = min(
        least_squares(
            lambda t: problem.residual(t[None])[0],
            np.clip(best + shift, low, high),
            jac=lambda t: problem.jacobian(t[None])[0],
            bounds=(low, high),
            loss="huber",
            f_scale=delta,
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
            max_nfev=5000,
        ).cost
        for shift in (0.0, 0.05, -0.05)
    )
    assert ends.objective.min() <= oracle * (1 + 1e-9)
    assert ends.objective.min() >= oracle * (1 - 1e-6)


@pytest.mark.parametrize("delta", [1.0, 3e-3, 1e-4])
@pytest.mark.parametrize("name", ["chinchilla", "shape", "width_depth"])
def test_starts_that_merge_on_the_way_end_as_low_as_each_by_itself(simulated, name, delta):
    problem = problem_of(simulated(("pre_ln", "hc"), noise=0.004), name)
    begin = latin_hypercube(problem, 32, 0)
    ends, used = search(problem, begin, delta)
    low, high = problem.ranges("bounds")
    alone = minimise(problem.residual, problem.jacobian, begin, low, high, delta, max_steps=2000)
    assert used == delta
    assert ends.objective.shape == (32,)
    assert ends.objective.min() <= alone.objective.min() * (1 + 1e-7)
    np.testing.assert_allclose(ends.objective, objective(problem.residual(ends.theta), delta), rtol=1e-12)


def test_engine_holds_fixed_unknowns_and_stays_in_the_box(simulated):
    problem = problem_of(simulated(("pre_ln",), noise=0.004))
    start = latin_hypercube(problem, 8, 0)
    low, high = problem.ranges("start")
    free = np.ones_like(start, dtype=bool)
    free[:, 1] = False
    ends = minimise(problem.residual, problem.jacobian, start, low, high, 1e-2, free)
    assert np.array_equal(ends.theta[:, 1], start[:, 1])
    assert np.all((ends.theta >= low) & (ends.theta <= high))
    assert np.all(ends.objective <= objective(problem.residual(start), 1e-2))


@pytest.mark.parametrize("delta", [1.0, 3e-3])
def test_row_weights_of_a_start_count_as_repeated_and_left_out_rows_do(simulated, delta):
    """Each start has its own weights; its end is that of an unweighted fit of the frame with the rows so repeated."""
    frame = simulated(("pre_ln",), noise=0.004)
    problem = problem_of(frame)
    position = read_rows(frame).position
    low, high = problem.ranges("bounds")
    start = minimise(problem.residual, problem.jacobian, latin_hypercube(problem, 8, 0), low, high, delta)
    best = start.theta[np.argmin(start.objective)]
    weights = np.random.default_rng(1).multinomial(len(frame), np.full(len(frame), 1 / len(frame)), size=3)
    ends = minimise(problem.residual, problem.jacobian, np.repeat(best[None], 3, 0), low, high, delta, weights=weights)
    for k in range(3):
        drawn = problem_of(frame.iloc[np.repeat(position, weights[k])])
        alone = minimise(drawn.residual, drawn.jacobian, best[None], low, high, delta)
        assert ends.objective[k] == pytest.approx(alone.objective[0], rel=1e-8)
        np.testing.assert_allclose(ends.theta[k], alone.theta[0], atol=2e-4)
    assert np.ptp(ends.theta[:, 1]) > 1e-3


def test_a_new_law_is_one_class(simulated, monkeypatch):
    from depthlaw.scaling.fit import fit
    from depthlaw.scaling.laws import register

    monkeypatch.setattr("depthlaw.scaling.laws.base.LAWS", dict(LAWS))

    @register
    class Floorless(Chinchilla):
        name = "floorless"
        parameters = (
            Parameter("e", (-30.0, -29.9), (-30.0, -29.9), shared=True),
            *Chinchilla.parameters[1:],
        )

    assert fit(simulated(noise=0.003), law="floorless").law == "floorless"


def test_unknown_law_or_pooling_is_an_error_that_lists_what_exists():
    with pytest.raises(LawError, match="choose one of chinchilla, iso_size, morph, shape, width_depth"):
        law("kaplan")
    with pytest.raises(LawError, match="choose one of shared, separate"):
        layout(law("shape"), ("x",), "pooled")
