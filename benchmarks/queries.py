"""How long a question takes: ten topologies, some 8000 shapes each, a law with 1000 bootstrap draws.

    python -m benchmarks.queries

The whole answer is timed as `depthlaw.optimum` gives it: exact counts, budgets, the best design, prices, ties, who wins
under every draw, intervals and the Pareto front. Medians of five after one to warm up. Process seconds are those of all
threads together, and the figure to judge by on a machine that others use too. The law is fitted to a simulated sweep
and its draws are taken from the covariance of the fit: a bootstrap of ten topologies would take longer than all the
questions, and cost the same to ask about.
"""

from __future__ import annotations

import base64
import os
import time
from dataclasses import replace

import numpy as np

from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform.next_sweep import next_cells
from depthlaw.platform.query import optimum
from depthlaw.scaling.compare import compare
from depthlaw.scaling.fit import fit
from depthlaw.scaling.fitted import FittedLaw

TOPOLOGIES = ("pre_ln", "sandwich_ln", "lns", "deepnorm", "keel", "hc", "mhc", "full_attnres", "block_attnres", "moda")
QUESTIONS = {
    "three budgets": ["params<=400M", "kv_bytes<=2GiB", "tpot<=15ms"],
    "a FLOP budget": ["train_flops<=1e20", "peak_memory<=8GiB"],
    "no budget": [],
}
DRAWS, TIMES = 1000, 5


def simulated_law() -> FittedLaw:
    """The law `shape` on three sizes x four shapes x three D/N of each topology, with 0.3 % noise."""
    rng, rows = np.random.default_rng(0), []
    for k, label in enumerate(TOPOLOGIES):
        for size, ratio in ((s, r) for s in (4e6, 16e6, 64e6) for r in (8, 16, 32, 64)):
            L = max(2, round((size / 12 / ratio**2) ** (1 / 3)))
            d = 32 * max(1, round((size / 12 / L) ** 0.5 / 32))
            N = int(Costs(topology(label), shape_rule("published").shape(L, d, 50_280)).backbone_params)
            for c in (5, 20, 80):
                q = np.log(d / L) - 3.0 + 0.1 * k
                loss = 1.8 + (0.8 - 0.01 * k) * np.exp(0.04 * q * q) * (N / 16e6) ** -0.3
                loss += 0.75 * (c * N / 3e8) ** -0.35
                rows.append((label, N, c * N, L, d, loss * np.exp(0.003 * rng.standard_normal())))
    names = ("topology", "backbone_params", "tokens", "n_layers", "d_model", "val_loss")
    law = fit(dict(zip(names, zip(*rows, strict=True), strict=True)), starts=8)
    draws = rng.multivariate_normal(law.theta, law.covariance, DRAWS)
    return replace(law, draws_base64=base64.b64encode(draws.astype("<f8").tobytes()).decode("ascii"))


def seconds(call) -> tuple[float, float]:
    """(wall, process) seconds, medians."""
    call()
    taken = []
    for _ in range(TIMES):
        wall, process = time.perf_counter(), time.process_time()
        call()
        taken.append((time.perf_counter() - wall, time.process_time() - process))
    return float(np.median([w for w, _ in taken])), float(np.median([p for _, p in taken]))


def main() -> None:
    law = simulated_law()
    print(f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, numpy {np.__version__}")
    print("| question | designs | feasible | draws | wall s | process s | without draws, wall s |")
    print("|---|---|---|---|---|---|---|")
    for words, budgets in QUESTIONS.items():
        answer = optimum(law, budgets, layers=(2, 128), widest=2048)
        wall, process = seconds(lambda: optimum(law, budgets, layers=(2, 128), widest=2048))  # noqa: B023
        bare = replace(law, draws_base64="")
        plain, _ = seconds(lambda: optimum(bare, budgets, layers=(2, 128), widest=2048))  # noqa: B023
        print(
            f"| {words} | {answer.considered:,} | {answer.feasible:,} | {answer.draws} | {wall:.2f} | {process:.2f} "
            f"| {plain:.2f} |"
        )
    for words, call in (
        ("compare", lambda: compare(law)),
        ("design, 1e20 FLOPs for 1B", lambda: next_cells(law, 1e20, 1e9)),
    ):
        wall, process = seconds(call)
        print(f"{words}: wall {wall:.2f} s, process {process:.2f} s")


if __name__ == "__main__":
    main()
