"""What exchanging two blocks does to the loss."""

from __future__ import annotations

import numpy as np
import torch

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, late, share_above, silent
from depthlaw.archs.diagnostics.passes import Pass, swapped

PERMUTATION_THRESHOLD = 0.15
ENOUGH_TOKENS = 4096


@torch.no_grad()
def permutation(model: Model, batches: Batches, tick: Tick = silent) -> Finding:
    """P(i, j) = |loss - loss with blocks i and j swapped| / loss, i < j.

    The states before block i are reused, which leaves L (L^2 - 1) / 3 blocks of L^2 (L - 1) / 2 to compute: at most 1.5
    times less, as no two pairs share anything behind their first block. That is still the dearest diagnostic by far, so
    it takes no more batches than make 4096 tokens: a paired difference needs no more to be told from 15 %. The
    threshold was picked by the benchmark's authors, and swapped blocks leave the training distribution.
    """
    L = model.shape.n_layers
    loss, swapped_loss, tokens = 0.0, np.full((L, L), np.nan), 0
    swapped_loss[np.triu_indices(L, 1)] = 0
    before = np.cumsum([0, *(inputs.numel() for inputs, _ in batches[:-1])])
    taken = [batch for batch, already in zip(batches, before, strict=True) if already < ENOUGH_TOKENS]
    work, total = 0, len(taken) * L * (L * L - 1) // 3
    for inputs, targets in taken:
        run, n = Pass(model, inputs), inputs.numel()
        loss += n * run.loss(run.states[-1], targets)
        for i, j in zip(*np.triu_indices(L, 1), strict=True):
            with swapped(model, int(i), int(j)):
                swapped_loss[i, j] += n * run.loss(run.end(int(i), run.states[i]), targets)
            work += L - int(i)
            tick(work / max(total, 1))
        tokens += n
    score = np.abs(loss - swapped_loss) / loss
    rest = score[late(L) :, late(L) :]
    return Finding(
        {"first": np.arange(L), "second": np.arange(L)},
        {"score": score, "loss": swapped_loss / tokens},
        {"share_late": float(share_above(rest, np.array([PERMUTATION_THRESHOLD]))[0])},
        share_above(rest),
    )
