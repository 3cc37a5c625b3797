"""How many streams a residual product keeps apart (hc, mhc)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, silent
from depthlaw.archs.diagnostics.passes import Pass


def effective_rank(singular: Tensor) -> Tensor:
    """exp(-sum p log p), p = sigma / sum sigma, over the last axis: 1 for rank one, m for an orthogonal matrix.

    Source: Roy and Vetterli 2007, "The effective rank: a measure of effective dimensionality".
    """
    p = singular / singular.sum(-1, keepdim=True)
    return torch.exp(-torch.special.xlogy(p, p).sum(-1))


@torch.no_grad()
def residual_rank(model: Model, batches: Batches, tick: Tick = silent) -> tuple[Finding, Finding] | None:
    """(rank, streams), or None where there is one stream.

    Rank: of the product A_(2a) ... A_(2b - 1) of the residual maps of blocks a .. b - 1 (from = a, to = b), the
    effective rank and the singular values, of each token, averaged. Streams: the mean cosine between two streams at
    each depth.
    """
    L = model.shape.n_layers
    ranks: np.ndarray | None = None
    tokens = 0
    for k, (inputs, _) in enumerate(batches):
        run = Pass(model, inputs)
        if model.topology.streams_of(run.states[0]) is None:
            return None
        maps = _maps(model, run)
        m = maps[0].shape[-1]
        if ranks is None:
            ranks, values, cosine = np.zeros((L, L + 1)), np.zeros((L, L + 1, m)), np.zeros(L + 1)
        for a in range(L):
            product = torch.eye(m, dtype=torch.float64)
            for b in range(a + 1, L + 1):
                product = product @ maps[b - 1]
                singular = torch.linalg.svdvals(product)
                ranks[a, b] += float(effective_rank(singular).sum())
                values[a, b] += singular.flatten(0, -2).sum(0).numpy()
            tick((k + (a + 1) / L) / len(batches))
        cosine += [_mean_cosine(model.topology.streams_of(state)) for state in run.states]
        tokens += inputs.numel()
    if ranks is None:
        return None
    empty = np.tril(np.ones((L, L + 1)), 0) > 0
    ranks[empty] = values[empty] = np.nan
    ranks, values = ranks / tokens, values / tokens
    axes = {"from": np.arange(L), "to": np.arange(L + 1)}
    columns = {"effective_rank": ranks, **{f"sigma_{j + 1}": values[..., j] for j in range(values.shape[-1])}}
    streams = Finding({"depth": np.arange(L + 1)}, {"cosine": cosine / tokens}, {"last": float(cosine[-1] / tokens)})
    return Finding(axes, columns, {"whole_depth": float(ranks[0, L])}), streams


def _maps(model: Model, run: Pass) -> list[Tensor]:
    """The residual map of each block, rows the streams before and columns those after, (B, T, m, m) in fp64."""
    each = [model.topology.write_weights(*step)[0].squeeze(-1).cpu().double() for step in run.steps()]
    return [first @ second for first, second in zip(each[::2], each[1::2], strict=True)]


def _mean_cosine(streams_BTMD: Tensor | None) -> float:
    """Sum over tokens of the mean cosine between two different streams."""
    assert streams_BTMD is not None
    unit = torch.nn.functional.normalize(streams_BTMD.double(), dim=-1)
    m = unit.shape[2]
    cosine = unit @ unit.transpose(2, 3)
    pairs = cosine.sum((2, 3)) - torch.diagonal(cosine, dim1=2, dim2=3).sum(-1)
    return float(pairs.sum() / max(m * (m - 1), 1))
