"""Laws, their Jacobians and the engine that fits them."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from depthlaw.scaling.fit import _latin_hypercube, make_problem
from depthlaw.scaling.laws import LAWS, Centre, Chinchilla, LawError, Parameter, features, law
from depthlaw.scaling.lm import huber, minimise, objective
from depthlaw.scaling.pooling import layout
from depthlaw.scaling.rows import read_rows

CENTRE = Centre(8e6, 1.6e8, 6.0, 256.0)


def problem_of(frame, name="shape", pooling="shared"):
    rows, chosen = read_rows(frame), law(name)
    return make_problem(rows, chosen, layout(chosen, rows.topologies, pooling), CENTRE)


@pytest.mark.parametrize("name", sorted(LAWS))
@pytest.mark.parametrize("pooling", ["shared", "separate"])
def test_jacobian_equals_complex_step_at_random_parameters(simulated, name, pooling):
    problem = problem_of(simulated(noise=0.01), name, pooling)
    theta = _latin_hypercube(problem, 7, seed=3)
    analytic = problem.jacobian(theta)
    step = 1e-30
    for k in range(theta.shape[1]):
        moved = theta.astype(complex)
        moved[:, k] += 1j * step
        np.testing.assert_allclose(analytic[:, :, k], problem.residual(moved).imag / step, rtol=1e-10, atol=1e-14)


def test_shape_law_is_the_sum_of_three_terms_written_out(simulated, truth):
    frame = simulated(("hc",))
    N, D, L, d = (frame[c].to_numpy(float) for c in ("backbone_params", "tokens", "n_layers", "d_model"))
    p = np.array([np.log(1.8), np.log(0.72), 0.30, np.log(0.75), 0.35, 0.07, 2.5, 0.15])[:, None]
    got = np.exp(law("shape").log_loss(p, features(N, D, L, d, CENTRE)))
    np.testing.assert_allclose(got, truth("hc", N, D, L, d), rtol=1e-13)


def test_shared_pooling_gives_each_topology_only_its_own_size_and_shape(simulated):
    assert layout(law("shape"), ("x", "y"), "shared").names == (
        *("e", "alpha", "b", "beta", "rho1", "a[x]", "kappa[x]", "rho0[x]", "a[y]", "kappa[y]", "rho0[y]"),
    )
    assert len(layout(law("shape"), ("x", "y"), "separate").names) == 16
    assert layout(law("chinchilla"), ("x", "y"), "shared").names == ("e", "alpha", "b", "beta", "a[x]", "a[y]")


def test_huber_is_half_a_square_inside_and_a_line_outside():
    np.testing.assert_allclose(huber(np.array([0.05, -0.1, 0.3]), 0.1), [0.00125, 0.005, 0.1 * (0.3 - 0.05)])


@pytest.mark.parametrize("delta", [1.0, 3e-3, 1e-3])
@pytest.mark.parametrize("name", ["chinchilla", "shape"])
def test_engine_reaches_the_objective_of_scipy_least_squares(simulated, name, delta):
    frame = simulated(("pre_ln", "hc"), noise=0.004)
    if name == "chinchilla":
        frame = frame[frame.d_model / frame.n_layers < 20]
    problem = problem_of(frame, name)
    low, high = problem.ranges("bounds")
    ends = minimise(problem.residual, problem.jacobian, _latin_hypercube(problem, 32, 0), low, high, delta)
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


def test_engine_holds_fixed_unknowns_and_stays_in_the_box(simulated):
    problem = problem_of(simulated(("pre_ln",), noise=0.004))
    start = _latin_hypercube(problem, 8, 0)
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
    start = minimise(problem.residual, problem.jacobian, _latin_hypercube(problem, 8, 0), low, high, delta)
    best = start.theta[np.argmin(start.objective)]
    weights = np.random.default_rng(1).multinomial(len(frame), np.full(len(frame), 1 / len(frame)), size=3)
    ends = minimise(problem.residual, problem.jacobian, np.repeat(best[None], 3, 0), low, high, delta, weights=weights)
    for k in range(3):
        drawn = problem_of(frame.iloc[np.repeat(position, weights[k])])
        # The start ranges depend on the mean of the rows, the coordinates do not.
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
