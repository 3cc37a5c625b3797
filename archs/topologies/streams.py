"""What topologies with several residual streams have in common; `hc` and `mhc` say which coefficients mix them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topology import Params, Topology

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from depthlaw.archs import ops

    Streams = tuple[Tensor, ...]
else:
    from depthlaw.archs.lazy import ops, torch


@dataclass(frozen=True)
class MultiStream(Topology):
    """Sublayer i reads one mix of m = `streams` streams and writes to all of them:

        x = N_i(sum_j r_j H_j),      H'_k = sum_j A_jk H_j + b_k F_i(x)

    The embedding is copied to all streams, the streams are summed at the end, and O and down start divided by sqrt(m).
    A variant says how r, A and b come from the state, a tuple of m streams (B, T, d).
    """

    streams: int = 4

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"{self.name}: streams is {self.streams}; it must be at least 1")

    @abstractmethod
    def coefficients(self, p: Params, state: Streams) -> tuple[Tensor, Tensor]:
        """r (B, T, m, 1), and what is applied to the streams and the branch's output together: the rows of A, then b,
        (B, T, m + 1, m)."""

    def start(self, x_BTD: Tensor) -> Streams:
        return (x_BTD,) * self.streams

    def read(self, i: int, p: Params, state: Streams) -> tuple[Tensor, Tensor]:
        read_BTM1, write_BTJM = self.coefficients(p, state)
        (x_BTD,) = ops.stream_mix(read_BTM1, state)
        return ops.rms_norm(x_BTD, p.norm), write_BTJM

    def write(self, i: int, p: Params, state: Streams, out_BTD: Tensor, carry: Tensor) -> Streams:
        return ops.stream_mix(carry, (*state, out_BTD))

    def readout(self, p: Params, state: Streams) -> Tensor:
        return torch.stack(state).sum(0)

    @property
    def readout_weight(self) -> float:
        """Of each stream in the readout."""
        return 1.0

    def pre_norm(self, i: int, p: Params, state: Streams) -> Tensor:
        if i == 2 * p.n_layers:
            return self.readout(p, state)
        (x_BTD,) = ops.stream_mix(self.coefficients(p, state)[0], state)
        return x_BTD

    def read_weights(self, i: int, p: Params, state: Streams) -> Tensor:
        if i == 2 * p.n_layers:
            return torch.full((1, 1, self.streams, 1), self.readout_weight)
        return self.coefficients(p, state)[0]

    def depth_state(self, i: int, p: Params, state: Streams) -> Tensor:
        return torch.cat(state, -1)

    def with_depth_state(self, state: Streams, z_BTD: Tensor) -> Streams:
        return z_BTD.chunk(self.streams, -1)

    def write_weights(self, i: int, p: Params, state: Streams, out_BTD: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        return carry[..., :-1, :, None], carry[..., -1, :, None]

    def streams_of(self, state: Streams) -> Tensor:
        return torch.stack(state, 2)

    def state_width(self, shape: Shape) -> Count:
        return 0 * shape.n_layers + self.streams * shape.d_model

    def init_scale(self, i: int, matrix: str, shape: Shape) -> float:
        return float(self.streams**-0.5) if matrix in ("out", "down") else 1.0
