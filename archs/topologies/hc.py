"""hc: Hyper-Connections, m residual streams with learned, input-dependent mixing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topology import Param, Params, Topology, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from depthlaw.archs import ops
else:
    from depthlaw.archs.lazy import ops, torch


@register
@dataclass(frozen=True)
class HC(Topology):
    """Sublayer i reads one mix of the m streams and writes to all of them:

        x = N_i(sum_j alpha_j H_j),      H'_k = sum_j A_jk H_j + beta_k F_i(x)
        [alpha | A] = static + s_1 tanh(norm(H) W),      beta = static + s_2 tanh(norm(H) w)

    with norm a gain-free RMS norm of each stream. Starts as Pre-LN: alpha = e_(i mod m), A = I, beta = 1, W = w = 0,
    s = 0.01. The embedding is copied to all streams, the streams are summed at the end, and O and down start divided
    by sqrt(m).

    Source: Zhu et al. 2024, "Hyper-Connections", dynamic form.
    Shapes: the state is a tuple of m streams (B, T, d);
    read_mix (m, 1 + m), columns alpha then A; write_mix (m,); dynamic (d, m + 2), columns W then w;
    scales (2,).
    """

    streams: int = 4

    name = "hc"

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"hc: streams is {self.streams}; it must be at least 1")

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        if i == 2 * shape.n_layers:
            return {}
        m, d = self.streams, shape.d_model
        return {
            "norm": Param((d,), 1.0),
            "read_mix": Param((m, 1 + m), np.column_stack([np.eye(m)[i % m], np.eye(m)])),
            "write_mix": Param((m,), 1.0),
            "dynamic": Param((d, m + 2), 0.0, decay=True),
            "scales": Param((2,), 0.01),
        }

    def start(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return (x_BTD,) * self.streams

    def read(self, i: int, p: Params, state: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        m = self.streams
        mix_BTMK = self._coefficients(p, state)
        (x_BTD,) = ops.stream_mix(mix_BTMK[..., :1], state)
        # What `write` applies to the streams and the branch's output together: the rows of A, then beta.
        write_BTJM = torch.cat([mix_BTMK[..., 1 : 1 + m], mix_BTMK[..., 1 + m :].transpose(2, 3)], 2)
        return ops.rms_norm(x_BTD, p.norm), write_BTJM

    def _coefficients(self, p: Params, state: tuple[Tensor, ...]) -> Tensor:
        """Columns alpha, A, beta, (B, T, m, m + 2)."""
        m = self.streams
        dynamic_BTMK = torch.tanh(torch.stack([ops.normed_projection(h, p.dynamic) for h in state], 2))
        static_MK = torch.cat([p.read_mix, p.write_mix[:, None]], 1)
        scale_K = torch.cat([p.scales[:1].expand(1 + m), p.scales[1:]])
        return torch.addcmul(static_MK, dynamic_BTMK, scale_K)

    def write(self, i: int, p: Params, state: tuple[Tensor, ...], out_BTD: Tensor, carry: Tensor) -> tuple[Tensor, ...]:
        return ops.stream_mix(carry, (*state, out_BTD))

    def readout(self, p: Params, state: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(state).sum(0)

    def pre_norm(self, i: int, p: Params, state: tuple[Tensor, ...]) -> Tensor:
        if i == 2 * p.n_layers:
            return self.readout(p, state)
        (x_BTD,) = ops.stream_mix(self._coefficients(p, state)[..., :1], state)
        return x_BTD

    def read_weights(self, i: int, p: Params, state: tuple[Tensor, ...]) -> Tensor:
        if i == 2 * p.n_layers:
            return torch.ones(1, 1, self.streams, 1)
        return self._coefficients(p, state)[..., :1]

    def depth_state(self, i: int, p: Params, state: tuple[Tensor, ...]) -> Tensor:
        return torch.cat(state, -1)

    def with_depth_state(self, state: tuple[Tensor, ...], z_BTD: Tensor) -> tuple[Tensor, ...]:
        return z_BTD.chunk(self.streams, -1)

    def write_weights(
        self, i: int, p: Params, state: tuple[Tensor, ...], out_BTD: Tensor, carry: Tensor
    ) -> tuple[Tensor, Tensor]:
        return carry[..., :-1, :, None], carry[..., -1, :, None]

    def streams_of(self, state: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(state, 2)

    def extra_params(self, shape: Shape) -> Count:
        m, d = self.streams, shape.d_model
        return 2 * shape.n_layers * (m * (m + 1) + m + d * (m + 1) + d + 2)

    def extra_flops(self, shape: Shape) -> Count:
        """A sublayer: coefficients 2 m d (m + 2), read 2 m d, streams 2 m^2 d, write 2 m d."""
        m = self.streams
        return 2 * shape.n_layers * shape.d_model * (2 * m * (m + 2) + 2 * m + 2 * m * m + 2 * m)

    def state_width(self, shape: Shape) -> Count:
        return 0 * shape.n_layers + self.streams * shape.d_model

    def init_scale(self, i: int, matrix: str, shape: Shape) -> float:
        return float(self.streams**-0.5) if matrix in ("out", "down") else 1.0
