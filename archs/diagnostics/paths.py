"""Residual-path weights: how much of each sublayer's output arrives at each later one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, silent
from depthlaw.archs.diagnostics.passes import Pass
from depthlaw.archs.topology import Params, State


@torch.no_grad()
def path_weights(model: Model, batches: Batches, tick: Tick = silent) -> Finding:
    """w(i -> k): the weight of sublayer i's output in the pre-norm input of sublayer k, mixing coefficients frozen.

    Averaged over tokens, and over channels where gains make them differ (deepnorm, keel). Source -1 is the embedding,
    k = 2 L the final norm's input. 1 for plain adds (in sandwich_ln the output is that of the outer norm); the softmax
    weights in attention over depth; beta_i^T A ... A alpha_k with streams; the product of alpha, gains and 1 / RMS
    along the way where a norm follows the sum.
    """
    S = 2 * model.shape.n_layers
    total, tokens = np.zeros((S + 1, S + 1)), 0
    for k, (inputs, _) in enumerate(batches):
        total += inputs.numel() * _of(model, Pass(model, inputs))
        tokens += inputs.numel()
        tick((k + 1) / len(batches))
    weight = total / tokens
    weight[np.tril_indices(S + 1, -1)] = np.nan  # row i + 1 is sublayer i, whose output sublayers from i + 1 on read
    return Finding(
        {"source": np.arange(-1, S), "sublayer": np.arange(S + 1)},
        {"weight": weight},
        {"embedding_at_readout": float(weight[0, -1]), "mean_at_readout": float(weight[1:, -1].mean())},
    )


def _of(model: Model, run: Pass) -> np.ndarray:
    """Means over one batch, (1 + 2 L sources, 2 L + 1 readers)."""
    topology, S = model.topology, 2 * model.shape.n_layers
    weight = np.zeros((S + 1, S + 1))
    start = _wide(topology.read_weights(0, model.depth[0], run.states[0]))
    paths = [torch.ones_like(start)]  # of each source so far, its weight in each part of the state

    def arriving(k: int, p: Params, state: State) -> list[float]:
        read = _wide(topology.read_weights(k, p, state))
        return [float((path * read).sum(2).mean()) for path in paths]

    for k, p, state, out_BTD, carry in run.steps():
        weight[: k + 1, k] = arriving(k, p, state)
        keep, add = (_wide(w) for w in topology.write_weights(k, p, state, out_BTD, carry))
        paths = [(path.unsqueeze(3) * keep).sum(2) for path in paths] + [add]
    weight[:, S] = arriving(S, model.depth[S], run.states[-1])
    return weight


def _wide(weights: Tensor) -> Tensor:
    return weights.detach().cpu().double()
