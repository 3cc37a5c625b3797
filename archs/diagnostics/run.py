"""All diagnostics by name, and what must be said beside their numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from depthlaw.archs.backbone import Model
from depthlaw.archs.diagnostics.angular import angular_distance
from depthlaw.archs.diagnostics.cka import cka
from depthlaw.archs.diagnostics.dead_zone import dead_zone
from depthlaw.archs.diagnostics.finding import Batches, Finding
from depthlaw.archs.diagnostics.jacobian import jacobian
from depthlaw.archs.diagnostics.lens import logit_lens
from depthlaw.archs.diagnostics.paths import path_weights
from depthlaw.archs.diagnostics.permutation import permutation
from depthlaw.archs.diagnostics.rank import residual_rank
from depthlaw.archs.diagnostics.recomputation import recomputation
from depthlaw.archs.diagnostics.repetition import repetition
from depthlaw.archs.diagnostics.skips import skip_scores

# What is computed together, and what computes it. The slowest last.
GROUPS: Mapping[tuple[str, ...], Callable[..., Any]] = {
    ("angular",): angular_distance,
    ("lens", "early_exit"): logit_lens,
    ("paths",): path_weights,
    ("rank", "streams"): residual_rank,
    ("dead_zone",): dead_zone,
    ("cka",): cka,
    ("jacobian",): jacobian,
    ("causal", "pruning"): skip_scores,
    ("repetition",): repetition,
    ("recomputation",): recomputation,
    ("permutation",): permutation,
}

CAUTIONS = (
    "the thresholds 0.45 (causal) and 0.15 (permutation) were picked by the benchmark's authors: see the whole curves",
    "a skipped, swapped or repeated block leaves the training distribution; a large angle can be noise",
)


def diagnose(
    model: Model, batches: Batches, names: Collection[str], progress: Callable[[str, float], None]
) -> dict[str, Finding]:
    """The findings of those names that apply to the model. `progress` is told what runs and the fraction done of it.

    Leaves the model, its mode included, as it was.
    """
    found: dict[str, Finding] = {}
    training = model.training
    model.eval()
    try:
        for group, function in GROUPS.items():
            if not set(group) & set(names):
                continue
            title = ", ".join(group)
            result = function(model, batches, lambda done, title=title: progress(title, done))
            results = result if isinstance(result, tuple) else (result,)
            found |= {n: f for n, f in zip(group, results, strict=False) if n in names and f is not None}
    finally:
        model.train(training)
    return found


def batched(inputs: torch.Tensor, targets: torch.Tensor, tokens: int = 2048) -> Batches:
    """Windows (N, T) as batches of about `tokens` tokens: few enough that a block's work stays near the processor."""
    size = max(1, tokens // inputs.shape[1])
    return list(zip(inputs.split(size), targets.split(size), strict=True))
