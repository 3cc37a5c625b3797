"""pre_ln: the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlaw.archs.shape import Shape
from depthlaw.archs.topology import Param, Params, Topology, register

if TYPE_CHECKING:
    from torch import Tensor

    from depthlaw.archs import ops
else:
    from depthlaw.archs.lazy import ops


@register
@dataclass(frozen=True)
class PreLN(Topology):
    """h <- h + F_i(N_i(h)), one stream.

    Source: Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture", with RMSNorm as in LLaMA.
    Shapes: h_BTD, gain (d,).
    """

    name = "pre_ln"

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        return {"norm": Param((shape.d_model,), 1.0)} if i < 2 * shape.n_layers else {}

    def start(self, x_BTD: Tensor) -> Tensor:
        return x_BTD

    def read(self, i: int, p: Params, state: Tensor) -> tuple[Tensor, None]:
        return ops.rms_norm(state, p.norm), None

    def write(self, i: int, p: Params, state: Tensor, out_BTD: Tensor, carry: None) -> Tensor:
        return state + out_BTD

    def readout(self, p: Params, state: Tensor) -> Tensor:
        return state

    def with_depth_state(self, state: Tensor, z_BTD: Tensor) -> Tensor:
        return z_BTD
