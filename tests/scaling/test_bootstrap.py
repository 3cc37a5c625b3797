"""Bootstrap draws against closed forms, against refits one by one, and intervals against known truths."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize
from scipy.special import stdtrit

from depthlaw.scaling.assess import assess
from depthlaw.scaling.bootstrap import bootstrap, clusters, problem_of, weight_variance, weights
from depthlaw.scaling.fit import LawError, fit
from depthlaw.scaling.law_file import law_from_dict, load_law
from depthlaw.scaling.laws import LAWS, Law, Parameter
from depthlaw.scaling.lm import minimise, objective
from depthlaw.scaling.rows import read_rows
from support import line_frame

POINT = ("hc", [3e6, 5e7], [6e7, 2e9], [6, 12], [192, 512])


class Line(Law):
    """ln loss = c + s n: linear in its unknowns, so that least squares has closed forms."""

    name = "line"
    parameters = (
        Parameter("c", (-1.0, 1.0), (-50.0, 50.0), shared=True),
        Parameter("s", (-1.0, 1.0), (-50.0, 50.0), shared=True),
    )

    def log_loss(self, p, x):
        return p[0] + p[1] * x.n

    def jacobian(self, p, x):
        return np.stack(np.broadcast_arrays(np.ones_like(p[0] + x.n), x.n + 0.0 * p[0]), -1)


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setitem(LAWS, "line", Line())


def drawn(frame, draws=1000, law="shape", seed=0, **options):
    rows = read_rows(frame)
    return bootstrap(fit(frame, law, **options), rows, clusters(rows), draws, seed)


def test_each_draw_of_a_linear_law_is_weighted_least_squares(line):
    frame = line_frame()
    got, rows = drawn(frame, 50, "line", delta=10.0), read_rows(frame)
    x = np.stack([np.ones(12), np.log(rows.N / got.N0)], -1)
    for w, theta in zip(weights(np.arange(12), 50, 2, 0), got.draws, strict=True):
        want = np.linalg.solve(x.T @ (w[:, None] * x), x.T @ (w * np.log(rows.loss)))
        assert theta == pytest.approx(want, abs=1e-6)


def test_spread_of_the_draws_is_the_sandwich_covariance_in_closed_form(line):
    frame = line_frame(runs=100)
    got, rows = drawn(frame, 2000, "line", delta=10.0), read_rows(frame)
    x = np.stack([np.ones(100), np.log(rows.N / got.N0)], -1)
    bread, r = np.linalg.inv(x.T @ x), np.array(got.residuals)
    want = bread @ (x.T * r**2 @ x) @ bread * 100 / 98
    assert np.sqrt(np.diag(np.cov(got.draws.T))) == pytest.approx(np.sqrt(np.diag(want)), rel=0.05)


def test_draws_of_repeated_rows_spread_as_their_runs_do_and_too_little_if_rows_were_runs(line):
    single = line_frame(runs=40)
    repeated = line_frame(runs=40, rows_a_run=4)
    alone = drawn(single, 1000, "line", delta=10.0).draws.std(0)
    by_run = drawn(repeated, 1000, "line", delta=10.0).draws.std(0)
    by_row = drawn({k: v for k, v in repeated.items() if k != "run"}, 1000, "line", delta=10.0).draws.std(0)
    assert by_run == pytest.approx(alone, rel=0.1)
    assert by_row == pytest.approx(alone / 2.0, rel=0.1)


def test_weights_have_mean_1_and_the_small_sample_variance_and_are_equal_within_a_run():
    run = np.repeat(np.arange(20), 3)
    w = weights(run, 20000, 14, 0)
    assert np.array_equal(w[:, ::3], w[:, 2::3])
    assert w.mean() == pytest.approx(1.0, abs=0.01)
    assert weight_variance(run, 14) == pytest.approx(20 / 19 * 59 / 46)
    assert w.var() == pytest.approx(20 / 19 * 59 / 46, rel=0.02)


def test_runs_are_told_apart_by_topology_and_name_and_do_not_hang_on_the_order_of_the_frame(simulated):
    frame = simulated(("pre_ln", "hc"), sizes=(1e6,), noise=0.01)
    named = frame.assign(run=[f"{r.n_layers}x{r.d_model}" for r in frame.itertuples()])
    assert clusters(read_rows(named)).max() + 1 == 2 * named["run"].nunique()
    shuffled = named.sample(frac=1.0, random_state=3)
    assert np.array_equal(clusters(read_rows(named)), clusters(read_rows(shuffled)))
    assert np.array_equal(clusters(read_rows(frame)), np.arange(len(frame)))


@pytest.mark.filterwarnings("ignore:invalid value")  # where scipy's line search leaves the finite
def test_draws_reach_the_minimum_that_refits_one_by_one_reach(simulated):
    frame = simulated(("pre_ln",), noise=0.005)
    got, rows = drawn(frame, 12), read_rows(frame)
    problem = problem_of(got, rows)
    low, high = problem.ranges("bounds")
    for w, theta in zip(weights(np.arange(rows.N.size), 12, len(got.names), 0), got.draws, strict=True):

        def value(t, w=w):
            return 1e4 * objective(problem.residual(t[None]), got.delta, w)[0]

        starts = (np.array(got.theta), theta)
        plain = min(
            optimize.minimize(value, s, method="L-BFGS-B", bounds=list(zip(low, high, strict=True))).fun for s in starts
        )
        assert value(theta) <= plain * (1 + 2e-5)


def test_draws_that_run_out_of_steps_go_on_from_where_others_ended(simulated, monkeypatch):
    frame = simulated(("pre_ln",), noise=0.005)
    fitted, rows = fit(frame, starts=8), read_rows(frame)
    problem, run = problem_of(fitted, rows), clusters(rows)
    w, (low, high) = weights(run, 60, len(fitted.names), 0), problem.ranges("bounds")
    # The fewest steps after which some refits have ended and others have not.
    start = np.repeat(np.array([fitted.theta]), 60, 0)
    for steps in range(4, 40):
        once = minimise(
            problem.residual, problem.jacobian, start, low, high, fitted.delta, weights=w, max_steps=steps, tol=1e-6
        )
        if 0.2 < np.mean(once.converged) < 0.9:
            break
    monkeypatch.setattr("depthlaw.scaling.bootstrap.MAX_STEPS", steps)
    got = bootstrap(fitted, rows, run, 60).draws
    cost = objective(problem.residual(got), fitted.delta, w)
    stuck = ~once.converged
    assert np.all(cost <= once.objective * (1 + 1e-12))
    assert np.any(cost[stuck] < once.objective[stuck])
    assert np.array_equal(got[~stuck], once.theta[~stuck])


def test_draws_repeat_with_their_seed_and_only_with_it(simulated):
    frame = simulated(("pre_ln",), noise=0.005)
    first, again, other = drawn(frame, 20), drawn(frame.sample(frac=1.0, random_state=1), 20), drawn(frame, 20, seed=1)
    assert np.array_equal(first.draws, again.draws)
    assert not np.array_equal(first.draws, other.draws)


def test_a_law_with_draws_is_the_same_from_its_file(simulated, tmp_path):
    frame = simulated(("pre_ln", "hc"), sizes=(1e6, 4e6, 16e6), noise=0.005)
    law = assess(fit(frame, starts=16), frame, 30)
    law.save(tmp_path / "law.json")
    back = load_law(tmp_path / "law.json")
    assert back == law
    assert np.array_equal(back.draws, law.draws)
    assert back.draws.shape == (30, len(law.names))
    assert all(np.array_equal(a, b) for a, b in zip(back.interval(*POINT), law.interval(*POINT), strict=True))
    without = fit(frame, starts=16)
    assert without.draws is None
    assert not {"draws_base64", "profiles", "held_out", "choice"} & set(without.to_dict())
    assert law_from_dict(json.loads(json.dumps(without.to_dict()))) == without


def test_draws_that_are_no_numbers_of_the_law_are_refused(simulated):
    data = drawn(simulated(("pre_ln",), noise=0.005), 5, starts=4).to_dict()
    with pytest.raises(LawError, match="draws"):
        law_from_dict({**data, "draws_base64": data["draws_base64"][:40]})


def test_losses_under_each_draw_are_those_of_a_law_with_its_parameters(simulated):
    from dataclasses import replace

    law = drawn(simulated(noise=0.005), 7, starts=8)
    rng = np.random.default_rng(0)
    N = np.exp(rng.uniform(13, 20, 2500))
    at = ("full_attnres", N, 20 * N, rng.integers(2, 100, 2500), rng.integers(32, 4096, 2500))
    got = law.log_loss_draws(*at)
    assert got.shape == (7, 2500)
    for b in range(7):
        assert got[b] == pytest.approx(replace(law, theta=tuple(law.draws[b])).log_loss(*at), abs=3e-6)
        one = replace(law, theta=tuple(law.draws[b])).best_ratio("hc", 1e8)
        assert law.best_ratio_draws("hc", 1e8)[b] == pytest.approx(float(one), rel=1e-12)
    assert law.log_loss_draws("hc", 1e7, 2e8, 8, 320).shape == (7, 1)


def test_interval_is_the_quantiles_of_draws_and_scatter_widened_about_their_middle(simulated):
    from dataclasses import replace

    frame = simulated(noise=0.005)
    law = replace(drawn(frame, 1000, starts=16), inflation=1.7)
    rng, N = np.random.default_rng(5), 5e8
    at = ("hc", N, 20 * N, 12, 1860)
    m, K = len(law.residuals), len(law.names)
    noise = rng.choice(law.residuals, 400_000) * np.sqrt(m / (m - K))
    brute = np.quantile(rng.choice(law.log_loss_draws(*at)[:, 0], 400_000) + noise, (0.025, 0.975))
    low, high = (np.log(v)[0] for v in law.interval(*at, inflated=False))
    assert (low, high) == pytest.approx(brute, abs=0.1 * (brute[1] - brute[0]) / 2)
    wide = [np.log(v)[0] for v in law.interval(*at)]
    assert wide[1] - wide[0] == pytest.approx(1.7 * stdtrit(m - K, 0.975) / 1.959964 * (high - low), rel=1e-4)
    assert np.mean(wide) == pytest.approx(np.mean((low, high)), rel=1e-9)
    half = law.interval(*at, level=0.5, inflated=False)
    assert np.exp(low) < half[0][0] < half[1][0] < np.exp(high)


def test_interval_without_draws_is_the_linearised_one(noisy_law):
    low, high = noisy_law.interval(*POINT)
    sd = np.hypot(noisy_law.log_sd(*POINT), noisy_law.log_rms)
    t = stdtrit(len(noisy_law.residuals) - len(noisy_law.names), 0.975)
    assert np.log(high) == pytest.approx(noisy_law.log_loss(*POINT) + t * sd, abs=1e-6)
    assert np.log(low) == pytest.approx(noisy_law.log_loss(*POINT) - t * sd, abs=1e-6)


def test_intervals_hold_the_truth_about_as_often_as_they_say(simulated, truth):
    """Six sweeps of 108 runs, at 8x their largest size: see benchmarks/coverage.csv for hundreds."""
    new_run, of_parameters, widths = [], [], []
    for seed in range(6):
        frame = simulated(sizes=(1e6, 4e6, 16e6), ratios=(8, 16, 32, 64), noise=0.006, seed=seed)
        law = drawn(frame, 300, starts=16)
        for t in ("pre_ln", "hc", "full_attnres"):
            at = (1.28e8, 2.56e9, 20, 730)
            true = np.log(truth(t, *at))
            fresh = true + 0.006 * np.random.default_rng(seed).standard_normal(2000)
            low, high = (np.log(v)[0] for v in law.interval(t, *at, inflated=False))
            new_run.append(np.mean((low <= fresh) & (fresh <= high)))
            ends = np.quantile(law.log_loss_draws(t, *at), (0.025, 0.975))
            of_parameters.append(ends[0] <= true <= ends[1])
            widths.append(high - low)
    assert 0.85 < np.mean(new_run) < 0.995
    assert np.mean(of_parameters) > 0.75
    # Not by being wide: noise alone makes 3.9 x 0.006.
    assert 0.022 < np.mean(widths) < 0.06


def test_what_cannot_be_drawn_is_refused_in_one_line(simulated, noisy_law):
    frame = simulated(("pre_ln",), noise=0.005)
    law, rows = fit(frame, starts=4), read_rows(frame)
    with pytest.raises(LawError, match="draws is 1; a bootstrap takes at least 2"):
        bootstrap(law, rows, np.arange(72), 1)
    with pytest.raises(LawError, match="all rows come from one run"):
        bootstrap(law, rows, np.zeros(72, dtype=int))
    with pytest.raises(LawError, match="other rows than the law was fitted on"):
        assess(law, frame.iloc[1:])
    with pytest.raises(LawError, match="carries no bootstrap draws"):
        noisy_law.log_loss_draws(*POINT)
    with pytest.raises(LawError, match="level is 95; it must be between 0 and 1"):
        noisy_law.interval(*POINT, level=95)


def test_an_interval_of_draws_that_overflow_is_a_number_and_says_that_it_knows_nothing(noisy_law, recwarn):
    theta = np.tile(noisy_law.theta, (50, 1))
    theta[:5, list(noisy_law.names).index("kappa[hc]")] = 80.0  # in logarithms
    law = replace(noisy_law, draws_base64=base64.b64encode(theta.astype("<f8").tobytes()).decode())
    low, high = law.interval("hc", 8e6, 1.6e8, 400, 64)
    assert np.isfinite([low, high]).all()
    assert high > 1e6
    assert not [w for w in recwarn if "subtract" in str(w.message)]
