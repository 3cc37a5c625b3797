"""The learning rate of every step. Steps are counted from 0, as they are about to be taken."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthlaw.platform.plan import TrialSpec


def rate(spec: TrialSpec, step: int) -> float:
    """The trial's learning rate at step 0 .. spec.steps - 1."""
    if spec.schedule.get("kind") == "wsd":
        numbers = spec.schedule
        return wsd(step, branch_step(spec), spec.steps, spec.lr, numbers["warmup_steps"], numbers["final"])
    return cosine(step, spec.steps, spec.lr, **spec.schedule)


def cosine(step: int, steps: int, peak: float, warmup: float, final: float) -> float:
    """Linear warm-up over `warmup` of the steps, then a cosine to `final` x peak.

    The last step has exactly final x peak, of however few steps: what is compared has decayed.
    """
    rise = round(warmup * steps)
    if step < min(rise, steps - 1):
        return peak * (step + 1) / rise
    done = 1.0 if step == steps - 1 else (step - rise) / (steps - 1 - rise)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


def wsd(step: int, branch: int, steps: int, peak: float, warmup_steps: int, final: float) -> float:
    """Warm-up, stable, decay: linear over `warmup_steps`, peak up to step `branch`, then 1 - sqrt to `final` x peak.

    Of the n = steps - branch steps of decay, step k = 0 .. n - 1 has final + (1 - final) (1 - sqrt(k / n)) of the peak,
    so that the first is still at the peak and the last is a little above `final`. The three phases are those of Hu et
    al. 2024 (MiniCPM, arXiv:2404.06395); 1 - sqrt is what Haegele et al. 2024 (arXiv:2405.18392) found to do better
    than a linear decay. Before `branch` nothing depends on `steps`.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if step < branch:
        return peak
    return peak * (final + (1 - final) * (1 - math.sqrt((step - branch) / (steps - branch))))


def branch_step(spec: TrialSpec) -> int:
    """Steps of a wsd trial before its decay, at least one of which there is."""
    return spec.steps - max(1, round(spec.schedule["decay"] * spec.steps))
