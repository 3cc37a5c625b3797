"""What a residual topology is: how sublayers read from depth and write to it.

    state = topology.start(embedding)
    for i, branch in enumerate(branches):            # attention, feed-forward, attention, ...
        x, carry = topology.read(i, p[i], state)
        out, carry = topology.run(i, p[i], branch, x, carry)    # almost always branch(x)
        state = topology.write(i, p[i], state, out, carry)
    x = topology.readout(p[2 L], state)              # then the final norm and the head

What depth diagnostics ask beyond this is in `depth_view.py`, with defaults.

A topology is a frozen value: its fields are its options, and it holds no tensors. `params` declares the tensors that
each sublayer owns, the backbone creates them and passes them back as `p[i]`. `extra_params` and `extra_flops` are
written as closed forms, so that a whole lattice of shapes is counted at once and without torch; a test counts the
real tensors against them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from depthlaw.archs.depth_view import DepthView
from depthlaw.archs.shape import Count, Shape

if TYPE_CHECKING:
    from torch import Tensor

# Whatever a topology keeps between sublayers: a stream, several streams, a list of sources.
State = Any
# The tensors of one sublayer, as attributes named as in `Topology.params`, and `n_layers` of the model.
Params = Any
# An attention or feed-forward branch of the backbone.
Branch = Any


@dataclass(frozen=True)
class Param:
    """One learned tensor: its starting value and whether AdamW decays it.

    start: a number that fills it, all values, or None for the backbone's normal of std 0.02.
    """

    shape: tuple[int, ...]
    start: float | np.ndarray | None
    decay: bool = False


@dataclass(frozen=True)
class Topology(DepthView, ABC):
    """Base of all topologies. Subclasses are frozen dataclasses in `archs/topologies/`, one file each."""

    name: ClassVar[str]
    # Learning rates of the published benchmark at 400M parameters: the grid it searched and what it found best.
    lr_grid: ClassVar[tuple[float, ...]] = (5e-4, 1e-3, 2e-3, 5e-3)
    default_lr: ClassVar[float] = 2e-3

    @abstractmethod
    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        """The tensors of sublayer i; i = 2 L stands for the readout."""

    @abstractmethod
    def start(self, x_BTD: Tensor) -> State: ...

    @abstractmethod
    def read(self, i: int, p: Params, state: State) -> tuple[Tensor, Any]:
        """The input of branch i (B, T, d), already normalised, and the coefficients that `write` needs."""

    def run(self, i: int, p: Params, branch: Branch, x_BTD: Tensor, carry: Any) -> tuple[Tensor, Any]:
        """The branch's output (B, T, d). Only a topology whose attention also looks over depth has more to do here."""
        return branch(x_BTD), carry

    @abstractmethod
    def write(self, i: int, p: Params, state: State, out_BTD: Tensor, carry: Any) -> State: ...

    @abstractmethod
    def readout(self, p: Params, state: State) -> Tensor:
        """The input of the final norm (B, T, d)."""

    def extra_params(self, shape: Shape) -> Count:
        """Parameters beyond those of the Pre-LN model of the same shape."""
        return 0 * shape.n_layers

    def extra_flops(self, shape: Shape) -> Count:
        """Forward FLOPs a token beyond the branches (a multiply-add is two); element-wise norms are not counted."""
        return 0 * shape.n_layers

    def depth_reads(self, shape: Shape) -> Count:
        """Earlier states that the mixes of one pass read, all together: what takes time with depth squared.

        0 where a fixed number of streams carries everything.
        """
        return 0 * shape.n_layers

    def state_width(self, shape: Shape) -> Count:
        """Numbers that one token's state over depth holds at its largest: d for a plain stream.

        The cache of keys and values over the sequence is not in it.
        """
        return 0 * shape.n_layers + shape.d_model

    def init_scale(self, i: int, matrix: str, shape: Shape) -> float:
        """Factor on the starting std of one matrix of branch i: q, k, v, out, gate, up or down."""
        return 1.0

    @property
    def label(self) -> str:
        """The text that names this topology everywhere: `hc`, or `hc(streams=2)` where an option differs."""
        changed = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        ]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


# By name; `depthlaw.archs.topologies` fills it and looks labels up.
TOPOLOGIES: dict[str, type[Topology]] = {}


def register(cls: type[Topology]) -> type[Topology]:
    """Class decorator: makes a topology usable by its name in Python, in sweeps and in queries."""
    TOPOLOGIES[cls.name] = cls
    return cls
