"""The best learning rate of a cell against closed forms, a brute-force refit and simulated cells with a known truth."""

import math

import numpy as np
import pytest

from depthlaw.scaling.best_rate import best_rate
from depthlaw.scaling.laws import LawError

TRUE_LR, TRUE_LOSS = 0.01, 3.0


def bowl(lr, rise=0.05):
    """A parabola in ln lr: `rise` nats at a factor 2 from the best."""
    return TRUE_LOSS + rise * (math.log(lr / TRUE_LR) / math.log(2)) ** 2


@pytest.mark.parametrize("rates", [(0.004, 0.008, 0.016), (0.004, 0.009, 0.02), (0.006, 0.008, 0.0095, 0.011, 0.015)])
def test_a_parabola_is_found_exactly_whatever_its_spacing(rates):
    found = best_rate({lr: [bowl(lr)] for lr in rates})
    assert found.found == "vertex"
    assert (found.lr, found.loss) == pytest.approx((TRUE_LR, TRUE_LOSS), rel=1e-9)


def test_three_points_a_step_apart_give_the_vertex_of_the_textbook_formula():
    low, middle, high = 3.10, 3.00, 3.06
    found = best_rate({0.005: [low], 0.01: [middle], 0.02: [high]})
    step = math.log(2) * 0.5 * (low - high) / (low - 2 * middle + high)
    assert found.lr == pytest.approx(0.01 * math.exp(step), rel=1e-12)
    assert found.loss == pytest.approx(middle - (low - high) ** 2 / (8 * (low - 2 * middle + high)), rel=1e-12)
    assert np.isnan([found.ln_lr_sd, found.loss_sd]).all()  # one seed a rate and three rates: noise not known


def test_rates_beyond_a_factor_two_of_the_best_do_not_move_the_vertex():
    near = {lr: [bowl(lr)] for lr in (0.006, 0.009, 0.013, 0.018)}
    assert best_rate({**near, 0.002: [9.0], 0.1: [4.0]}) == best_rate(near | {0.002: [5.0], 0.1: [8.0]})
    assert best_rate({**near, 0.002: [9.0], 0.1: [4.0]}).lr == pytest.approx(TRUE_LR, rel=1e-9)


def test_errors_are_those_of_a_numerical_derivative_of_the_weighted_refit():
    """Brute force: each rate's mean is moved, the parabola refitted by polyfit, and the changes add in squares."""
    tried = {0.006: [3.08, 3.05], 0.008: [3.03], 0.010: [3.001, 2.99, 3.02], 0.013: [3.03, 3.04], 0.019: [3.11, 3.15]}
    found = best_rate(tried)
    x = np.log(np.array(list(tried)) / 0.010)
    seeds = np.array([len(v) for v in tried.values()])
    means = np.array([np.mean(v) for v in tried.values()])

    def vertex(y):
        c2, c1, c0 = np.polyfit(x, y, 2, w=np.sqrt(seeds))
        return np.array([-c1 / (2 * c2), c0 - c1**2 / (4 * c2)])

    noise2 = sum(np.var(v) * len(v) for v in tried.values()) / np.sum(seeds - 1)
    h = 1e-6
    moved = np.array([(vertex(means + h * e) - vertex(means - h * e)) / (2 * h) for e in np.eye(5)])
    sd = np.sqrt((moved**2 * (noise2 / seeds)[:, None]).sum(axis=0))
    assert [math.log(found.lr / 0.010), found.loss] == pytest.approx(vertex(means), rel=1e-9)
    assert [found.ln_lr_sd, found.loss_sd] == pytest.approx(sd, rel=1e-5)


def test_without_seeds_the_noise_is_that_of_the_residuals_of_more_than_three_rates():
    rates = np.array([0.006, 0.008, 0.011, 0.014])
    losses = np.array([bowl(lr) for lr in rates]) + np.array([0.004, -0.003, 0.002, -0.001])
    found = best_rate({lr: [v] for lr, v in zip(rates, losses, strict=True)})
    x = np.log(rates / 0.008)
    c, cov = np.polyfit(x, losses, 2, cov=True)  # scaled by the residuals over m - 3
    at = -c[1] / (2 * c[0])
    g = np.array([-2 * at, -1.0, 0.0]) / (2 * c[0])
    assert found.ln_lr_sd == pytest.approx(math.sqrt(g @ cov @ g), rel=1e-6)


@pytest.mark.parametrize(
    ("tried", "how"),
    [
        ({}, "none"),
        ({0.01: []}, "none"),
        ({0.01: [math.nan]}, "none"),
        ({0.01: [3.0]}, "few_rates"),
        ({0.01: [3.0], 0.02: [3.1]}, "few_rates"),
        ({0.01: [3.0], 0.02: [3.1], 0.04: [3.3]}, "edge"),
        ({0.01: [3.3], 0.02: [3.1], 0.04: [3.0]}, "edge"),
        ({0.01: [3.3], 0.02: [3.1], 0.04: []}, "bounded"),
        ({0.01: [], 0.02: [3.1], 0.04: [3.3]}, "bounded"),
        ({0.01: [3.3], 0.02: [3.1], 0.04: [math.inf]}, "bounded"),
        ({0.01: [3.1], 0.02: [3.1], 0.04: [3.1]}, "edge"),  # a tie is the smaller's
        ({0.005: [3.2], 0.01: [3.0], 0.02: [3.0], 0.04: [3.2]}, "vertex"),
    ],
)
def test_how_the_best_is_known(tried, how):
    found = best_rate(tried)
    assert found.found == how
    assert math.isnan(found.lr) == math.isnan(found.loss) == (how != "vertex")


def test_a_bowl_no_deeper_than_its_noise_is_flat_and_the_same_with_less_noise_is_not():
    def cell(noise):
        return {lr: [y - noise, y + noise] for lr, y in ((0.005, 3.01), (0.01, 3.0), (0.02, 3.01))}

    # Two seeds a rate, so each mean has variance noise^2 (sd of one 1.41 noise) and the curvature in units of the step
    # 0.01 +- noise sqrt(1.5): clear at 2 of these up to a noise of 0.00408.
    assert [best_rate(cell(noise)).found for noise in (0.003, 0.004, 0.0042, 0.02)] == [
        "vertex",
        "vertex",
        "flat",
        "flat",
    ]


def test_a_rate_of_zero_is_refused_by_its_value():
    with pytest.raises(LawError, match="a learning rate is 0; it must be positive"):
        best_rate({0: [3.0], 0.1: [3.1]})


def test_errors_hold_the_truth_as_often_as_they_say():
    """In 2000 simulated cells of 5 rates and 2 seeds: within 2.57 of them, 95 % of Student's t with 5 degrees of
    freedom. Where a rate lies beyond reach there are fewer."""
    rng, noise = np.random.default_rng(0), 0.006
    off = []
    for _ in range(2000):
        rates = TRUE_LR * 2.0 ** (rng.uniform(-0.25, 0.25) + 0.5 * np.arange(-2, 3))
        found = best_rate({lr: bowl(lr) + noise * rng.standard_normal(2) for lr in rates})
        if found.found == "vertex":
            off.append([math.log(found.lr / TRUE_LR) / found.ln_lr_sd, (found.loss - TRUE_LOSS) / found.loss_sd])
    assert len(off) > 1900
    held = np.mean(np.abs(off) < 2.571, axis=0)
    assert np.all(np.abs(held - 0.95) < 0.02), held


def simulate_cells(skew, cells=1000, noise=0.006, seed=0):
    """Root mean square errors of ln lr and of the loss, {best tried, vertex}, with rates a factor 2 apart at a random
    offset. The bowl A ((q e^-x + e^qx) / (1 + q) - 1) rises 0.01 to 0.1 nats to the left at a factor 2."""
    rng = np.random.default_rng(seed)
    errors = {"tried": [], "vertex": []}

    def shape(x):
        return (skew * np.exp(-x) + np.exp(skew * x)) / (1 + skew) - 1

    for _ in range(cells):
        rise = np.exp(rng.uniform(math.log(0.01), math.log(0.1))) / shape(-math.log(2))
        x = math.log(2) * (rng.uniform(-0.5, 0.5) + np.arange(-3, 4))
        losses = TRUE_LOSS + rise * shape(x) + noise * rng.standard_normal(7)
        found = best_rate({float(np.exp(a)): [v] for a, v in zip(x, losses, strict=True)})
        if found.found == "vertex":
            errors["tried"].append((x[losses.argmin()], losses.min() - TRUE_LOSS))
            errors["vertex"].append((math.log(found.lr), found.loss - TRUE_LOSS))
    assert len(errors["vertex"]) > 0.9 * cells
    return {k: np.sqrt(np.mean(np.square(v), axis=0)) for k, v in errors.items()}


def test_the_vertex_gives_a_better_rate_but_on_skewed_bowls_a_worse_loss_than_the_best_tried():
    """Why a law is fitted on measured losses. Skew 3: the right side rises 2.6 times as fast at a factor 2."""
    even, skewed = simulate_cells(1.0), simulate_cells(3.0)
    for errors in (even, skewed):
        assert errors["vertex"][0] < 0.75 * errors["tried"][0]
    assert even["vertex"][1] < even["tried"][1]
    assert skewed["vertex"][1] > 1.2 * skewed["tried"][1]
