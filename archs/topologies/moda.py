"""moda: Pre-LN whose attention also sees keys and values of the same token from all earlier sublayers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topology import Branch, Param, Params, Topology, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from depthlaw.archs import ops
else:
    from depthlaw.archs.lazy import ops, torch


class ModaState(NamedTuple):
    """The residual stream and the depth cache: (keys, values) of each earlier sublayer, (B, G, T, head_dim) each."""

    stream_BTD: Tensor
    cache: tuple[tuple[Tensor, Tensor], ...]


@register
@dataclass(frozen=True)
class MoDA(Topology):
    """h <- h + F_i(N_i(h)); attention is one softmax over its causal keys and the depth keys of the same token.

    The depth cache holds each attention's own keys before rotation and its values, and for each feed-forward the keys
    and values that an extra projection makes of its normed input (of all but the last, which nothing reads). Scale
    1 / sqrt(head_dim). The query meets depth keys before rotation, so that these logits do not depend on the absolute
    position; `rotated=True` scores the rotated query against them, as the published code does.

    Source: Zhu et al. 2026, "Mixture-of-Depths Attention", Pre-LN form.
    Shapes: depth_kv (2 d_kv, d), rows of keys first.
    """

    rotated: bool = False

    name = "moda"

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        if i == 2 * shape.n_layers:
            return {}
        own = {"norm": Param((shape.d_model,), 1.0)}
        if i % 2 == 1 and i < 2 * shape.n_layers - 1:
            own["depth_kv"] = Param((2 * shape.d_kv, shape.d_model), None, decay=True)
        return own

    def start(self, x_BTD: Tensor) -> ModaState:
        return ModaState(x_BTD, ())

    def read(self, i: int, p: Params, state: ModaState) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        return ops.rms_norm(state.stream_BTD, p.norm), state.cache

    def run(self, i: int, p: Params, branch: Branch, x_BTD: Tensor, carry: Any) -> tuple[Tensor, Any]:
        cache: tuple[tuple[Tensor, Tensor], ...] = carry
        if i % 2 == 0:
            out_BTD, own = branch.over_depth(x_BTD, cache, self.rotated)
            return out_BTD, (*cache, own)
        if i == 2 * p.n_layers - 1:
            return branch(x_BTD), cache
        kv = torch.nn.functional.linear(x_BTD, p.depth_kv).chunk(2, -1)
        head_dim = cache[0][0].shape[-1]
        keys, values = (t.unflatten(-1, (-1, head_dim)).transpose(1, 2) for t in kv)
        return branch(x_BTD), (*cache, (keys, values))

    def write(self, i: int, p: Params, state: ModaState, out_BTD: Tensor, carry: Any) -> ModaState:
        return ModaState(state.stream_BTD + out_BTD, carry)

    def readout(self, p: Params, state: ModaState) -> Tensor:
        return state.stream_BTD

    def with_depth_state(self, state: ModaState, z_BTD: Tensor) -> ModaState:
        return state._replace(stream_BTD=z_BTD)

    def extra_params(self, shape: Shape) -> Count:
        return 2 * shape.d_model * shape.d_kv * (shape.n_layers - 1)

    def extra_flops(self, shape: Shape) -> Count:
        """The extra projections, and 4 d for each depth key."""
        return 4 * shape.d_model * (shape.d_kv * (shape.n_layers - 1) + self.depth_reads(shape))

    def depth_reads(self, shape: Shape) -> Count:
        """Attention of block l sees 2 (l - 1) depth keys, l = 1 .. L: in all L (L - 1)."""
        return shape.n_layers * (shape.n_layers - 1)

    def state_width(self, shape: Shape) -> Count:
        """The stream, and keys and values of every sublayer but the last feed-forward."""
        return shape.d_model + 2 * shape.d_kv * (2 * shape.n_layers - 1)
