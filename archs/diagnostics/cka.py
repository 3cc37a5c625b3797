"""Linear CKA between depth states: how alike they are up to rotation and scale."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, late, mean, silent
from depthlaw.archs.diagnostics.passes import Pass

MOST_TOKENS = 1024


@torch.no_grad()
def cka(model: Model, batches: Batches, tick: Tick = silent) -> Finding:
    """HSIC(X, Y) / sqrt(HSIC(X, X) HSIC(Y, Y)) of depth states as rows of tokens, linear kernels, unbiased HSIC.

    The first 1024 tokens, whose Gram matrices are what it costs. Without the correction, two unrelated states of width
    d would look alike at n tokens as d / n is no longer small. Noise can make it slightly negative. Sources: Kornblith
    et al. 2019, "Similarity of Neural Network Representations Revisited"; Song et al. 2012, eq. 5, for unbiased HSIC.
    """
    rows: list[Tensor] = []  # one a batch, (L + 1, tokens, D)
    for inputs, _ in batches:
        left = MOST_TOKENS - sum(r.shape[1] for r in rows)
        if left > 0:
            run = Pass(model, inputs)
            z = [run.z(depth, state).flatten(0, 1)[:left] for depth, state in enumerate(run.states)]
            rows.append(torch.stack(z).double())
    grams = []
    for states in zip(*rows, strict=True):
        x = torch.cat(states)
        grams.append(_hollow(x @ x.T))
    n, count = grams[0].shape[0], len(grams)
    found = np.full((count, count), np.nan)
    for a in range(count):
        for b in range(a, count):
            found[a, b] = found[b, a] = float(_hsic(grams[a], grams[b]))
        tick((a + 1) / count)
    scale = np.sqrt(np.diag(found)) if n > 3 else np.full(count, np.nan)
    similarity = found / np.outer(scale, scale)
    rest = similarity[late(count - 1) :, late(count - 1) :]
    return Finding(
        {"depth": np.arange(count), "other": np.arange(count)},
        {"cka": similarity},
        {"mean_late": mean(rest[np.triu_indices(len(rest), 1)])},
    )


def _hollow(gram: Tensor) -> Tensor:
    return gram.fill_diagonal_(0)


def _hsic(K: Tensor, L: Tensor) -> Tensor:
    """Unbiased estimate from Gram matrices (n, n) with zero diagonals, n > 3."""
    n = K.shape[0]
    sums = (K * L).sum() + K.sum() * L.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (K.sum(0) @ L.sum(0))
    return sums / (n * (n - 3))
