"""Leading blocks whose mixes leave the running sum out (block_attnres)."""

from __future__ import annotations

import numpy as np
import torch

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, silent
from depthlaw.archs.diagnostics.passes import Pass

DEAD_BELOW = 0.05


@torch.no_grad()
def dead_zone(model: Model, batches: Batches, tick: Tick = silent) -> Finding | None:
    """Weight of the running sum in the mix that each sublayer reads, averaged over tokens; 2 L is the readout.

    NaN where a mix has no running sum (sublayer 0, and right behind a boundary). The zone: how many leading blocks have
    all of theirs below 0.05. None where no mix has one.
    """
    S = 2 * model.shape.n_layers
    total, tokens = np.full(S + 1, np.nan), 0
    for k, (inputs, _) in enumerate(batches):
        run = Pass(model, inputs)
        readout = (S, model.depth[S], run.states[-1])
        for i, p, state in [*(step[:3] for step in run.steps()), readout]:
            part = model.topology.running_part(i, p, state)
            if part is not None:
                running = model.topology.read_weights(i, p, state)[:, :, part].double()
                total[i] = np.nan_to_num(total[i]) + float(running.expand(*inputs.shape, 1).sum())
        tokens += inputs.numel()
        tick((k + 1) / len(batches))
    if np.isnan(total).all():
        return None
    weight = total / tokens
    alive = np.flatnonzero(weight[:S] >= DEAD_BELOW)
    zone = int(alive[0]) // 2 if len(alive) else model.shape.n_layers
    return Finding({"sublayer": np.arange(S + 1)}, {"running_weight": weight}, {"dead_blocks": float(zone)})
