"""mhc: manifold-constrained Hyper-Connections, streams that mix by doubly stochastic matrices."""

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
class MHC(MultiStream):
    """r = sigma(r~), b = 2 sigma(b~), A = Sinkhorn(A~), doubly stochastic; the streams are averaged at the end.

    The logits [r~ | b~ | A~] = alpha * (z W) + bias, with z the RMS-normalised m d numbers of all streams and one alpha
    for each of the three parts. Starts: alpha = 0.01, W = 0; read bias +8 on stream i mod m and -8 elsewhere, write
    bias 0, residual bias 0 on the diagonal and -gap off it.

    `gap`: how near to the identity A starts (8: nearly; 0: the uniform mix, whose product has rank 1). The published
    start is not known. `free`: from 0, doubly stochastic, to 1, any matrix of spectral norm at most 1: A = (1 - free)
    Sinkhorn(A~) + free E / max(1, sqrt(|E|_1 |E|_inf)), with E the same logits without their starting gap, plus the
    identity. The spectral norm of A stays at most 1, and its start near the identity.

    Source: Xie et al. 2025, "mHC: Manifold-Constrained Hyper-Connections".
    Shapes: dynamic (m d, 2 m + m^2); bias (2 m + m^2,); alphas (3,).
    """

    gap: float = 8.0
    free: float = 0.0

    name = "mhc"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.free <= 1:
            raise ValueError(f"mhc: free is {self.free}; it must lie between 0 (doubly stochastic) and 1")

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        if i == 2 * shape.n_layers:
            return {}
        m, d = self.streams, shape.d_model
        read = np.where(np.arange(m) == i % m, 8.0, -8.0)
        residual = -self.gap * (1 - np.eye(m))
        return {
            "norm": Param((d,), 1.0),
            "dynamic": Param((m * d, 2 * m + m * m), 0.0, decay=True),
            "bias": Param((2 * m + m * m,), np.concatenate([read, np.zeros(m), residual.ravel()])),
            "alphas": Param((3,), 0.01),
        }

    def coefficients(self, p: Params, state: Streams) -> tuple[Tensor, Tensor]:
        m = self.streams
        logits_BTK = ops.normed_projection(torch.cat(state, -1), p.dynamic)
        alpha_K = torch.cat([p.alphas[0].expand(m), p.alphas[1].expand(m), p.alphas[2].expand(m * m)])
        read_BTM, write_BTM, mix_BTMM = torch.addcmul(p.bias, logits_BTK, alpha_K).split([m, m, m * m], -1)
        A_BTMM = self._residual(mix_BTMM.unflatten(-1, (m, m)))
        write_BTJM = torch.cat([A_BTMM, 2 * torch.sigmoid(write_BTM).unsqueeze(2)], 2)
        return torch.sigmoid(read_BTM).unsqueeze(-1), write_BTJM

    def _residual(self, logits_BTMM: Tensor) -> Tensor:
        stochastic_BTMM = ops.sinkhorn(logits_BTMM)
        if self.free == 0:
            return stochastic_BTMM
        m = self.streams
        E = logits_BTMM + torch.as_tensor(np.eye(m) + self.gap * (1 - np.eye(m))).to(logits_BTMM)
        bound = (E.abs().sum(-1).amax(-1) * E.abs().sum(-2).amax(-1)).sqrt().clamp(min=1)
        return (1 - self.free) * stochastic_BTMM + self.free * E / bound[..., None, None]

    def readout(self, p: Params, state: Streams) -> Tensor:
        return torch.stack(state).mean(0)

    @property
    def readout_weight(self) -> float:
        return 1 / self.streams

    def extra_params(self, shape: Shape) -> Count:
        m, d = self.streams, shape.d_model
        return 2 * shape.n_layers * ((m * d + 1) * (m * m + 2 * m) + 3)

    def extra_flops(self, shape: Shape) -> Count:
        """A sublayer: coefficients 2 m d (m^2 + 2 m), read 2 m d, streams 2 m^2 d, write 2 m d."""
        m = self.streams
        return 2 * shape.n_layers * shape.d_model * (2 * m * (m * m + 2 * m) + 4 * m + 2 * m * m)
