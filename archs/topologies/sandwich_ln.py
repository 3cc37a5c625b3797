"""sandwich_ln: Pre-LN with a second norm on each branch's output (Peri-LN)."""

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
class SandwichLN(PreLN):
    """h <- h + N'_i(F_i(N_i(h))). Differs from pre_ln by the gain of the output norm, (d,) a sublayer.

    Source: Ding et al. 2021, "CogView" (sandwich LayerNorm); Kim et al. 2025, "Peri-LN".
    """

    name = "sandwich_ln"

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        own = super().params(i, shape)
        return {**own, "out_norm": Param((shape.d_model,), 1.0)} if own else own

    def write(self, i: int, p: Params, state: Tensor, out_BTD: Tensor, carry: None) -> Tensor:
        return state + ops.rms_norm(out_BTD, p.out_norm)

    def extra_params(self, shape: Shape) -> Count:
        return 2 * shape.n_layers * shape.d_model
