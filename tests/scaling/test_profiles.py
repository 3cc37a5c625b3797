"""Profile likelihood intervals against closed forms and constrained minima found by scipy."""

import numpy as np
import pytest
from scipy import optimize, stats

from depthlaw.scaling.bootstrap import clusters, problem_of
from depthlaw.scaling.fit import fit
from depthlaw.scaling.identify import spread
from depthlaw.scaling.laws import LAWS, Law, Parameter
from depthlaw.scaling.lm import objective
from depthlaw.scaling.profiles import intervals
from depthlaw.scaling.rows import read_rows
from support import line_frame


class Slope(Law):
    """ln loss = c - alpha n, alpha > 0: the profile of alpha is exactly a parabola."""

    name = "slope"
    parameters = (
        Parameter("c", (-1.0, 1.0), (-50.0, 50.0), shared=True),
        Parameter("alpha", (0.1, 1.0), (1e-4, 5.0), shared=True, positive=True),
    )

    def log_loss(self, p, x):
        return p[0] - p[1] * x.n

    def jacobian(self, p, x):
        return np.stack(np.broadcast_arrays(np.ones_like(p[0] + x.n), -x.n + 0.0 * p[0]), -1)


def profiled(frame, law="shape", **options):
    fitted, rows = fit(frame, law, **options), read_rows(frame)
    return fitted, intervals(problem_of(fitted, rows), fitted, clusters(rows))


def test_interval_of_a_linear_slope_is_that_of_students_t(monkeypatch):
    monkeypatch.setitem(LAWS, "slope", Slope())
    frame = line_frame(9, seed=2)
    _, found = profiled(frame, "slope", delta=10.0)
    line = stats.linregress(np.log(frame["backbone_params"]), np.log(frame["val_loss"]))
    half = stats.t.ppf(0.975, 7) * line.stderr
    low, high = found["alpha"]
    assert (low, high) == pytest.approx((-line.slope - half, -line.slope + half), abs=0.01 * half)


def test_rows_of_one_run_do_not_count_as_many_runs(monkeypatch):
    monkeypatch.setitem(LAWS, "slope", Slope())
    width = {}
    repeated = line_frame(40, 5, seed=2)
    by_row = {k: v for k, v in repeated.items() if k != "run"}
    for name, frame in (("alone", line_frame(40, seed=2)), ("by run", repeated), ("by row", by_row)):
        _, found = profiled(frame, "slope", delta=10.0)
        width[name] = found["alpha"][1] - found["alpha"][0]
    # The robust standard error is not the usual one, so close and not equal.
    assert width["by run"] == pytest.approx(width["alone"], rel=0.25)
    assert width["by row"] == pytest.approx(width["alone"] / np.sqrt(5), rel=0.05)


@pytest.mark.parametrize("law", ["shape", "width_depth"])
def test_ends_are_where_the_constrained_minimum_of_scipy_has_risen_to_the_quantile(simulated, law):
    frame = simulated(("pre_ln",), noise=0.004)
    fitted, found = profiled(frame, law)
    problem, theta = problem_of(fitted, read_rows(frame)), np.array(fitted.theta)
    K, m = theta.size, len(fitted.residuals)
    scale2, _ = spread(np.array(fitted.residuals), fitted.delta, K)
    n = np.array([np.log(fitted.ranges[""]["N"][1] / fitted.N0)])

    def ln_ratio(t):
        return float(problem.law.best_ln_ratio(problem.layout.natural(t[None], 0), n, fitted.centre)[0, 0])

    beta = fitted.names.index("beta")
    for name, value in (("best d/L[pre_ln]", ln_ratio), ("beta", lambda t: float(t[beta]))):
        assert found[name][0] < np.exp(value(theta)) < found[name][1]
        for end in found[name]:
            goal = np.log(end)
            plain = optimize.minimize(
                lambda t: 1e4 * objective(problem.residual(t[None]), fitted.delta)[0],
                theta,
                method="SLSQP",
                constraints={"type": "eq", "fun": lambda t, v=value, g=goal: v(t) - g},
                options={"ftol": 1e-10, "maxiter": 500},
            )
            rise = 2.0 * (plain.fun / 1e4 - fitted.objective) / scale2
            assert np.sqrt(rise) == pytest.approx(stats.t.ppf(0.975, m - K), rel=0.03)


def test_what_the_data_do_not_bound_has_no_end(simulated):
    _, found = profiled(simulated(("pre_ln",), ratios=(16,), noise=0.003), starts=16)
    assert found["best d/L[pre_ln]"] == (0.0, np.inf)
    _, found = profiled(simulated(("pre_ln",), ratios=(4, 6, 8), noise=0.003), starts=16)
    low, high = found["best d/L[pre_ln]"]
    assert low > 8
    assert high > 40


def test_every_topology_and_exponent_has_its_interval(simulated):
    frame = simulated(("pre_ln", "hc"), noise=0.004)
    fitted, found = profiled(frame, pooling="separate", starts=16)
    assert {*found} == {f"{q}[{t}]" for q in ("alpha", "beta", "best d/L") for t in ("pre_ln", "hc")}
    for t in ("pre_ln", "hc"):
        low, high = found[f"alpha[{t}]"]
        assert low < fitted.parameters(t)["alpha"] < high
        assert 0.97 * low < 0.30 < 1.03 * high
    _, found = profiled(frame, "chinchilla", starts=16)
    assert {*found} == {"alpha", "beta"}
