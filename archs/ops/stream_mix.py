"""The two operations of multi-stream topologies, written so that no (B, T, m, m, d) product is ever formed.

Batched 4 x 4 matrix products are what a CPU does worst; a handful of multiply-adds over whole streams takes half the
time at d = 256. Both compute in fp32 or wider also where autocast makes a branch's output bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from depthlaw.archs.ops.norm import inverse_rms, widened


def stream_mix(weights_BTJK: Tensor, streams: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """K mixes of J streams, y_k = sum_j w_jk x_j token by token. Shapes: streams and results (B, T, d)."""
    with torch.autocast(weights_BTJK.device.type, enabled=False):
        return _StreamMix.apply(weights_BTJK, *streams)  # type: ignore[no-any-return, no-untyped-call]


def normed_projection(x_BTD: Tensor, matrix_DK: Tensor) -> Tensor:
    """(x / rms(x)) W with no gain, (B, T, K), without forming the normalised x."""
    with torch.autocast(x_BTD.device.type, enabled=False):
        return _NormedProjection.apply(widened(x_BTD), matrix_DK)  # type: ignore[no-any-return, no-untyped-call]


class _StreamMix(torch.autograd.Function):
    """dx_j = sum_k w_jk G_k,   dw_jk = x_j . G_k"""

    @staticmethod
    def forward(ctx: Any, weights_BTJK: Tensor, *streams: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weights_BTJK, *streams)
        return tuple(_weighted_sum(weights_BTJK[..., k], streams) for k in range(weights_BTJK.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        weights_BTJK, *streams = ctx.saved_tensors
        # The one product here that a batch of small matrix products does faster, and only with d innermost in both.
        d_weights_BTJK = torch.stack([x.to(grads[0].dtype) for x in streams], 2) @ torch.stack(grads, 2).transpose(2, 3)
        d_streams = [_weighted_sum(weights_BTJK[..., j, :], grads).to(x.dtype) for j, x in enumerate(streams)]
        return d_weights_BTJK, *d_streams


def _weighted_sum(weights_BTJ: Tensor, streams: Sequence[Tensor]) -> Tensor:
    total_BTD = streams[0] * weights_BTJ[..., :1]
    for j in range(1, len(streams)):
        total_BTD.addcmul_(streams[j], weights_BTJ[..., j : j + 1])
    return total_BTD


class _NormedProjection(torch.autograd.Function):
    """With r = 1 / rms(x), P = r x W:   dx = r dP W^T - x r^2 (dP . P) / d,   dW = sum over tokens of x^T (r dP)"""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, matrix_DK: Tensor) -> Tensor:
        r_BT1 = inverse_rms(x_BTD)
        # A handful of columns: BLAS takes two to four times as long where they are columns of the result too.
        projected_BTK: Tensor = (matrix_DK.T @ x_BTD.flatten(0, -2).T).T.unflatten(0, x_BTD.shape[:-1]) * r_BT1
        ctx.save_for_backward(x_BTD, matrix_DK, r_BT1, projected_BTK)
        return projected_BTK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x_BTD, matrix_DK, r_BT1, projected_BTK = ctx.saved_tensors
        (grad_BTK,) = grads
        scaled_BTK = grad_BTK * r_BT1
        along_x_BT1 = (grad_BTK * projected_BTK).sum(-1, keepdim=True) * r_BT1.square() / -x_BTD.shape[-1]
        d_x_BTD = (scaled_BTK @ matrix_DK.T).addcmul_(x_BTD, along_x_BT1)
        return d_x_BTD, (scaled_BTK.flatten(0, -2).T @ x_BTD.flatten(0, -2)).T
