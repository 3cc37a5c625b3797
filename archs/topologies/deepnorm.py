"""deepnorm: Post-LN with an amplified residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies.pre_ln import PreLN
from depthlaw.archs.topology import Params, register

if TYPE_CHECKING:
    from torch import Tensor

    from depthlaw.archs import ops
else:
    from depthlaw.archs.lazy import ops


@register
@dataclass(frozen=True)
class DeepNorm(PreLN):
    """h <- N_i(alpha h + F_i(h)), alpha = (2 L)^(1/4). Differs from pre_ln by where its norm stands.

    V, O and the SwiGLU matrices start at beta = (8 L)^(-1/4) times the usual std, Q and K do not. Gate, up and down are
    scaled alike, as the published benchmark does, so a SwiGLU branch starts smaller by about beta^3.

    Source: Wang et al. 2022, "DeepNet: Scaling Transformers to 1,000 Layers", decoder-only coefficients.
    """

    name = "deepnorm"
    default_lr = 1e-3

    def read(self, i: int, p: Params, state: Tensor) -> tuple[Tensor, None]:
        return state, None

    def write(self, i: int, p: Params, state: Tensor, out_BTD: Tensor, carry: None) -> Tensor:
        return ops.rms_norm((2 * p.n_layers) ** 0.25 * state + out_BTD, p.norm)

    def write_weights(self, i: int, p: Params, state: Tensor, out_BTD: Tensor, carry: None) -> tuple[Tensor, Tensor]:
        """Of the stream alpha g / rms, of the output g / rms, channel by channel."""
        alpha = (2 * p.n_layers) ** 0.25
        own_BT1D = (ops.inverse_rms(alpha * state + out_BTD) * p.norm).unsqueeze(2)
        return alpha * own_BT1D.unsqueeze(2), own_BT1D

    def init_scale(self, i: int, matrix: str, shape: Shape) -> float:
        return 1.0 if matrix in ("q", "k") else float((8 * shape.n_layers) ** -0.25)
