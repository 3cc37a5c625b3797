"""RMS normalisation, the only normalisation of the backbone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPS = 1e-6


def widened(x: Tensor) -> Tensor:
    """At least fp32, for statistics and losses."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + EPS) * gain over the last axis, statistics in fp32 (fp64 for fp64 input).

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization". Shapes: x (..., d), gain (d,).
    """
    if not torch.is_grad_enabled():  # one call, which for a single token is a third of the time
        if x.dtype == gain.dtype:
            return torch.rms_norm(x, gain.shape, gain, EPS)
        return torch.rms_norm(widened(x), gain.shape, gain, EPS).to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return _RMSNorm.apply(widened(x), gain).to(x.dtype)  # type: ignore[no-any-return, no-untyped-call]


def inverse_rms(x: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + EPS) over the last axis, which stays as one: (..., 1)."""
    return torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + EPS)


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / rms(x):   dx = r g dy - x r^3 (x . g dy) / d,   dg = sum over tokens of r x dy.

    torch has no fused backward for this on a CPU; its composite takes two to three times as long.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        r = inverse_rms(x)
        ctx.save_for_backward(x, gain, r)
        return (x * r).mul_(gain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, gain, r = ctx.saved_tensors
        (dy,) = grads
        x_dy = (x * dy).flatten(0, -2)
        d_gain = r.flatten() @ x_dy
        along_x = (x_dy @ gain).view_as(r) * r.pow(3) / -x.shape[-1]
        return (dy * r).mul_(gain).addcmul_(x, along_x), d_gain
