"""block_attnres: attention over depth to blocks of sublayers, summed, instead of to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from depthlaw.archs.depth_view import Place, appended
from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topologies.full_attnres import mix_params, mix_tensors
from depthlaw.archs.topology import Param, Params, Topology, register

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from depthlaw.archs import ops
else:
    from depthlaw.archs.lazy import ops, torch

# Frozen sources (the embedding first), and the running sum of the block at hand: None while it is empty.
BlockState = tuple[tuple["ops.Source", ...], "Tensor | None"]


@register
@dataclass(frozen=True)
class BlockAttnRes(Topology):
    """As full_attnres, with sums of blocks of b sublayers and the running sum of the block at hand as the sources.

    Before sublayer i > 0 with i mod b = 0 the running sum is frozen as a source and starts again, empty; an empty sum
    is no source. b = 1 is full_attnres.

    `blocks` sets b = ceil(2 L / blocks): 8 as published (a boundary may fall inside a transformer block). With `grows`
    their number is ceil(sqrt(2 L)) instead, which grows with depth. `length`, if not 0, sets b itself.

    Source: Kimi Team 2026, "Attention Residuals", block form. Shapes as in full_attnres.
    """

    blocks: int = 8
    grows: bool = False
    length: int = 0

    name = "block_attnres"

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"block_attnres: blocks is {self.blocks}; it must be at least 1")
        if self.length < 0:
            raise ValueError(f"block_attnres: length is {self.length}; it must be a number of sublayers, or 0")

    def block_length(self, n_layers: Count) -> Count:
        """b, in sublayers."""
        if self.length:
            return self.length + 0 * n_layers
        blocks = np.ceil(np.sqrt(2 * np.asarray(n_layers))).astype(np.int64) if self.grows else self.blocks
        b = -(-2 * n_layers // blocks)
        return b if isinstance(n_layers, np.ndarray) else int(b)

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        return mix_params(i, shape)

    def start(self, x_BTD: Tensor) -> BlockState:
        return (ops.source(x_BTD),), None

    def read(self, i: int, p: Params, state: BlockState) -> tuple[Tensor, BlockState]:
        frozen, running = state
        if self._freezes(i, p) and running is not None:
            frozen, running = (*frozen, ops.source(running)), None
        mixed: BlockState = (frozen, running)
        if isinstance(state, ops.AfterSkip):
            mixed = ops.AfterSkip(mixed)
        x_BTD = frozen[0].value_BTD if i == 0 else self.readout(p, mixed)
        return ops.rms_norm(x_BTD, p.norm), (frozen, running)

    def write(self, i: int, p: Params, state: BlockState, out_BTD: Tensor, carry: BlockState) -> BlockState:
        frozen, running = carry
        return frozen, out_BTD if running is None else running + out_BTD

    def readout(self, p: Params, state: BlockState) -> Tensor:
        frozen, running = state
        sources = frozen if running is None else (*frozen, ops.source(running))
        if isinstance(state, ops.AfterSkip):
            return sources[-1].value_BTD
        return ops.depth_mix(sources, p.query * p.key_norm)

    def _freezes(self, i: int, p: Params) -> bool:
        return i > 0 and i % self.block_length(p.n_layers) == 0

    def skip(self, i: int, p: Params, state: BlockState) -> BlockState:
        return ops.AfterSkip(state)

    def pre_norm(self, i: int, p: Params, state: BlockState) -> Tensor:
        return state[0][0].value_BTD if i == 0 else self.readout(p, state)

    def depth_state(self, i: int, p: Params, state: BlockState) -> Tensor:
        """The mix at a boundary, of which the end of the model is one; in between the running sum."""
        running = state[1]
        if running is None or self._freezes(i, p) or i == 2 * p.n_layers:
            return self.pre_norm(i, p, state)
        return running

    def read_weights(self, i: int, p: Params, state: BlockState) -> Tensor:
        if i == 0:
            return super().read_weights(i, p, state)
        frozen, running = state
        sources = frozen if running is None else (*frozen, ops.source(running))
        return ops.depth_weights(sources, p.query * p.key_norm).unsqueeze(-1)

    def write_weights(
        self, i: int, p: Params, state: BlockState, out_BTD: Tensor, carry: BlockState
    ) -> tuple[Tensor, Tensor]:
        frozen, running = carry
        if running is None:
            return appended(len(frozen))
        same = torch.eye(len(frozen) + 1)
        return same[None, None, ..., None], same[None, None, -1, :, None]

    def running_part(self, i: int, p: Params, state: BlockState) -> int | None:
        """The running sum is the last part; at a boundary, but for the readout, it has just been frozen."""
        frozen, running = state
        return None if running is None or (self._freezes(i, p) and i < 2 * p.n_layers) else len(frozen)

    def block_tensors(self, block: int, shape: Shape) -> Mapping[Place, Place]:
        return mix_tensors(block, shape)

    def extra_params(self, shape: Shape) -> Count:
        return 4 * shape.n_layers * shape.d_model

    def extra_flops(self, shape: Shape) -> Count:
        """A mix over s sources costs 4 s d."""
        return 4 * shape.d_model * self.depth_reads(shape)

    def depth_reads(self, shape: Shape) -> Count:
        """Mix i reads 1 + ceil(i / b) sources, i = 1 .. 2 L."""
        n, b = 2 * shape.n_layers, self.block_length(shape.n_layers)
        full, rest = n // b, n % b
        return n + b * full * (full + 1) // 2 + rest * (full + 1)

    def state_width(self, shape: Shape) -> Count:
        """The embedding, the frozen blocks and the running one."""
        return (1 + -(-2 * shape.n_layers // self.block_length(shape.n_layers))) * shape.d_model
