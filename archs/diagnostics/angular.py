"""Angular distance between depth states."""

from __future__ import annotations

import numpy as np
import torch

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, late, mean, silent
from depthlaw.archs.diagnostics.passes import Pass


@torch.no_grad()
def angular_distance(model: Model, batches: Batches, tick: Tick = silent) -> Finding:
    """d(l, n) = arccos(cos(z_l, z_(l + n))) / pi for each token, averaged; 0 the same direction, 0.5 orthogonal.

    Cosines in fp64: near 1, arccos makes 1e-8 of what is 1e-16. Source: Gromov et al. 2024, "The Unreasonable
    Ineffectiveness of the Deeper Layers". A large angle may be noise as well as work.
    """
    L = model.shape.n_layers
    total, tokens = torch.zeros(L + 1, L + 1, dtype=torch.float64), 0
    for k, (inputs, _) in enumerate(batches):
        run = Pass(model, inputs)
        for sequence in range(len(inputs)):  # a sequence at a time: all depths of one in fp64 are memory enough
            z = [run.z(depth, state)[sequence] for depth, state in enumerate(run.states)]
            unit = torch.nn.functional.normalize(torch.stack(z, 1).double(), dim=-1, eps=0.0)  # (T, L + 1, D)
            cosine = (unit @ unit.transpose(1, 2)).clamp(-1, 1)
            total += (torch.arccos(cosine) / torch.pi).sum(0).cpu()
        tokens += inputs.numel()
        tick((k + 1) / len(batches))
    between = (total / tokens).numpy()
    distance = np.full((L, L), np.nan)
    for depth in range(L):
        distance[depth, : L - depth] = between[depth, depth + 1 :]
    rest = distance[late(L) :]
    return Finding(
        {"depth": np.arange(L), "apart": np.arange(1, L + 1)},
        {"distance": distance},
        {"mean_late": mean(rest), "mean_late_adjacent": mean(rest[:, 0])},
    )
