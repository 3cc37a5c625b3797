"""The one model: LLaMA-style attention and SwiGLU branches, connected over depth by whatever topology it is given."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthlaw.archs.errors import ShapeError
from depthlaw.archs.ops import rms_norm, widened
from depthlaw.archs.shape import Shape
from depthlaw.archs.topology import Param, Topology

INIT_STD = 0.02
INIT_CUT = 3.0  # in standard deviations
ROPE_THETA = 10_000.0


def rope_tables(seq_len: int, head_dim: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, head_dim), for `rotate`: Su et al. 2021 in LLaMA's half-split layout.

    Both halves are repeated, and the sign that the left half of the turned vector has is in its sines.
    """
    inverse = ROPE_THETA ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float64, device=device)[:, None] * inverse
    return angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], -1)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding of each head: pairs (k, k + head_dim / 2) turn by position times frequency."""
    left, right = x_BHTK.chunk(2, -1)
    return torch.addcmul(x_BHTK * cos_TK, torch.cat([right, left], -1), sin_TK)


class Attention(nn.Module):
    """Causal MHA or GQA with rotary embedding, no biases. qkv (d + 2 d_kv, d) in that order of rows, out (d, d)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        self.qkv = nn.Parameter(torch.empty(shape.d_model + 2 * shape.d_kv, shape.d_model))
        self.out = nn.Parameter(torch.empty(shape.d_model, shape.d_model))

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        B, T, _ = x_BTD.shape
        H, G, K = self.n_heads, self.n_kv_heads, self.head_dim
        heads_BHTK = F.linear(x_BTD, self.qkv).view(B, T, H + 2 * G, K).transpose(1, 2)
        # Splits and not slices: the backward pass of a slice fills a whole tensor with zeros.
        qk_BHTK, v_BHTK = torch.split(heads_BHTK, [H + G, G], 1)
        q_BHTK, k_BHTK = torch.split(rotate(qk_BHTK, *rope), [H, G], 1)
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, enable_gqa=G != H)
        return F.linear(mixed_BHTK.transpose(1, 2).reshape(B, T, -1), self.out)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), no biases. gate_up (2 d_ff, d) in that order of rows, down (d, d_ff)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * shape.d_ff, shape.d_model))
        self.down = nn.Parameter(torch.empty(shape.d_model, shape.d_ff))

    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        gate, up = F.linear(x_BTD, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class DepthParams(nn.Module):
    """The tensors that a topology declares for one sublayer, as attributes."""

    def __init__(self, declared: dict[str, Param]) -> None:
        super().__init__()
        self.declared = declared
        for name, param in declared.items():
            self.register_parameter(name, nn.Parameter(torch.empty(param.shape)))

    @torch.no_grad()
    def reset(self) -> None:
        for name, param in self.declared.items():
            tensor = getattr(self, name)
            tensor.copy_(torch.as_tensor(np.broadcast_to(param.start, param.shape).copy(), dtype=tensor.dtype))


class Model(nn.Module):
    """Embedding, 2 L branches connected by the topology, final norm, untied head.

    Build it under `torch.device("meta")` to look at it without memory; `reset(seed)` then fills it once it has storage.
    """

    def __init__(self, shape: Shape, topology: Topology) -> None:
        super().__init__()
        self.shape, self.topology = shape, topology
        self.embedding = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model))
        self.branches = nn.ModuleList(kind(shape) for _ in range(shape.n_layers) for kind in (Attention, SwiGLU))
        self.depth = nn.ModuleList(DepthParams(dict(topology.params(i, shape))) for i in range(2 * shape.n_layers + 1))
        self.final_norm = nn.Parameter(torch.empty(shape.d_model))
        self.head = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model))
        self._rope: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def reset(self, seed: int) -> Model:
        """Starting values: every matrix normal with std 0.02 cut at 3 std, gains 1, the topology's as it declares them.

        Branches are drawn first and in one order, so that two topologies of one shape and seed start from the same
        branches (up to the topology's own `out_scale`).
        """
        generator = torch.Generator(device=self.head.device).manual_seed(seed)
        out_scale = self.topology.out_scale(self.shape)
        for tensor in (self.embedding, self.head):
            self._draw(tensor, INIT_STD, generator)
        for branch in self.branches:
            for name, tensor in branch.named_parameters():
                self._draw(tensor, INIT_STD * (out_scale if name in ("out", "down") else 1.0), generator)
        self.final_norm.fill_(1.0)
        for depth in self.depth:
            depth.reset()  # type: ignore[operator]
        return self

    @staticmethod
    def _draw(tensor: Tensor, std: float, generator: torch.Generator) -> None:
        nn.init.trunc_normal_(tensor, 0.0, std, -INIT_CUT * std, INIT_CUT * std, generator=generator)

    def decayed(self) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, tensor, is it decayed) of every parameter: matrices are, gains are not, the topology's as declared."""
        declared = {
            f"depth.{i}.{name}": param.decay
            for i, depth in enumerate(self.depth)
            for name, param in depth.declared.items()  # type: ignore[operator, union-attr]
        }
        for name, tensor in self.named_parameters():
            yield name, tensor, declared.get(name, tensor.ndim == 2)

    def rope(self, seq_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables for the first `seq_len` positions, kept from call to call."""
        device = self.head.device
        if self._rope is None or self._rope[0].shape[0] < seq_len or self._rope[0].device != device:
            self._rope = rope_tables(seq_len, self.shape.head_dim, device)
        cos, sin = self._rope
        return cos[:seq_len].to(dtype), sin[:seq_len].to(dtype)

    def hidden(self, tokens_BT: Tensor) -> Tensor:
        """What the head reads: the final norm's output (B, T, d)."""
        x_BTD = F.embedding(tokens_BT, self.embedding)
        rope = self.rope(tokens_BT.shape[1], x_BTD.dtype)
        topology = self.topology
        state = topology.start(x_BTD)
        for i, (branch, p) in enumerate(zip(self.branches, self.depth, strict=False)):
            x_BTD, carry = topology.read(i, p, state)
            state = topology.write(i, p, state, branch(x_BTD, rope), carry)
        return rms_norm(topology.readout(self.depth[-1], state), self.final_norm)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        return F.linear(self.hidden(tokens_BT), self.head)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean next-token loss in nats (a scalar, fp32 or wider)."""
        return F.cross_entropy(widened(self.logits(tokens_BT)).flatten(0, 1), targets_BT.flatten())


def build(shape: Shape, topology: Topology, seed: int) -> Model:
    """A model ready to train. Raises ShapeError if the shape stands for a lattice and not for one model."""
    if isinstance(shape.n_layers, np.ndarray):
        raise ShapeError("a lattice of shapes is for counting; build one model from whole numbers")
    return Model(shape, topology).reset(seed)
