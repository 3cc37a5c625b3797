"""RMS normalisation, the only normalisation of the backbone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from depthlaw.archs import lazy_torch as torch

EPS = 1e-6


def rms_norm(x: Tensor, gain: Tensor | None) -> Tensor:
    """x / sqrt(mean(x^2) + EPS) * gain over the last axis, statistics in fp32 (fp64 for fp64 input).

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". Shapes: x (..., d), gain (d,).
    """
    wide = widened(x)
    normed = torch.nn.functional.rms_norm(wide, wide.shape[-1:], None, EPS).to(x.dtype)
    return normed if gain is None else normed * gain.to(x.dtype)


def widened(x: Tensor) -> Tensor:
    """At least fp32, for statistics and losses."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
