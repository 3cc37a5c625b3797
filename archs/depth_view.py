"""What depth diagnostics ask of a topology, with the answers of a single plain stream as defaults.

`i` is a sublayer's number, 2 L for the readout, and `p` its tensors. The *parts* of a state are its streams, or the
sources of attention over depth; a plain stream is one part. Weights over parts have shapes (B, T, parts, C): C is 1, or
d where a gain makes them differ between channels; B and T are 1 where every token has the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from depthlaw.archs.shape import Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from depthlaw.archs.lazy import torch

# Where a tensor that travels with a block lives: the sublayer's number and its name there.
Place = tuple[int, str]


class DepthView:
    """Mixed into `Topology`; its methods are called only by `archs/diagnostics/`."""

    def skip(self, i: int, p: Any, state: Any) -> Any:
        """The state behind a skipped block whose first sublayer is i: what it was."""
        return state

    def pre_norm(self, i: int, p: Any, state: Any) -> Tensor:
        """What sublayer i reads, before its norm (B, T, d); for i = 2 L the input of the final norm."""
        return self.readout(p, state)  # type: ignore[attr-defined, no-any-return]

    def depth_state(self, i: int, p: Any, state: Any) -> Tensor:
        """z: the state before sublayer i as one vector a token, (B, T, d) or (B, T, m d) with m streams."""
        return self.pre_norm(i, p, state)

    def with_depth_state(self, state: Any, z_BTD: Tensor) -> Any:
        """`state` with another depth state; None where no vector of d numbers is the state (attention over depth)."""
        return None

    def read_weights(self, i: int, p: Any, state: Any) -> Tensor:
        """Weight of each part of the state in `pre_norm`, its coefficients frozen, (B, T, parts, C)."""
        return torch.ones(1, 1, 1, 1)

    def write_weights(self, i: int, p: Any, state: Any, out_BTD: Tensor, carry: Any) -> tuple[Tensor, Tensor]:
        """How `write` maps the parts, coefficients frozen: from old to new, (B, T, old, new, C), and the branch's
        output's weight in each new part, (B, T, new, C)."""
        return torch.ones(1, 1, 1, 1, 1), torch.ones(1, 1, 1, 1)

    def streams_of(self, state: Any) -> Tensor | None:
        """The residual streams (B, T, m, d); None where there is one."""
        return None

    def running_part(self, i: int, p: Any, state: Any) -> int | None:
        """Which part of what sublayer i mixes is a running sum; None if none is."""
        return None

    def block_tensors(self, block: int, shape: Shape) -> Mapping[Place, Place]:
        """The topology's tensors that travel with a block: their role, comparable between blocks -> their place."""
        return {
            (k, name): (2 * block + k, name)
            for k in (0, 1)
            for name in self.params(2 * block + k, shape)  # type: ignore[attr-defined]
        }

    def exchanged(self, a: int, b: int) -> Any:
        """This topology with whatever belongs to blocks a and b and is no tensor exchanged."""
        return self

    def accepts(self, block: int, other: int, n_layers: int) -> bool:
        """Whether `block` can run on the state before block `other`."""
        return True


def appended(parts: int) -> tuple[Tensor, Tensor]:
    """`write_weights` of a branch's output that becomes a part of its own behind the others."""
    joined = torch.eye(parts + 1)
    return joined[None, None, :parts, :, None], joined[None, None, parts, :, None]
