"""What skipping a block changes: the later blocks' contributions (causal score) and the loss (pruning)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, late, median, share_above, silent
from depthlaw.archs.diagnostics.passes import Pass

CAUSAL_THRESHOLD = 0.45


@torch.no_grad()
def skip_scores(model: Model, batches: Batches, tick: Tick = silent) -> tuple[Finding, Finding]:
    """(causal score, pruning), from one set of L (L - 1) / 2 blocks: states before the skipped block are reused.

    Causal: C(s, l), s < l: mean over tokens of the L2 norm of the change that skipping s makes to z_(l+1) - z_l, over
    the mean norm of z_(l+1) - z_l; both of block l. Pruning: the loss with block s skipped less the loss, in nats.
    A skipped layer leaves the training distribution, and the threshold was picked by the benchmark's authors.
    Source: Csordas et al. 2025, "Do Language Models Use Their Depth Efficiently?".
    """
    L = model.shape.n_layers
    change, size = np.zeros((L, L)), np.zeros(L)
    loss, skipped_loss, tokens = 0.0, np.zeros(L), 0
    for k, (inputs, targets) in enumerate(batches):
        run, n = Pass(model, inputs), inputs.numel()
        z = [run.z(depth, state) for depth, state in enumerate(run.states)]
        done = [after - before for before, after in pairwise(z)]
        size += [float(torch.linalg.vector_norm(step, dim=-1).double().sum()) for step in done]
        for s in range(L):
            state = run.skip(s)
            before = run.z(s + 1, state)
            for block, state in enumerate(run.onwards(s + 1, state), s + 1):  # noqa: B020
                after = run.z(block + 1, state)
                moved = torch.linalg.vector_norm(after - before - done[block], dim=-1)
                change[s, block] += float(moved.double().sum())
                before = after
            skipped_loss[s] += n * run.loss(state, targets)
            tick((k + (s + 1) / L) / len(batches))
        loss += n * run.loss(run.states[-1], targets)
        tokens += n
    with np.errstate(invalid="ignore", divide="ignore"):  # a block that does nothing has no score
        score = np.where(np.triu(np.ones((L, L)), 1) > 0, change / size, np.nan)
    rest = score[late(L) :]
    causal = Finding(
        {"skipped": np.arange(L), "block": np.arange(L)},
        {"score": score},
        {"share_late": float(share_above(rest, np.array([CAUSAL_THRESHOLD]))[0])},
        share_above(rest),
    )
    increase = skipped_loss / tokens - loss / tokens
    pruning = Finding(
        {"skipped": np.arange(L)},
        {"loss_increase": increase},
        {"least": float(increase.min()), "median_late": median(increase[late(L) :])},
    )
    return causal, pruning
