"""lns: Pre-LN whose normed input shrinks with depth (LayerNorm scaling)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthlaw.archs.topologies.pre_ln import PreLN
from depthlaw.archs.topology import Params, register

if TYPE_CHECKING:
    from torch import Tensor


@register
@dataclass(frozen=True)
class LNS(PreLN):
    """h <- h + F_i(N_i(h) / sqrt(l)), l = i // 2 + 1 the block's number. Differs from pre_ln by the factor alone.

    The factor is a Python number shared by the block's two sublayers; a buffer would be lost on the meta device.

    Source: Sun et al. 2025, "The Curse of Depth in Large Language Models".
    """

    name = "lns"
    default_lr = 1e-2
    lr_grid = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2)

    def read(self, i: int, p: Params, state: Tensor) -> tuple[Tensor, None]:
        x_BTD, carry = super().read(i, p, state)
        return x_BTD * self.number(i // 2) ** -0.5, carry

    def number(self, block: int) -> int:
        """l of the factor of a block that counts from 0."""
        return block + 1

    def exchanged(self, a: int, b: int) -> LNS:
        return _Exchanged(self, a, b)


@dataclass(frozen=True)
class _Exchanged(LNS):
    """lns with the factors of two blocks exchanged: they travel with blocks that are swapped."""

    inner: LNS
    a: int
    b: int

    def number(self, block: int) -> int:
        return self.inner.number({self.a: self.b, self.b: self.a}.get(block, block))
