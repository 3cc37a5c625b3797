"""How fast a law is fitted and resampled, beside the usual recipe from scipy and the package `chinchilla`.

    OMP_NUM_THREADS=1 python -m benchmarks.fits [--only fit bootstrap start chinchilla] [--turns 5] [--share 1.0]

What is timed, and why it is fair:

* The usual recipe is that of Hoffmann et al. 2022 (approach 3) and its replications: raw coefficients (e, a, b, alpha,
  beta) of ln N and ln D, Huber with delta 1e-3 on ln loss, scipy's L-BFGS-B with its default options from the grid of
  4500 starts (alpha, beta of 0 to 2, e of -1 to 1, a, b of 0 to 25). Objective and gradient are one numpy function, in
  closed form: a gradient by finite differences, as often used, would take six times as many calls.
* fit: 240 simulated runs with 1 % noise; the recipe's 4500 starts against a whole `fit` of 64 starts, with what it says
  of its own certainty.
* bootstrap: the same rows resampled 4000 times; the recipe refits each with scipy's BFGS from the best fit, we all with
  one call of the engine with row weights. Both see the same draws.
* start: law width_depth_params (9 parameters) on the 770 rows of Gemstones, delta 1e-4; scipy's L-BFGS-B against the
  engine's 128, time a start, same objective, coordinates, bounds and starts. The engine goes straight to that delta.
* chinchilla: the package (extra `peers`) on the rows of `fit`, its own fit (BFGS by finite differences in long double)
  from 32 starts, time a start. Its figure is left undrawn. Skipped with a line where it is not installed.

The two sides take turns; each turn of the recipe does its part of the starts or draws, and each of ours does all. Times
are processor time of one thread: for the recipe the sum of its parts, divided by --share (below 1 only that share of
starts or draws is run and the time is an extrapolation, which is printed); for ours the median. "Objective" is ours /
theirs - 1 at the best start, and for the bootstrap the largest over the draws.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import minimize

from depthlaw.scaling.fit import _latin_hypercube, fit, make_problem
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import Centre, law
from depthlaw.scaling.lm import huber, minimise
from depthlaw.scaling.lm import objective as total
from depthlaw.scaling.pooling import Problem, layout
from depthlaw.scaling.rows import read_rows

DELTA, DRAWS = 1e-3, 4000
GRID = (np.linspace(-1, 1, 5), np.linspace(0, 25, 6), np.linspace(0, 25, 6), np.linspace(0, 2, 5), np.linspace(0, 2, 5))
GEMSTONES = Path(__file__).parents[1] / "tests/scaling/tables/gemstones/losses_hot_100b.csv"
COLUMNS = {"topology": "@pre_ln", "d_model": "width", "n_layers": "depth", "val_loss": "loss", "params": "params_total"}
Part = Callable[[Any], Any]


def rows_240() -> dict[str, Any]:
    """240 runs of the law that Hoffmann et al. fitted, log-uniform in N and D/N, with 1 % noise."""
    rng = np.random.default_rng(0)
    N = np.exp(rng.uniform(np.log(5e7), np.log(1.6e10), 240))
    D = N * np.exp(rng.uniform(np.log(2), np.log(200), 240))
    loss = (1.69 + 406.4 / N**0.34 + 410.7 / D**0.28) * np.exp(0.01 * rng.standard_normal(240))
    shape = {"topology": ["pre_ln"] * 240, "n_layers": np.full(240, 8), "d_model": np.sqrt(N / 96)}
    return {**shape, "backbone_params": N, "tokens": D, "val_loss": loss}


def recipe(N: Any, D: Any, loss: Any) -> Callable[[Any], tuple[float, Any]]:
    """x = (e, a, b, alpha, beta) -> (sum of Huber of ln loss, gradient), on raw coefficients."""
    n, y, observed = np.log(N), np.log(D), np.log(loss)

    def value(x: Any) -> tuple[float, Any]:
        e, a, b, alpha, beta = x
        terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * y])
        top = terms.max(0)
        parts = np.exp(terms - top)
        sums = parts.sum(0)
        r = top + np.log(sums) - observed
        psi = np.clip(r, -DELTA, DELTA)
        floor, size, tokens = parts * (psi / sums)
        gradient = [floor.sum(), size.sum(), tokens.sum(), -(size * n).sum(), -(tokens * y).sum()]
        return float(huber(r, DELTA).sum()), np.array(gradient)

    return value


def take_turns(theirs: Part, parts: Sequence[Any], ours: Callable[[], Any]) -> tuple[float, list[Any], float, Any]:
    """(their seconds in all, their results, our median seconds, our last result), one part of theirs a turn."""
    spent, results, own, last = 0.0, [], [], None
    for part in parts:
        begin = time.process_time()
        results.append(theirs(part))
        middle = time.process_time()
        last = ours()
        own.append(time.process_time() - middle)
        spent += middle - begin
    return spent, results, median(own), last


def bench_fit(turns: int, share: float) -> str:
    frame = rows_240()
    value = recipe(frame["backbone_params"], frame["tokens"], frame["val_loss"])
    starts = np.array(list(itertools.product(*GRID)))
    some = np.random.default_rng(1).permutation(starts)[: round(share * len(starts))]

    def theirs(part: Any) -> float:
        return min(minimize(value, x, jac=True, method="L-BFGS-B").fun for x in part)

    def ours() -> FittedLaw:
        return fit(frame, law="chinchilla", delta=DELTA, starts=64)

    spent, best, own, law_ = take_turns(theirs, np.array_split(some, turns), ours)
    return line("fit, 5 parameters, 240 rows", spent / share, own, law_.objective / min(best) - 1, 50, share)


def bench_bootstrap(turns: int, share: float) -> str:
    frame = rows_240()
    N, D, loss = (np.asarray(frame[c]) for c in ("backbone_params", "tokens", "val_loss"))
    fitted = fit(frame, law="chinchilla", delta=DELTA)
    problem, _ = problem_of(frame, "chinchilla", {})
    p = fitted.parameters("pre_ln")
    n0, y0 = np.log(fitted.N0), np.log(fitted.D0)
    x0 = np.array([p["e"], p["a"] + p["alpha"] * n0, p["b"] + p["beta"] * y0, p["alpha"], p["beta"]])
    drawn = np.random.default_rng(2).integers(0, 240, (DRAWS, 240))
    position = read_rows(frame).position
    weights = np.stack([np.bincount(rows, minlength=240) for rows in drawn])[:, position].astype(float)
    low, high = problem.ranges("bounds")

    def theirs(part: Any) -> list[float]:
        return [minimize(recipe(N[rows], D[rows], loss[rows]), x0, jac=True, method="BFGS").fun for rows in part]

    def ours() -> Any:
        start = np.repeat(np.array([fitted.theta]), DRAWS, 0)
        ends = minimise(problem.residual, problem.jacobian, start, low, high, DELTA, weights=weights)
        return ends.objective

    some = drawn[: round(share * DRAWS)]
    spent, costs, own, mine = take_turns(theirs, np.array_split(some, turns), ours)
    off = mine[: len(some)] / np.concatenate(costs) - 1
    words = line(f"bootstrap, {DRAWS} draws", spent / share, own, float(off.max()), 15, share)
    return f"{words}\n  draws where we are lower by over 1e-6: {np.mean(off < -1e-6):.0%}"


def bench_start(turns: int, share: float) -> str:
    import pandas as pd

    problem, low_high = problem_of(pd.read_csv(GEMSTONES), "width_depth_params", COLUMNS)
    low, high = low_high
    starts = _latin_hypercube(problem, 128, 0)
    delta = 1e-4

    def value(theta: Any) -> tuple[float, Any]:
        r, J = problem.residual(theta[None])[0], problem.jacobian(theta[None])[0]
        return float(huber(r, delta).sum()), np.clip(r, -delta, delta) @ J

    def theirs(part: Any) -> list[Any]:
        box = list(zip(low, high, strict=True))
        return [minimize(value, x, jac=True, method="L-BFGS-B", bounds=box) for x in part]

    def ours() -> Any:
        theta = starts
        for step in (1e-2, 1e-3, delta):  # as `fit` does
            ends = minimise(problem.residual, problem.jacobian, theta, low, high, step)
            theta = ends.theta
        return ends

    some = starts[: max(turns, round(share * len(starts)))]
    spent, found, own, ends = take_turns(theirs, np.array_split(some, turns), ours)
    costs = np.array([one.fun for part in found for one in part])
    best, mine = costs.min(), ends.objective
    words = line("a start, 9 parameters, 770 rows", spent / len(some), own / 128, mine.min() / best - 1, 20, 1.0)
    goal = min(best, mine.min()) * 1.001
    return (
        f"{words}\n  starts within 0.1 % of the best: theirs {np.mean(costs <= goal):.0%} of {len(some)}, "
        f"ours {np.mean(mine <= goal):.0%} of 128"
    )


def bench_chinchilla(turns: int, share: float) -> str:
    try:
        from chinchilla import Chinchilla
    except ImportError as error:
        return f"chinchilla: skipped ({error}); `make bench-peers` installs it"
    frame = rows_240()
    grid = {
        "E": [1.2, 2.0],
        "a": [3.0, 8.0],
        "b": [3.0, 8.0],
        "alpha": [0.2, 0.5],
        "beta": [0.2, 0.5],
    }

    def loss_fn(true: Any, predicted: Any) -> Any:
        return huber(np.log(true) - np.log(predicted), DELTA)

    def theirs(_: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            one = Chinchilla(project_dir=folder, param_grid=grid, loss_fn=loss_fn, log_level=50)
            for N, D, loss in zip(frame["backbone_params"], frame["tokens"], frame["val_loss"], strict=True):
                one.append(N=N, D=D, loss=loss)
            one.visualizer.optim = lambda *_, **__: None
            begin = time.process_time()
            one.fit(parallel=False)
            return one, time.process_time() - begin

    def ours() -> FittedLaw:
        return fit(frame, law="chinchilla", delta=DELTA, starts=64)

    _, found, own, law_ = take_turns(theirs, range(min(turns, 2)), ours)
    one = found[-1][0]
    r = np.log(frame["val_loss"]) - np.log(one.predict_loss(frame["backbone_params"], frame["tokens"]).astype(float))
    a_start = median(seconds for _, seconds in found) / 32
    off = law_.objective / float(total(r, DELTA)) - 1
    return line("a start, the package chinchilla", a_start, own / 64, off, None, 1.0)


def problem_of(frame: Any, name: str, columns: dict[str, str]) -> tuple[Problem, tuple[Any, Any]]:
    rows, chosen = read_rows(frame, columns), law(name)
    centre = Centre(*(float(np.exp(np.log(v).mean())) for v in (rows.N, rows.D, rows.L, rows.d)))
    problem = make_problem(rows, chosen, layout(chosen, rows.topologies, "shared"), centre)
    return problem, problem.ranges("bounds")


def line(what: str, theirs: float, ours: float, off: float, goal: float | None, share: float) -> str:
    ratio = theirs / ours
    verdict = "" if goal is None else f" (bar {goal}x {'met' if ratio >= goal else 'missed'})"
    part = "" if share == 1.0 else f"; theirs extrapolated from {share:.0%}"
    return f"{what}: theirs {theirs:.4g} s, ours {ours:.4g} s, {ratio:.1f}x{verdict}; objective {off:+.1e}{part}"


BENCHES = {"fit": bench_fit, "bootstrap": bench_bootstrap, "start": bench_start, "chinchilla": bench_chinchilla}


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of fits beside the usual recipe.")
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="share of the recipe's starts and draws to run")
    options = parser.parse_args()
    for name in options.only:
        print(BENCHES[name](options.turns, options.share), flush=True)


if __name__ == "__main__":
    main()
