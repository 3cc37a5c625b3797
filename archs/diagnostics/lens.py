"""Logit lens: what each depth would already say, and what leaving there when sure would cost."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.finding import Batches, Finding, Tick, silent
from depthlaw.archs.diagnostics.passes import Pass
from depthlaw.archs.ops import widened

TOP = 5
CONFIDENCES = np.round(np.arange(0, 1.0001, 0.05), 2)


@torch.no_grad()
def logit_lens(model: Model, batches: Batches, tick: Tick = silent) -> tuple[Finding, Finding]:
    """(logit lens, early exit).

    Logit lens: each depth decoded as its next consumer reads it, through the final norm and the head. Cross-entropy in
    nats, KL(last || depth) in nats, and the share of the last depth's 5 likeliest tokens among the depth's. Source:
    nostalgebraist 2020, "interpreting GPT: the logit lens".

    Early exit: for each confidence c, every token leaves at the first depth whose likeliest token has a probability of
    at least c, and at the last depth if none has: the loss then, and the mean share of the blocks that ran. With c = 0
    all leave at the embedding. Nothing was trained to exit. Source: Schuster et al. 2022, "Confident Adaptive
    Language Modeling", without its calibration.
    """
    L = model.shape.n_layers
    figures, tokens = np.zeros((L + 1, 3)), 0
    exits = np.zeros((len(CONFIDENCES), 2))  # sums of loss and blocks
    for k, (inputs, targets) in enumerate(batches):
        run = Pass(model, inputs)
        last = F.log_softmax(widened(run.lens(L, run.states[L])), -1)
        top = last.topk(min(TOP, last.shape[-1]), -1).indices
        losses, sure = [], []
        for depth, state in enumerate(run.states):
            log_p = F.log_softmax(widened(run.lens(depth, state)), -1)
            loss = -log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            divergence = (last.exp() * (last - log_p)).sum(-1)
            common = (log_p.topk(top.shape[-1], -1).indices.unsqueeze(-1) == top.unsqueeze(-2)).any(-1)
            figures[depth] += [float(x.double().sum()) for x in (loss, divergence, common.double().mean(-1))]
            losses.append(loss)
            sure.append(log_p.amax(-1).exp())
            tick((k + (depth + 1) / (L + 1)) / len(batches))
        exits += _exits(torch.stack(losses), torch.stack(sure))
        tokens += inputs.numel()
    figures, exits = figures / tokens, exits / tokens
    lens = Finding(
        {"depth": np.arange(L + 1)},
        {"cross_entropy": figures[:, 0], "kl": figures[:, 1], "top5_overlap": figures[:, 2]},
        {"first_within_tenth": _first_within(figures[:, 0], 0.1)},
    )
    within = exits[exits[:, 0] <= figures[-1, 0] + 0.05, 1]
    early = Finding(
        {"confidence": CONFIDENCES},
        {"cross_entropy": exits[:, 0], "blocks_run": exits[:, 1] / L},
        {"least_blocks_within_0.05": float(within.min() / L) if len(within) else 1.0},
    )
    return lens, early


def _exits(loss_DBT: Tensor, sure_DBT: Tensor) -> np.ndarray:
    """Sums over tokens of the loss at the exit and its depth, one row a confidence."""
    rows = []
    for c in CONFIDENCES:
        leaves = sure_DBT >= float(c)
        leaves[-1] = True
        at = leaves.int().argmax(0, keepdim=True)  # the first
        rows.append([float(loss_DBT.gather(0, at).double().sum()), float(at.sum())])
    return np.array(rows)


def _first_within(losses: np.ndarray, nats: float) -> float:
    """The first depth, as a share of the last, from which on the loss stays within `nats` of the last one's."""
    beyond = np.flatnonzero(losses > losses[-1] + nats)
    return float((beyond[-1] + 1 if len(beyond) else 0) / (len(losses) - 1))
