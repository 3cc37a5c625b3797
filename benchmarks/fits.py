"""How fast a law is fitted and resampled, beside the usual recipe from scipy and the package `chinchilla`.

    OMP_NUM_THREADS=1 python -m benchmarks.fits [--only fit bootstrap start chinchilla] [--turns 5] [--share 1.0]

What is timed, and why it is fair:

* The usual recipe is that of Hoffmann et al. 2022 (approach 3) and its replications: raw coefficients (e, a, b, alpha,
  beta) of ln N and ln D, Huber with delta 1e-3 on ln loss, scipy's L-BFGS-B with its default options from the grid of
  4500 starts (alpha, beta of 0 to 2, e of -1 to 1, a, b of 0 to 25). It is run twice: with scipy's own gradient by
  finite differences, as it is usually written, which the bars are for; and with the gradient in closed form, in the
  same numpy function as the objective, which is the fastest that scipy's optimisers can be. With their default
  tolerances most of scipy's starts stop short of the minimum: how many reach it is printed for `start`.
* fit: 240 simulated runs with 1 % noise; the recipe's 4500 starts against a whole `fit` of 64 starts, with what it says
  of its own certainty.
* bootstrap: the same rows resampled 4000 times; the recipe refits each with scipy's BFGS from the best fit, we all with
  one call of the engine with row weights. Both see the same draws.
* start: law width_depth_params (9 parameters) on the 770 rows of Gemstones, delta 1e-4; scipy's L-BFGS-B against the
  engine's 128, time a start, same objective, coordinates, bounds and starts.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import minimize

from depthlaw.scaling.fit import fit, make_problem
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import Centre, law
from depthlaw.scaling.lm import huber, minimise
from depthlaw.scaling.lm import objective as total
from depthlaw.scaling.pooling import Problem, layout
from depthlaw.scaling.rows import read_rows
from depthlaw.scaling.search import latin_hypercube, search

DELTA, DRAWS = 1e-3, 4000
GRID = (np.linspace(-1, 1, 5), np.linspace(0, 25, 6), np.linspace(0, 25, 6), np.linspace(0, 2, 5), np.linspace(0, 2, 5))
GEMSTONES = Path(__file__).parents[1] / "tests/scaling/tables/gemstones/losses_hot_100b.csv"
COLUMNS = {"topology": "@pre_ln", "d_model": "width", "n_layers": "depth", "val_loss": "loss", "params": "params_total"}
GRADIENT = {False: "scipy with finite differences", True: "scipy with the gradient in closed form"}
Part = Callable[[Any], Any]


def rows_240() -> dict[str, Any]:
    """240 runs of the law that Hoffmann et al. fitted, log-uniform in N and D/N, with 1 % noise."""
    rng = np.random.default_rng(0)
    N = np.exp(rng.uniform(np.log(5e7), np.log(1.6e10), 240))
    D = N * np.exp(rng.uniform(np.log(2), np.log(200), 240))
    loss = (1.69 + 406.4 / N**0.34 + 410.7 / D**0.28) * np.exp(0.01 * rng.standard_normal(240))
    shape = {"topology": ["pre_ln"] * 240, "n_layers": np.full(240, 8), "d_model": np.sqrt(N / 96)}
    return {**shape, "backbone_params": N, "tokens": D, "val_loss": loss}


def recipe(N: Any, D: Any, loss: Any, closed: bool) -> Callable[[Any], Any]:
    """x = (e, a, b, alpha, beta) -> sum of Huber of ln loss on raw coefficients, and its gradient if `closed`."""
    n, y, observed = np.log(N), np.log(D), np.log(loss)

    def value(x: Any) -> Any:
        e, a, b, alpha, beta = x
        terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * y])
        top = terms.max(0)
        parts = np.exp(terms - top)
        sums = parts.sum(0)
        r = top + np.log(sums) - observed
        cost = float(huber(r, DELTA).sum())
        if not closed:
            return cost
        floor, size, tokens = parts * (np.clip(r, -DELTA, DELTA) / sums)
        return cost, np.array([floor.sum(), size.sum(), tokens.sum(), -(size * n).sum(), -(tokens * y).sum()])

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


def bench_fit(turns: int, share: float) -> Iterator[str]:
    frame = rows_240()
    starts = np.array(list(itertools.product(*GRID)))
    some = np.random.default_rng(1).permutation(starts)[: round(share * len(starts))]

    def ours() -> FittedLaw:
        return fit(frame, law="chinchilla", delta=DELTA, starts=64)

    for closed in (False, True):
        value = recipe(frame["backbone_params"], frame["tokens"], frame["val_loss"], closed)

        def theirs(part: Any, value: Any = value, closed: bool = closed) -> float:
            return min(minimize(value, x, jac=closed, method="L-BFGS-B").fun for x in part)

        spent, best, own, law_ = take_turns(theirs, np.array_split(some, turns), ours)
        what = f"fit, 5 parameters, 240 rows, {GRADIENT[closed]}"
        yield line(what, spent / share, own, law_.objective / min(best) - 1, None if closed else 50, share)


def bench_bootstrap(turns: int, share: float) -> Iterator[str]:
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

    def ours() -> Any:
        start = np.repeat(np.array([fitted.theta]), DRAWS, 0)
        ends = minimise(problem.residual, problem.jacobian, start, low, high, DELTA, weights=weights)
        return ends.objective

    some = drawn[: round(share * DRAWS)]
    for closed in (False, True):

        def theirs(part: Any, closed: bool = closed) -> list[float]:
            each = (recipe(N[rows], D[rows], loss[rows], closed) for rows in part)
            return [minimize(value, x0, jac=closed, method="BFGS").fun for value in each]

        spent, costs, own, mine = take_turns(theirs, np.array_split(some, turns), ours)
        off = mine[: len(some)] / np.concatenate(costs) - 1
        what = f"bootstrap, {DRAWS} draws, {GRADIENT[closed]}"
        yield line(what, spent / share, own, float(off.max()), None if closed else 15, share)
        yield f"  draws where theirs is higher by over 1e-6: {np.mean(off < -1e-6):.0%}"


def bench_start(turns: int, share: float) -> Iterator[str]:
    import pandas as pd

    problem, low_high = problem_of(pd.read_csv(GEMSTONES), "width_depth_params", COLUMNS)
    low, high = low_high
    starts = latin_hypercube(problem, 128, 0)
    delta = 1e-4

    def ours() -> Any:
        return search(problem, starts, delta)[0]

    some = starts[: max(turns, round(share * 64))]
    for closed in (False, True):

        def value(theta: Any, closed: bool = closed) -> Any:
            r = problem.residual(theta[None])[0]
            cost = float(huber(r, delta).sum())
            return (cost, np.clip(r, -delta, delta) @ problem.jacobian(theta[None])[0]) if closed else cost

        def theirs(part: Any, value: Any = value, closed: bool = closed) -> list[Any]:
            box = list(zip(low, high, strict=True))
            return [minimize(value, x, jac=closed, method="L-BFGS-B", bounds=box).fun for x in part]

        spent, found, own, ends = take_turns(theirs, np.array_split(some, turns), ours)
        costs, mine = np.concatenate(found), ends.objective
        what = f"a start, 9 parameters, 770 rows, {GRADIENT[closed]}"
        yield line(what, spent / len(some), own / 128, mine.min() / costs.min() - 1, None if closed else 20, 1.0)
        goal = 1.001 * min(costs.min(), mine.min())
        yield (
            f"  starts within 0.1 % of the best: theirs {np.mean(costs <= goal):.0%} of {len(some)}, "
            f"ours {np.mean(mine <= goal):.0%} of 128"
        )


def bench_chinchilla(turns: int, share: float) -> Iterator[str]:
    try:
        from chinchilla import Chinchilla
    except ImportError as error:
        yield f"chinchilla: skipped ({error}); `make bench-peers` installs it"
        return
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
    yield line("a start, the package chinchilla", a_start, own / 64, off, None, 1.0)


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
        for words in BENCHES[name](options.turns, options.share):
            print(words, flush=True)


if __name__ == "__main__":
    main()
