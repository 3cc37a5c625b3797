"""keel: Post-LN with a highway residual and a Pre-LN inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topologies.pre_ln import PreLN
from depthlaw.archs.topology import Param, Params, register

if TYPE_CHECKING:
    from torch import Tensor

    from depthlaw.archs import ops
else:
    from depthlaw.archs.lazy import ops


@register
@dataclass(frozen=True)
class Keel(PreLN):
    """h <- N'_i(alpha h + F_i(N_i(h))), alpha = 2 L. In the first block alpha is 1 and attention has no outer norm.

    Differs from pre_ln by the gain of the outer norm, (d,), in every sublayer but the first.

    Source: Chen and Wei 2026, "Post-LayerNorm Is Back: Stable, Expressive, and Deep" (Keel).
    """

    name = "keel"

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        own = super().params(i, shape)
        return {**own, "outer_norm": Param((shape.d_model,), 1.0)} if own and i > 0 else own

    def write(self, i: int, p: Params, state: Tensor, out_BTD: Tensor, carry: None) -> Tensor:
        if i == 0:
            return state + out_BTD
        return ops.rms_norm(self._alpha(i, p) * state + out_BTD, p.outer_norm)

    @staticmethod
    def _alpha(i: int, p: Params) -> int:
        return 1 if i == 1 else 2 * p.n_layers

    def write_weights(self, i: int, p: Params, state: Tensor, out_BTD: Tensor, carry: None) -> tuple[Tensor, Tensor]:
        """Of the stream alpha g / rms, of the output g / rms, channel by channel."""
        if i == 0:
            return super().write_weights(i, p, state, out_BTD, carry)
        alpha = self._alpha(i, p)
        own_BT1D = (ops.inverse_rms(alpha * state + out_BTD) * p.outer_norm).unsqueeze(2)
        return alpha * own_BT1D.unsqueeze(2), own_BT1D

    def extra_params(self, shape: Shape) -> Count:
        return (2 * shape.n_layers - 1) * shape.d_model
