"""The one model: LLaMA-style attention and SwiGLU branches, connected over depth by whatever topology it is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from depthlaw.archs.errors import ShapeError
from depthlaw.archs.ops import rms_norm, widened
from depthlaw.archs.shape import Shape
from depthlaw.archs.topology import Param, State, Topology

INIT_STD = 0.02
INIT_CUT = 3.0  # in standard deviations
ROPE_THETA = 10_000.0
WRITTEN_OUT = 256  # longest sequence whose bf16 attention on a CPU is not left to the fused kernel


def rope_tables(
    seq_len: int, head_dim: int, device: torch.device | None = None, theta: float = ROPE_THETA
) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, head_dim), for `rotate`: Su et al. 2021 in LLaMA's half-split layout.

    Both halves are repeated, and the sign that the left half of the turned vector has is in its sines.
    """
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float64, device=device)[:, None] * inverse
    return angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], -1)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary embedding of each head: pairs (k, k + head_dim / 2) turn by position times frequency."""
    left, right = x_BHTK.chunk(2, -1)
    return torch.addcmul(x_BHTK * cos_TK, torch.cat([right, left], -1), sin_TK)


class KVCache:
    """Preallocated keys and values of one attention layer, (B, G, capacity, head_dim), and how many tokens are in."""

    def __init__(self, batch: int, capacity: int, shape: Shape, like: Tensor) -> None:
        size = (batch, shape.n_kv_heads, capacity, shape.head_dim)
        self.keys, self.values = like.new_empty(size), like.new_empty(size)
        self.length = 0

    def append(self, keys_BGTK: Tensor, values_BGTK: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, the new ones included."""
        start, self.length = self.length, self.length + keys_BGTK.shape[2]
        self.keys.narrow(2, start, self.length - start).copy_(keys_BGTK)  # half the calls that indexing makes
        self.values.narrow(2, start, self.length - start).copy_(values_BGTK)
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)


class Context(NamedTuple):
    """What a branch needs beside its input: rotation tables of its tokens and, when decoding, this layer's cache."""

    rope: tuple[Tensor, Tensor]
    cache: KVCache | None = None


class Attention(nn.Module):
    """Causal MHA or GQA with rotary embedding, no biases. qkv (d + 2 d_kv, d) in that order of rows, out (d, d)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = shape.n_heads, shape.n_kv_heads, shape.head_dim
        self.qkv = nn.Parameter(torch.empty(shape.d_model + 2 * shape.d_kv, shape.d_model))
        self.out = nn.Parameter(torch.empty(shape.d_model, shape.d_model))

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view) of each weight matrix that starts on its own terms."""
        d_kv = self.n_kv_heads * self.head_dim
        yield from zip("qkv", torch.split(self.qkv, [self.out.shape[0], d_kv, d_kv]), strict=True)
        yield "out", self.out

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        H, G = self.n_heads, self.n_kv_heads
        # Splits and not slices: the backward pass of a slice fills a whole tensor with zeros.
        qk_BHTK, v_BGTK = torch.split_with_sizes(self._heads(x_BTD), [H + G, G], 1)
        q_BHTK, k_BGTK = torch.split_with_sizes(rotate(qk_BHTK, *context.rope), [H, G], 1)
        if context.cache is None:
            mixed = causal_attention(q_BHTK, k_BGTK, v_BGTK)
        else:
            k_BGTK, v_BGTK = context.cache.append(k_BGTK, v_BGTK)
            T, S = q_BHTK.shape[2], k_BGTK.shape[2]
            seen_TS = _seen(T, S, x_BTD.device) if T > 1 else None
            mixed = F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, attn_mask=seen_TS, enable_gqa=G != H)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out)

    def over_depth(
        self, x_BTD: Tensor, context: Context, depth: Sequence[tuple[Tensor, Tensor]], rotated: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One softmax over the causal keys and, token by token, the `depth` keys; also what depth gets: (keys, values).

        depth: (B, G, T, head_dim) pairs.
        """
        H, G = self.n_heads, self.n_kv_heads
        q_BHTK, k_BGTK, v_BGTK = torch.split(self._heads(x_BTD), [H, G, G], 1)
        own = (k_BGTK, v_BGTK)
        turned_BHTK, k_BGTK = torch.split(rotate(torch.cat([q_BHTK, k_BGTK], 1), *context.rope), [H, G], 1)
        if context.cache is not None:
            k_BGTK, v_BGTK = context.cache.append(k_BGTK, v_BGTK)
        asking_BHTK = turned_BHTK if rotated else q_BHTK
        # Kept for the backward pass are the inputs, which others keep anyway, and not scores that grow with depth.
        mixed_BHTK = checkpoint(
            attend_over_depth,
            turned_BHTK,
            k_BGTK,
            v_BGTK,
            asking_BHTK,
            depth,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        return F.linear(mixed_BHTK.transpose(1, 2).flatten(2), self.out), own

    def _heads(self, x_BTD: Tensor) -> Tensor:
        """Query, key and value heads, (B, H + 2 G, T, head_dim)."""
        return F.linear(x_BTD, self.qkv).view(*x_BTD.shape[:2], -1, self.head_dim).transpose(1, 2)


def causal_attention(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v over the tokens up to each; query heads share key heads in order.

    In bf16 on a CPU, torch's fused attention takes four times as long as its parts (two to three at T = 256): there a
    short sequence is written out, with the softmax in fp32.
    """
    H, G, T = q_BHTK.shape[1], k_BGTK.shape[1], q_BHTK.shape[2]
    device = q_BHTK.device.type
    narrow = v_BGTK.dtype == torch.bfloat16
    if not (narrow and device == "cpu" and T <= WRITTEN_OUT):
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=G != H)
    with torch.autocast(device, enabled=False):
        q = (q_BHTK * q_BHTK.shape[-1] ** -0.5).to(torch.bfloat16).unflatten(1, (G, -1))  # (B, G, H / G, T, K)
        scores = (q @ k_BGTK.to(torch.bfloat16).unsqueeze(2).transpose(3, 4)).masked_fill(
            ~_seen(T, T, q.device), -torch.inf
        )
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(torch.bfloat16)
        return (weights @ v_BGTK.unsqueeze(2)).flatten(1, 2)


def attend_over_depth(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, asking_BHTK: Tensor, depth: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """softmax over [q k^T of the causal keys | asking . key of each depth pair, token by token] times the values.

    Written out, for no fused attention takes keys of the query's own token. Scale 1 / sqrt(head_dim); query heads share
    key heads in order. The last T of the S keys are the queries' own tokens.
    """
    G, S = k_BGSK.shape[1:3]
    q, asking = (x.unflatten(1, (G, -1)) for x in (q_BHTK, asking_BHTK))  # (B, G, H / G, T, K)
    causal = (q @ k_BGSK.unsqueeze(2).transpose(3, 4)).masked_fill(~_seen(q.shape[3], S, q.device), -torch.inf)
    over_depth = [(asking * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys, _ in depth]
    weights = torch.softmax(torch.cat([causal, *over_depth], -1) * q.shape[-1] ** -0.5, -1)
    mixed: Tensor = weights[..., :S] @ v_BGSK.unsqueeze(2)
    for j, (_, values) in enumerate(depth):
        mixed = torch.addcmul(mixed, weights[..., S + j : S + j + 1], values.unsqueeze(2))
    return mixed.flatten(1, 2)


def _seen(queries: int, keys: int, device: torch.device) -> Tensor:
    """Which keys each of the last `queries` tokens sees, (T, S) bool: itself and all before it."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), no biases. gate_up (2 d_ff, d) in that order of rows, down (d, d_ff)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * shape.d_ff, shape.d_model))
        self.down = nn.Parameter(torch.empty(shape.d_model, shape.d_ff))

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        yield from zip(("gate", "up"), self.gate_up.chunk(2), strict=True)
        yield "down", self.down

    def forward(self, x_BTD: Tensor, context: Context) -> Tensor:
        if torch.is_grad_enabled():  # two products: element-wise passes over halves of one are slower than over wholes
            gate, up = (F.linear(x_BTD, matrix) for matrix in self.gate_up.chunk(2))
        else:
            gate, up = F.linear(x_BTD, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


@torch.no_grad()
def draw(tensor: Tensor, generator: torch.Generator) -> None:
    """Fills a matrix with the backbone's start: normal, std 0.02, cut at 3 std."""
    nn.init.trunc_normal_(tensor, 0.0, INIT_STD, -INIT_CUT * INIT_STD, INIT_CUT * INIT_STD, generator=generator)


class InContext:
    """A branch with the context of this pass: what a topology's `run` calls."""

    __slots__ = ("branch", "context")

    def __init__(self, branch: nn.Module, context: Context) -> None:
        self.branch, self.context = branch, context

    def __call__(self, x_BTD: Tensor) -> Tensor:
        return self.branch(x_BTD, self.context)  # type: ignore[no-any-return]

    def over_depth(
        self, x_BTD: Tensor, depth: Sequence[tuple[Tensor, Tensor]], rotated: bool
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.branch.over_depth(x_BTD, self.context, depth, rotated)  # type: ignore[operator, no-any-return]


class DepthParams(nn.Module):
    """The tensors that a topology declares for one sublayer, as attributes, and the depth of the model they are in."""

    def __init__(self, declared: dict[str, Param], n_layers: int) -> None:
        super().__init__()
        self.declared, self.n_layers = declared, n_layers
        for name, param in declared.items():
            self.register_parameter(name, nn.Parameter(torch.empty(param.shape)))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        for name, param in self.declared.items():
            tensor = getattr(self, name)
            if param.start is None:
                draw(tensor, generator)
                continue
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
        self.depth = nn.ModuleList(
            DepthParams(dict(topology.params(i, shape)), shape.n_layers) for i in range(2 * shape.n_layers + 1)
        )
        self.final_norm = nn.Parameter(torch.empty(shape.d_model))
        self.head = nn.Parameter(torch.empty(shape.vocab_size, shape.d_model))
        self.rope_theta = ROPE_THETA  # a checkpoint from elsewhere may have another
        self._rope: tuple[Tensor, Tensor] | None = None
        # Activation checkpointing: keep for the backward pass only the state between blocks, and compute them again.
        self.recompute = False

    @torch.no_grad()
    def reset(self, seed: int) -> Model:
        """Starting values: every matrix normal with std 0.02 cut at 3 std, gains 1, the topology's as it declares them.

        Branches are drawn first and in one order, so that two topologies of one shape and seed start from the same
        branches, up to the topology's own `init_scale`.
        """
        generator = torch.Generator(device=self.head.device).manual_seed(seed)
        draw(self.embedding, generator)
        draw(self.head, generator)
        for i, branch in enumerate(self.branches):
            for tensor in branch.parameters():
                draw(tensor, generator)
            for name, matrix in branch.matrices():  # type: ignore[operator]
                matrix.mul_(self.topology.init_scale(i, name, self.shape))
        self.final_norm.fill_(1.0)
        for depth in self.depth:
            depth.reset(generator)  # type: ignore[operator]
        return self

    def decayed(self) -> Iterator[tuple[str, Tensor, bool]]:
        """(name, tensor, is it decayed) of every parameter: matrices are, gains are not, the topology's as declared."""
        declared = {
            f"depth.{i}.{name}": param.decay
            for i, depth in enumerate(self.depth)
            for name, param in depth.declared.items()  # type: ignore[operator, union-attr]
        }
        for name, tensor in self.named_parameters():
            yield name, tensor, declared.get(name, tensor.ndim == 2)

    def rope(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tables of positions start .. stop - 1, kept from call to call; a step of decoding must not make them anew."""
        device = self.head.device
        if self._rope is None or self._rope[0].shape[0] < stop or self._rope[0].device != device:
            self._rope = rope_tables(max(256, 2 * stop), self.shape.head_dim, device, self.rope_theta)
        cos, sin = self._rope
        return cos[start:stop].to(dtype), sin[start:stop].to(dtype)

    def new_caches(self, batch: int, capacity: int) -> list[KVCache]:
        """Empty caches, one an attention layer, for `capacity` tokens of each of `batch` sequences."""
        return [KVCache(batch, capacity, self.shape, self.head) for _ in range(self.shape.n_layers)]

    def hidden(self, tokens_BT: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """What the head reads: the final norm's output (B, T, d).

        With caches, the tokens follow those already in them, and are added.
        """
        start = caches[0].length if caches else 0
        x_BTD = F.embedding(tokens_BT, self.embedding)
        rope = self.rope(start, start + tokens_BT.shape[1], x_BTD.dtype)
        state = self.topology.start(x_BTD)
        sublayers = list(zip(self.branches, self.depth, strict=False))
        recompute = self.recompute and torch.is_grad_enabled()
        for i in range(0, len(sublayers), 2):
            context = Context(rope, caches[i // 2] if caches else None)
            block = (i, sublayers[i : i + 2], state, context)
            if recompute:
                state = checkpoint(self._block, *block, use_reentrant=False, preserve_rng_state=False)
            else:
                state = self._block(*block)
        return rms_norm(self.topology.readout(self.depth[-1], state), self.final_norm)

    def _block(
        self, first: int, sublayers: Sequence[tuple[nn.Module, nn.Module]], state: State, context: Context
    ) -> State:
        """An attention and a feed-forward, with what the topology does around each."""
        topology = self.topology
        for i, (branch, p) in enumerate(sublayers, first):
            x_BTD, carry = topology.read(i, p, state)
            out_BTD, carry = topology.run(i, p, InContext(branch, context), x_BTD, carry)
            state = topology.write(i, p, state, out_BTD, carry)
        return state

    @torch.inference_mode()
    def decode(self, tokens_BT: Tensor, caches: Sequence[KVCache]) -> Tensor:
        """Logits (B, V) that follow the last of these tokens, which are added to the caches."""
        return F.linear(self.hidden(tokens_BT, caches)[:, -1], self.head)

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
