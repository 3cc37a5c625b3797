"""What running a block twice does to the loss."""

from __future__ import annotations

import numpy as np
import torch

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, late, median, silent
from depthlaw.archs.diagnostics.passes import Pass


@torch.no_grad()
def repetition(model: Model, batches: Batches, tick: Tick = silent) -> Finding:
    """Loss with block s run twice in a row less the loss, in nats.

    The second run reads what the first left; in attention over depth and in moda's cache its outputs are added beside
    those of the first. NaN for the first block behind a hybrid's handover. A repeated block leaves the training
    distribution.
    """
    L = model.shape.n_layers
    loss, repeated, tokens = 0.0, np.zeros(L), 0
    for k, (inputs, targets) in enumerate(batches):
        run, n = Pass(model, inputs), inputs.numel()
        loss += n * run.loss(run.states[-1], targets)
        for s in range(L):
            if not model.topology.accepts(s, s + 1, L):
                repeated[s] = np.nan
                continue
            again = run.block(s, run.states[s + 1])
            repeated[s] += n * run.loss(run.end(s + 1, again), targets)
            tick((k + (s + 1) / L) / len(batches))
        tokens += n
    increase = repeated / tokens - loss / tokens
    return Finding(
        {"block": np.arange(L)},
        {"loss_increase": increase},
        {
            "least": float(np.nanmin(increase)) if np.isfinite(increase).any() else float("nan"),
            "median_late": median(increase[late(L) :]),
        },
    )
