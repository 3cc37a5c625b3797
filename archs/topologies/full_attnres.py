"""full_attnres: every sublayer attends, over depth, to the embedding and all earlier sublayer outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlaw.archs.depth_view import Place, appended
from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topology import Param, Params, Topology, register

if TYPE_CHECKING:
    from torch import Tensor

    from depthlaw.archs import ops
else:
    from depthlaw.archs.lazy import ops


def mix_params(i: int, shape: Shape) -> Mapping[str, Param]:
    """Query and key gain of every mix, which sublayer 0 does not have, and the sublayers' own norm."""
    d = shape.d_model
    mix = {"query": Param((d,), 0.0), "key_norm": Param((d,), 1.0)} if i > 0 else {}
    return {"norm": Param((d,), 1.0), **mix} if i < 2 * shape.n_layers else mix


def mix_tensors(block: int, shape: Shape) -> Mapping[Place, Place]:
    """What travels with a block: its norms, and the query and key gain of the mixes that follow its sublayers."""
    return {
        (k, name): (2 * block + k, name)
        for k, names in enumerate((("norm",), ("norm", "query", "key_norm"), ("query", "key_norm")))
        for name in names
    }


@register
@dataclass(frozen=True)
class FullAttnRes(Topology):
    """Sublayer i reads N_i(sum_j a_ij v_j), a_i = softmax_j(w_i . N^k_i(v_j)), and appends its output to the sources.

    v_0 is the embedding, v_j the output of sublayer j - 1. Sublayer 0 reads the embedding itself, and one more mix
    with a query of its own feeds the final norm. Queries start at 0, so that the mix starts as the mean, which the
    norm makes equal to Pre-LN's sum. Each token attends to its own past in depth only.

    Source: Kimi Team 2026, "Attention Residuals", full form.
    Shapes: a source (B, T, d), query and key_norm (d,). The state is the tuple of sources.
    """

    name = "full_attnres"

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        return mix_params(i, shape)

    def start(self, x_BTD: Tensor) -> tuple[ops.Source, ...]:
        return (ops.source(x_BTD),)

    def read(self, i: int, p: Params, state: tuple[ops.Source, ...]) -> tuple[Tensor, None]:
        x_BTD = state[0].value_BTD if i == 0 else self.readout(p, state)
        return ops.rms_norm(x_BTD, p.norm), None

    def write(
        self, i: int, p: Params, state: tuple[ops.Source, ...], out_BTD: Tensor, carry: None
    ) -> tuple[ops.Source, ...]:
        return (*state, ops.source(out_BTD))

    def readout(self, p: Params, state: tuple[ops.Source, ...]) -> Tensor:
        if isinstance(state, ops.AfterSkip):
            newest: Tensor = state[-1].value_BTD
            return newest
        return ops.depth_mix(state, p.query * p.key_norm)

    def skip(self, i: int, p: Params, state: tuple[ops.Source, ...]) -> tuple[ops.Source, ...]:
        return ops.AfterSkip(state)

    def pre_norm(self, i: int, p: Params, state: tuple[ops.Source, ...]) -> Tensor:
        return state[0].value_BTD if i == 0 else self.readout(p, state)

    def read_weights(self, i: int, p: Params, state: tuple[ops.Source, ...]) -> Tensor:
        if i == 0:
            return super().read_weights(i, p, state)
        return ops.depth_weights(state, p.query * p.key_norm).unsqueeze(-1)

    def write_weights(
        self, i: int, p: Params, state: tuple[ops.Source, ...], out_BTD: Tensor, carry: None
    ) -> tuple[Tensor, Tensor]:
        return appended(len(state))

    def block_tensors(self, block: int, shape: Shape) -> Mapping[Place, Place]:
        return mix_tensors(block, shape)

    def extra_params(self, shape: Shape) -> Count:
        """Query and key gain for each sublayer after the first and for the readout."""
        return 4 * shape.n_layers * shape.d_model

    def extra_flops(self, shape: Shape) -> Count:
        """A mix over s sources costs 4 s d (logits and values)."""
        return 4 * shape.d_model * self.depth_reads(shape)

    def depth_reads(self, shape: Shape) -> Count:
        """Mix i reads i + 1 sources, i = 1 .. 2 L: in all L (2 L + 3)."""
        return shape.n_layers * (2 * shape.n_layers + 3)

    def state_width(self, shape: Shape) -> Count:
        return (2 * shape.n_layers + 1) * shape.d_model
