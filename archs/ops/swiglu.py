"""The gate of SwiGLU, whose backward pass writes both halves where they belong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [gate | up], halves of the last axis. Shapes: (..., 2 f) to (..., f)."""
    if not torch.is_grad_enabled():
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)
    return _SwiGLU.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    """dup = silu(gate) dy,   dgate = silu'(gate) up dy.

    Autograd would make each half and then join them: one more pass over the widest tensor of the model.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        opened = F.silu(gate)
        ctx.save_for_backward(gate_up, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, opened = ctx.saved_tensors
        (dy,) = grads
        gate, up = gate_up.chunk(2, -1)
        found = torch.empty_like(gate_up)
        d_gate, d_up = found.chunk(2, -1)
        torch.mul(opened, dy, out=d_up)
        torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=d_gate)
        return found
