"""What reusing the states before the first disturbed block saves: ratios of process time on one thread, and of blocks.

    OMP_NUM_THREADS=1 python -m benchmarks.diagnostics [--topologies pre_ln hc ...] [--layers 16] [--repeats 3]

Both sides compute the same numbers, to the last bit (a test). The other side runs the whole model for each skipped
block or swapped pair, with everything else the same: no gradients, the same batch, no head where none is needed.
By count of blocks the most that reuse can give is 2 for skips, where (L - 1) L / 2 of (L - 1) L are left, and
1.5 L / (L + 1) for swaps, where L (L^2 - 1) / 3 of L^2 (L - 1) / 2 are left: no two pairs share a state behind their
first block. Among the pairs that the summary counts, both blocks in the last three quarters, it is more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from depthlaw.archs.backbone import Model, build
from depthlaw.archs.diagnostics.finding import late
from depthlaw.archs.diagnostics.passes import Pass, skipped, swapped
from depthlaw.archs.diagnostics.permutation import permutation
from depthlaw.archs.diagnostics.skips import skip_scores
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import topology


@torch.no_grad()
def skips_in_full(model: Model, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    plain = Pass(model, inputs)
    for s in range(plain.n_layers):
        with skipped(model, s):
            run = Pass(model, inputs)
        z = [run.z(depth, state) for depth, state in enumerate(run.states)]
        for block in range(s + 1, plain.n_layers):
            step = plain.z(block + 1, plain.states[block + 1]) - plain.z(block, plain.states[block])
            torch.linalg.vector_norm(z[block + 1] - z[block] - step, dim=-1).double().sum()
        run.loss(run.states[-1], targets)


@torch.no_grad()
def swaps_in_full(model: Model, inputs: torch.Tensor, targets: torch.Tensor, first: int = 0) -> None:
    for i in range(first, model.shape.n_layers):
        for j in range(i + 1, model.shape.n_layers):
            with swapped(model, i, j):
                float(model(inputs, targets))


@torch.no_grad()
def late_swaps_reused(model: Model, inputs: torch.Tensor, targets: torch.Tensor, first: int) -> None:
    run = Pass(model, inputs)
    for i in range(first, model.shape.n_layers):
        for j in range(i + 1, model.shape.n_layers):
            with swapped(model, i, j):
                run.loss(run.end(i, run.states[i]), targets)


def seconds(what: Callable[[], object]) -> float:
    began = time.process_time()
    what()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratios of process time, one thread.")
    parser.add_argument("--topologies", nargs="+", default=["pre_ln", "hc", "full_attnres"])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    L = args.layers
    shape = shape_rule("small").shape(L, args.width, 512)
    inputs, targets = torch.randint(0, 512, (2, 8, 128), generator=torch.Generator().manual_seed(0))
    first = late(L)
    k = L - first
    bounds = {"causal": 2.0, "permutation": 1.5 * L / (L + 1), "late pairs": 1.5 * L / (k + 1)}
    print(f"| L {L}, d {args.width} | what | reused s | in full s | ratio | by blocks |\n|---|---|---|---|---|---|")
    for name in args.topologies:
        model = build(shape, topology(name), 0)
        sides: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "causal": (
                lambda m=model: skip_scores(m, [(inputs, targets)]),
                lambda m=model: skips_in_full(m, inputs, targets),
            ),
            "permutation": (
                lambda m=model: permutation(m, [(inputs, targets)]),
                lambda m=model: swaps_in_full(m, inputs, targets),
            ),
            "late pairs": (
                lambda m=model: late_swaps_reused(m, inputs, targets, first),
                lambda m=model: swaps_in_full(m, inputs, targets, first),
            ),
        }
        for what, (ours, other) in sides.items():
            pairs = [(seconds(ours), seconds(other)) for _ in range(args.repeats)]
            reused, in_full = (median(side) for side in zip(*pairs, strict=True))
            ratio = in_full / reused
            print(f"| {name} | {what} | {reused:.2f} | {in_full:.2f} | {ratio:.2f} | {bounds[what]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
