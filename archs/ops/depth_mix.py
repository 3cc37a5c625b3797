"""Softmax attention over depth that keeps its sources and nothing else.

Stacking the sources for each mix would save O(L^2 B T d) values for the backward pass. Here every mix shares the
sources (which their producers keep anyway) and recomputes its weights, so that what is saved grows linearly with L.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from depthlaw.archs.ops.norm import inverse_rms, widened


class Source(NamedTuple):
    """One depth state (B, T, d) and 1 / sqrt(mean square + eps) of each token (B, T, 1), a constant of the graph."""

    value_BTD: Tensor
    inv_rms_BT1: Tensor


class AfterSkip(tuple):  # type: ignore[type-arg]
    """The state of attention over depth behind a skipped block: the next mix over it returns its newest source."""


def source(value_BTD: Tensor) -> Source:
    with torch.no_grad():
        return Source(value_BTD, inverse_rms(widened(value_BTD)))


def depth_mix(sources: Sequence[Source], query_D: Tensor) -> Tensor:
    """sum_j a_j v_j with a = softmax_j(query . v_j / rms(v_j)), token by token.

    `query_D` is the learned query times the gain of its key norm. Shapes: sources (B, T, d), query (d,), result
    (B, T, d). Computed and returned in fp32 or wider also where autocast makes the sources bf16.
    """
    values, inv_rms = zip(*sources, strict=True)
    with torch.autocast(query_D.device.type, enabled=False):
        return _DepthMix.apply(query_D, *values, *inv_rms)  # type: ignore[no-any-return, no-untyped-call]


def depth_weights(sources: Sequence[Source], query_D: Tensor) -> Tensor:
    """The weights a_j of `depth_mix`, (B, T, S)."""
    values, inv_rms = zip(*sources, strict=True)
    return _weights(query_D, torch.cat(inv_rms, -1), values)[1]


def _weights(query_D: Tensor, inv_rms_BTS: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(logits, softmax weights), both (B, T, S)."""
    logits_BTS = torch.stack([v.to(query_D.dtype) @ query_D for v in values], -1) * inv_rms_BTS
    return logits_BTS, torch.softmax(logits_BTS, -1)


def _parts(sources: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
    """Values, and 1 / rms of each (B, T, S), from values followed by inverse norms."""
    half = len(sources) // 2
    return sources[:half], torch.cat(tuple(sources[half:]), -1)


class _DepthMix(torch.autograd.Function):
    """Backward, with G the gradient of the result and r_j = 1 / rms(v_j):

    da_j = G . v_j,   dl_j = a_j (da_j - sum_k a_k da_k)
    dv_j = a_j G + dl_j r_j (q - l_j r_j v_j / d),   dq = sum over tokens and j of dl_j r_j v_j
    """

    @staticmethod
    def forward(ctx: Any, query_D: Tensor, *sources: Tensor) -> Tensor:
        # The sources and their norms as they are: joined, each mix would keep a copy, and they would grow as L^2.
        ctx.save_for_backward(query_D, *sources)
        values, inv_rms_BTS = _parts(sources)
        _, weights_BTS = _weights(query_D, inv_rms_BTS, values)
        out_BTD = values[0] * weights_BTS[..., :1]
        for j in range(1, len(values)):
            out_BTD.addcmul_(values[j], weights_BTS[..., j : j + 1])
        return out_BTD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_BTD,) = grads
        query_D, *sources = ctx.saved_tensors
        values, inv_rms_BTS = _parts(sources)
        logits_BTS, weights_BTS = _weights(query_D, inv_rms_BTS, values)
        d_weights_BTS = torch.stack([(grad_BTD * v).sum(-1) for v in values], -1)
        d_logits_BTS = weights_BTS * (d_weights_BTS - (weights_BTS * d_weights_BTS).sum(-1, keepdim=True))
        along_q_BTS = d_logits_BTS * inv_rms_BTS
        along_v_BTS = along_q_BTS * logits_BTS * inv_rms_BTS / -query_D.shape[0]
        d_query_D = torch.zeros_like(query_D)
        d_values = []
        for j, v in enumerate(values):
            d_value = grad_BTD * weights_BTS[..., j : j + 1]
            d_value.addcmul_(v, along_v_BTS[..., j : j + 1])
            d_value.addcmul_(query_D, along_q_BTS[..., j : j + 1])
            d_values.append(d_value.to(v.dtype))
            d_query_D += v.to(query_D.dtype).flatten(0, 1).T @ along_q_BTS[..., j].flatten()
        return d_query_D, *d_values, *(None for _ in values)
