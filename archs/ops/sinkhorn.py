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


def _iterate(logits: Tensor, keep: list[Tensor] | None = None) -> Tensor:
    """The matrix (m, m, N) of logits (..., m, m), and in `keep` the one after each normalisation.

    Tokens lie innermost: sums over an axis of 4 are a CPU's slowest, over whole vectors of tokens they cost a tenth.
    """
    matrix = torch.softmax(_tokens_last(logits), 1)
    if keep is not None:
        keep.append(matrix)
    for axis in (0, 1) * ITERATIONS:
        total = matrix.sum(axis, keepdim=True)
        if keep is None:
            matrix.div_(total)
        else:
            matrix = matrix / total
            keep.append(matrix)
    return matrix


def _tokens_last(matrix: Tensor) -> Tensor:
    m = matrix.shape[-1]
    return matrix.reshape(-1, m, m).permute(1, 2, 0).contiguous()


def _like_logits(matrix: Tensor, logits: Tensor) -> Tensor:
    return matrix.permute(2, 0, 1).reshape(logits.shape)


class _Sinkhorn(torch.autograd.Function):
    """In logarithms each normalisation is P = exp(p - logsumexp p), whose backward is g - P sum(g).

    The 40 intermediate matrices would be more than a stream at small width: they are computed again instead.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return _like_logits(_iterate(logits), logits)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        after: list[Tensor] = []
        found = _iterate(logits, after) * _tokens_last(grads[0])
        for step in range(len(after) - 1, -1, -1):  # rows first, by softmax, then columns and rows in turn
            found.addcmul_(after[step], found.sum(1 - step % 2, keepdim=True), value=-1)
        return _like_logits(found, logits)
