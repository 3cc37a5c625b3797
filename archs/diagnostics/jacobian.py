"""The size of each block's Jacobian, from a few tokens and without ever forming it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, silent
from depthlaw.archs.diagnostics.passes import Pass

TOKENS, PROBES, ITERATIONS = 16, 16, 30
STEP = 1e-5  # of a central difference, times the size of the state: an error of about 1e-10 in fp64


def jacobian(
    model: Model, batches: Batches, tick: Tick = silent, probes: int = PROBES, iterations: int = ITERATIONS
) -> Finding | None:
    """Of J = d z_(l+1) / d z_l over the first 16 tokens of the first sequence together, N = 16 d or 16 m d:

    * rms: sqrt(|J|_F^2 / N), the root mean square singular value, and its standard error, by Hutchinson's estimate
      E |J^T u|^2 with u of random signs; step_rms the same of J - 1, what the block adds;
    * largest: the largest singular value by power iteration on J^T J, a lower bound, and as its error the residual
      |J^T J v - s^2 v| / (2 s): some singular value is that near, to first order.

    J^T u by a backward pass and J v by central differences, in fp64. None where no vector is the state (attention over
    depth, hybrids). Sources: Hutchinson 1990; Golub and Van Loan, "Matrix Computations", 8.2.
    """
    if not _has_depth_state(model, batches):
        return None
    model = copy.deepcopy(model).double()
    run = Pass(model, batches[0][0][:1, :TOKENS])
    generator = torch.Generator().manual_seed(0)
    rows = []
    for block in range(run.n_layers):
        rows.append(_block(run, block, generator, probes, iterations))
        tick((block + 1) / run.n_layers)
    names = ("rms", "rms_error", "step_rms", "step_rms_error", "largest", "largest_error")
    values = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    return Finding(
        {"block": np.arange(run.n_layers)},
        values,
        {"mean_step_rms": float(values["step_rms"].mean()), "largest": float(values["largest"].max())},
    )


def _has_depth_state(model: Model, batches: Batches) -> bool:
    with torch.no_grad():
        run = Pass(model, batches[0][0][:1, :1])
        return model.topology.with_depth_state(run.states[0], run.z(0, run.states[0])) is not None


def _block(run: Pass, block: int, generator: torch.Generator, probes: int, iterations: int) -> tuple[float, ...]:
    topology, state = run.model.topology, run.states[block]
    z = run.z(block, state).detach()

    def f(at: Tensor) -> Tensor:
        return run.z(block + 1, run.block(block, topology.with_depth_state(state, at)))

    at = z.clone().requires_grad_()
    out = f(at)

    def transposed(u: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(out, at, u, retain_graph=True)
        return found

    N = z.numel()
    whole, added = [], []
    for _ in range(probes):
        u = (torch.randint(0, 2, z.shape, generator=generator) * 2 - 1).to(z)
        back = transposed(u)
        whole.append(float(back.square().sum()) / N)
        added.append(float((back - u).square().sum()) / N)
    return (*_root(whole), *_root(added), *_largest(z, f, transposed, generator, iterations))


def _root(squares: list[float]) -> tuple[float, float]:
    """Square root of the mean, and its standard error to first order."""
    root = math.sqrt(np.mean(squares))
    error = float(np.std(squares, ddof=1)) / math.sqrt(len(squares))
    return root, error / (2 * root) if root > 0 else 0.0


def _largest(
    z: Tensor,
    f: Callable[[Tensor], Tensor],
    transposed: Callable[[Tensor], Tensor],
    generator: torch.Generator,
    iterations: int,
) -> tuple[float, float]:
    v = torch.randn(z.shape, generator=generator).to(z)
    v /= v.norm()
    step = STEP * float(z.norm())
    sigma = residual = 0.0
    for _ in range(iterations):
        with torch.no_grad():
            forward = (f(z + step * v) - f(z - step * v)) / (2 * step)
        w = transposed(forward)
        square = float((v * w).sum())
        sigma, residual = math.sqrt(max(square, 0.0)), float((w - square * v).norm())
        v = w / w.norm()
    return sigma, residual / (2 * sigma) if sigma > 0 else residual
