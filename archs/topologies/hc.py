"""hc: Hyper-Connections, m residual streams with learned, input-dependent mixing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topologies.streams import MultiStream
from depthlaw.archs.topology import Param, Params, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from depthlaw.archs import ops
    from depthlaw.archs.topologies.streams import Streams
else:
    from depthlaw.archs.lazy import ops, torch


@register
@dataclass(frozen=True)
class HC(MultiStream):
    """The coefficients of each stream are learned numbers and a bounded function of its own state:

        [r | A] = static + s_1 tanh(norm(H) W),      b = static + s_2 tanh(norm(H) w)

    with norm a gain-free RMS norm of each stream. Starts as Pre-LN: r = e_(i mod m), A = I, b = 1, W = w = 0, s = 0.01.

    Source: Zhu et al. 2024, "Hyper-Connections", dynamic form; r and b are its alpha and beta.
    Shapes: read_mix (m, 1 + m), columns r then A; write_mix (m,); dynamic (d, m + 2), columns W then w; scales (2,).
    """

    name = "hc"

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

    def coefficients(self, p: Params, state: Streams) -> tuple[Tensor, Tensor]:
        m = self.streams
        dynamic_BTMK = torch.tanh(torch.stack([ops.normed_projection(h, p.dynamic) for h in state], 2))
        static_MK = torch.cat([p.read_mix, p.write_mix[:, None]], 1)
        scale_K = torch.cat([p.scales[:1].expand(1 + m), p.scales[1:]])
        mix_BTMK = torch.addcmul(static_MK, dynamic_BTMK, scale_K)  # columns r, A, b
        write_BTJM = torch.cat([mix_BTMK[..., 1 : 1 + m], mix_BTMK[..., 1 + m :].transpose(2, 3)], 2)
        return mix_BTMK[..., :1], write_BTJM

    def extra_params(self, shape: Shape) -> Count:
        m, d = self.streams, shape.d_model
        return 2 * shape.n_layers * (m * (m + 1) + m + d * (m + 1) + d + 2)

    def extra_flops(self, shape: Shape) -> Count:
        """A sublayer: coefficients 2 m d (m + 2), read 2 m d, streams 2 m^2 d, write 2 m d."""
        m = self.streams
        return 2 * shape.n_layers * shape.d_model * (2 * m * (m + 2) + 2 * m + 2 * m * m + 2 * m)
