"""How much of a block's contribution depends on the blocks just before it."""

from __future__ import annotations

import numpy as np
import torch

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, late, mean, silent
from depthlaw.archs.diagnostics.passes import Pass


@torch.no_grad()
def recomputation(model: Model, batches: Batches, tick: Tick = silent) -> Finding:
    """R(e, l), e < l: block l run on the state before block e instead of its own.

    Mean over tokens of the L2 norm of the difference that makes to the step which block l takes in the depth state,
    over the mean norm of the step: 0 if what blocks e .. l - 1 did does not matter to block l. A local effect: nothing
    is propagated. NaN where a hybrid's parts keep different states.
    """
    L = model.shape.n_layers
    change, size = np.full((L, L), np.nan), np.zeros(L)
    change[np.triu_indices(L, 1)] = 0
    for k, (inputs, _) in enumerate(batches):
        run = Pass(model, inputs)
        z = [run.z(depth, state) for depth, state in enumerate(run.states)]
        for block in range(L):
            step = z[block + 1] - z[block]
            size[block] += float(torch.linalg.vector_norm(step, dim=-1).double().sum())
            for e in range(block):
                if not model.topology.accepts(block, e, L):
                    change[e, block] = np.nan
                    continue
                before = run.z(block, run.states[e])
                other = run.z(block + 1, run.block(block, run.states[e])) - before
                change[e, block] += float(torch.linalg.vector_norm(other - step, dim=-1).double().sum())
            tick((k + (block + 1) / L) / len(batches))
    with np.errstate(invalid="ignore", divide="ignore"):
        score = change / size
    one_before = np.diag(score, 1)[late(L) :]
    return Finding(
        {"recomputed_from": np.arange(L), "block": np.arange(L)},
        {"change": score},
        {"mean_late_one_before": mean(one_before)},
    )
