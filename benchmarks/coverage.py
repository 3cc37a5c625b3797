"""How often 95 % intervals hold the truth, in simulated sweeps whose truth is known.

    OMP_NUM_THREADS=1 python -m benchmarks.coverage [--laws shape width_depth ...] [--sweeps 200]

One sweep is three topologies, 3 or 4 sizes 4x apart, 4 or 5 shapes a size, D/N of 5, 20 and 80, one run a cell: 108 to
180 runs. Its law is drawn at random, and so is its noise, 0.3 to 1 % of the loss. Everything then goes the way a user's
sweep goes. For each topology three questions are asked whose answer is known: the loss of a new run of eight times the
largest size at D/N = 20 and the best shape, the same without noise, and the best d / L at the largest size.

A sweep of `iso_size` is one size at D/N = 20, 7 to 10 shapes, one run a cell: 21 to 30 runs. The law says nothing of
other sizes, so its loss is asked at that size; intervals are never inflated, for no size can be held out.

Each sweep is a line of the table; a sweep that is in the table already is not run again, so the same command goes on
where it was stopped. The summary is printed at the end.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from depthlaw.scaling.assess import assess
from depthlaw.scaling.fit import fit
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import Array, Centre, features, law

TABLE = Path(__file__).with_suffix(".csv")
TOPOLOGIES = ("pre_ln", "hc", "full_attnres")
SMALLEST, STEP, TOKENS_PER_N, RATIOS = 1e6, 4.0, (5.0, 20.0, 80.0), (6.0, 96.0)
CENTRE = Centre(N0=12 * 8 * 288.0**2, D0=1.6e8, L0=8.0, d0=288.0)  # of the true law
AHEAD, AHEAD_TOKENS_PER_N = 8.0, 20.0
Truth = list[list[float]]  # parameters of each topology, in the law's order


def shape(rng: np.random.Generator) -> Truth:
    """e, a, alpha, b, beta, kappa, rho0, rho1: best d / L between 11 and 30 at N0, rising with size."""
    e, alpha, b, beta, rho1 = rng.uniform((0.47, 0.25, -0.5, 0.28, 0.0), (0.69, 0.4, -0.1, 0.4, 0.2))
    own = rng.uniform((-0.5, 0.03, 2.4), (-0.1, 0.1, 3.4), (len(TOPOLOGIES), 3))
    return [[e, a, alpha, b, beta, kappa, rho0, rho1] for a, kappa, rho0 in own]


def width_depth(rng: np.random.Generator) -> Truth:
    """e, c_w, w, c_l, l, b, beta: both terms fall, depth's faster or slower than width's."""
    e, w, l, b, beta = rng.uniform((0.47, 0.5, 0.5, -0.5, 0.28), (0.69, 1.0, 1.0, -0.1, 0.4))  # noqa: E741
    own = rng.uniform((-1.2, -1.6), (-0.8, -1.2), (len(TOPOLOGIES), 2))
    return [[e, c_w, w, c_l, l, b, beta] for c_w, c_l in own]


def width_depth_params(rng: np.random.Generator) -> Truth:
    """e, c_w, w, c_l, l, a, alpha, b, beta: terms of width, depth and size of about a quarter of a nat each."""
    low, high = (0.47, 0.5, 0.5, 0.25, -0.5, 0.28), (0.69, 1.0, 1.0, 0.4, -0.1, 0.4)
    e, w, l, alpha, b, beta = rng.uniform(low, high)  # noqa: E741
    own = rng.uniform((-1.5, -1.9, -1.4), (-1.1, -1.5, -0.8), (len(TOPOLOGIES), 3))
    return [[e, c_w, w, c_l, l, a, alpha, b, beta] for c_w, c_l, a in own]


def iso_size(rng: np.random.Generator) -> Truth:
    """c, kappa in nats, rho: 2.5 to 3 nats at the best d / L, which is between 11 and 30."""
    own = rng.uniform((0.92, 0.02, 2.4), (1.1, 0.1, 3.4), (len(TOPOLOGIES), 3))
    return [list(p) for p in own]


TRUTHS: dict[str, Callable[[np.random.Generator], Truth]] = {
    f.__name__: f for f in (shape, width_depth, width_depth_params, iso_size)
}


class Sweep:
    """A simulated sweep of the law `name`: `frame` to fit, and what the truth says. runs: that many cells of the grid,
    drawn at random, or all."""

    def __init__(self, name: str, seed: int, runs: int | None = None) -> None:
        rng = np.random.default_rng([seed, len(name)])
        self.law = law(name)
        self.truth = dict(zip(TOPOLOGIES, np.array(TRUTHS[name](rng))[:, :, None], strict=True))
        self.noise = float(np.exp(rng.uniform(np.log(0.003), np.log(0.01))))
        sizes, shapes, ratios = SMALLEST * STEP ** np.arange(rng.integers(3, 5)), int(rng.integers(4, 6)), TOKENS_PER_N
        if self.law.one_size:
            sizes, shapes, ratios = sizes[-1:], int(rng.integers(7, 11)), (AHEAD_TOKENS_PER_N,)
        self.largest = float(sizes[-1])
        self.asked = self.largest * (1.0 if self.law.one_size else AHEAD)  # the size whose loss is asked
        rows = []
        for topology in TOPOLOGIES:
            for size in sizes:
                for ratio in np.geomspace(*RATIOS, shapes):
                    L = max(2, round((size / 12 / ratio**2) ** (1 / 3)))
                    d = 8 * round((size / 12 / L) ** 0.5 / 8)
                    rows += [(topology, 12 * L * d * d, c * 12 * L * d * d, L, d) for c in ratios]
        if runs is not None:
            rows = [rows[i] for i in rng.choice(len(rows), runs, replace=False)]
        columns = ("topology", "backbone_params", "tokens", "n_layers", "d_model")
        self.frame: dict[str, Any] = {c: np.array(v) for c, v in zip(columns, zip(*rows, strict=True), strict=True)}
        log_loss = np.array([self.log_loss(*row)[0] for row in rows])
        self.frame["val_loss"] = np.exp(log_loss + self.noise * rng.standard_normal(len(rows)))

    def log_loss(self, topology: str, N: Any, D: Any, n_layers: Any, d_model: Any) -> Array:
        return self.law.log_loss(self.truth[topology], features(*np.atleast_1d(N, D, n_layers, d_model), CENTRE))

    def best_ratio(self, topology: str, N: float) -> float:
        best = self.law.best_ln_ratio(self.truth[topology], np.log(np.array([N]) / CENTRE.N0), CENTRE)
        assert best is not None
        return float(np.exp(best[0]))

    def chance(self, interval: tuple[Array, Array], log_loss: float) -> float:
        """That a run whose true ln loss is this falls between the ends (1,) of an interval in nats."""
        low, high = ((float(np.log(end[0])) - log_loss) / self.noise for end in interval)
        return NormalDist().cdf(high) - NormalDist().cdf(low)


def ask(sweep: Sweep, fitted: FittedLaw) -> dict[str, float]:
    """Mean over the topologies of how often each interval holds its truth, and of the widths in ln loss."""
    rows = []
    for t in TOPOLOGIES:
        N = sweep.asked
        R = sweep.best_ratio(t, N)
        L = (N / 12 / R**2) ** (1 / 3)
        at = (t, N, AHEAD_TOKENS_PER_N * N, L, R * L)
        true = float(sweep.log_loss(*at)[0])
        plain, wide = (fitted.interval(*at, inflated=yes) for yes in (False, True))
        alone = np.quantile(fitted.log_loss_draws(*at)[:, 0], (0.025, 0.975))
        best = sweep.best_ratio(t, sweep.largest)
        draws = fitted.best_ratio_draws(t, sweep.largest)
        assert draws is not None
        ratio, profile = np.quantile(draws, (0.025, 0.975)), fitted.profiles[f"best d/L[{t}]"]
        rows.append(
            {
                "new_run": sweep.chance(plain, true),
                "new_run_inflated": sweep.chance(wide, true),
                "true_loss": float(alone[0] <= true <= alone[1]),
                "best_ratio": float(ratio[0] <= best <= ratio[1]),
                "best_ratio_profile": float(profile[0] <= best <= profile[1]),
                "width": float(np.log(plain[1] / plain[0])[0]),
                "best_ratio_width": float(np.log(ratio[1] / ratio[0])),
            }
        )
    return {k: float(np.mean([r[k] for r in rows])) for k in rows[0]}


def run(name: str, seed: int, runs: int | None) -> dict[str, Any]:
    """One line of the table."""
    begin = time.process_time()
    sweep = Sweep(name, seed, runs)
    fitted = assess(fit(sweep.frame, name), sweep.frame)
    line = {
        "law": name,
        "runs_wanted": runs or "all",
        "seed": seed,
        "runs": len(fitted.residuals),
        "noise": sweep.noise,
        "status": fitted.status,
        **ask(sweep, fitted),
        "inflation": fitted.inflation,
    }
    for k, (low, high) in fitted.profiles.items():
        if k in ("alpha", "beta"):
            p = next(i for i, q in enumerate(sweep.law.parameters) if q.name == k)
            line[f"{k}_profile"] = float(low <= float(sweep.truth[TOPOLOGIES[0]][p, 0]) <= high)
    line = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in line.items()}
    return {**line, "seconds": f"{time.process_time() - begin:.2f}"}


COLUMNS = (
    *("law", "runs_wanted", "seed", "runs", "noise", "status"),
    *("new_run", "new_run_inflated", "true_loss", "best_ratio", "best_ratio_profile", "alpha_profile", "beta_profile"),
    *("width", "best_ratio_width", "inflation", "seconds"),
)
SHARES = COLUMNS[6:13]


def summary(lines: list[dict[str, str]]) -> str:
    """Mean of each share over the sweeps of a law and a number of runs, with its standard error."""
    out = []
    for law_name, wanted in sorted({(x["law"], x["runs_wanted"]) for x in lines}):
        of = [x for x in lines if (x["law"], x["runs_wanted"]) == (law_name, wanted)]
        out.append(f"{law_name}, {wanted} runs of each grid: {len(of)} sweeps")
        for share in SHARES:
            values = np.array([float(x[share]) for x in of if x[share]])
            if values.size > 1:
                error = values.std(ddof=1) / np.sqrt(values.size)
                out.append(f"  {share:20} {100 * values.mean():5.1f} % +- {100 * error:.1f}")
        inflation = np.array([float(x["inflation"]) for x in of])
        out.append(f"  inflation            median {np.median(inflation):.2f}, largest {inflation.max():.2f}")
        out.append(f"  seconds a sweep      {np.mean([float(x['seconds']) for x in of]):.2f}")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--laws", nargs="+", choices=TRUTHS, default=list(TRUTHS))
    parser.add_argument("--sweeps", type=int, default=200)
    parser.add_argument("--runs", type=int, help="cells of each grid that are run, such as 48; default all")
    args = parser.parse_args()
    if not TABLE.exists():
        TABLE.write_text(",".join(COLUMNS) + "\n")
    with TABLE.open() as file:
        done = {(x["law"], x["runs_wanted"], x["seed"]) for x in csv.DictReader(file)}
    for name in args.laws:
        for seed in range(args.sweeps):
            if (name, str(args.runs or "all"), str(seed)) in done:
                continue
            line = run(name, seed, args.runs)
            with TABLE.open("a") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(line)
            if seed % 20 == 19:
                print(f"{name}: {seed + 1} of {args.sweeps}", flush=True)
    with TABLE.open() as file:
        print(summary(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
