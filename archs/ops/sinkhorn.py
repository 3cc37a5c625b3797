"""Sinkhorn normalisation to a doubly stochastic matrix, whose backward pass keeps only the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ITERATIONS = 20


def sinkhorn(logits: Tensor) -> Tensor:
    """exp(logits) with columns and rows normalised in turn, 20 times each, rows last. Shapes: (..., m, m).

    Rows sum to 1 to rounding; columns to 1e-4 for logits of standard deviation 0.5, and more slowly for larger ones.
    In fp32 or wider. Source: Sinkhorn and Knopp 1967.
    """
    with torch.autocast(logits.device.type, enabled=False):
        return _Sinkhorn.apply(logits)  # type: ignore[no-any-return, no-untyped-call]


def _iterate(logits: Tensor) -> Tensor:
    matrix: Tensor = torch.softmax(logits, -1)
    for _ in range(ITERATIONS):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


class _Sinkhorn(torch.autograd.Function):
    """The 40 intermediate matrices would be more than a stream at small width: they are computed again instead."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return _iterate(logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            found: Tensor = torch.autograd.grad(_iterate(logits), logits, grads[0])[0]
        return found
