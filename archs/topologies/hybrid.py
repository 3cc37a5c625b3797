"""hybrid: one topology for the first blocks and another after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.archs.depth_view import Place
from depthlaw.archs.shape import Count, Shape
from depthlaw.archs.topology import Branch, Param, Params, State, Topology, register

if TYPE_CHECKING:
    from torch import Tensor

HANDOVER = "handover_"


class _Part:
    """The tensors of a sublayer as one of the two topologies knows them: its own depth, and names behind a prefix."""

    __slots__ = ("n_layers", "params", "prefix")

    def __init__(self, params: Params, n_layers: int, prefix: str = "") -> None:
        self.params, self.n_layers, self.prefix = params, n_layers, prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self.params, self.prefix + name)


@register
@dataclass(frozen=True)
class Hybrid(Topology):
    """Blocks 1 .. k by `first`, read out, and that as the embedding of `then` for the other L - k; k = `blocks`.

    A model of no more than k blocks is all `first`. Either is any topology's label. Extra tensors: those of both; the
    readout of `first` has its own, which live with the first sublayer of `then`.
    """

    blocks: int
    first: str = "pre_ln"
    then: str = "full_attnres"

    name = "hybrid"

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"hybrid: blocks is {self.blocks}; it must be at least 1")
        if any(isinstance(part, Hybrid) for part in self._parts):
            raise ValueError("hybrid: first and then must not be hybrids themselves")

    @cached_property
    def _parts(self) -> tuple[Topology, Topology]:
        from depthlaw.archs.topologies import topology

        return topology(self.first), topology(self.then)

    def _split(self, n_layers: int) -> tuple[int, int]:
        """Blocks of each part."""
        k = min(self.blocks, n_layers)
        return k, n_layers - k

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        (first, then), (k, rest) = self._parts, self._split(shape.n_layers)
        own = first.params(i, replace(shape, n_layers=k)) if i <= 2 * k else {}
        if i < 2 * k or rest == 0:
            return own
        after = then.params(i - 2 * k, replace(shape, n_layers=rest))
        return {**after, **{HANDOVER + name: param for name, param in own.items()}}

    def start(self, x_BTD: Tensor) -> State:
        return self._parts[0].start(x_BTD)

    def read(self, i: int, p: Params, state: State) -> tuple[Tensor, Any]:
        (first, then), (k, rest) = self._parts, self._split(p.n_layers)
        if i < 2 * k:
            return self._with_state(first.read(i, _Part(p, k), state), state)
        state = self._handed_over(i, p, state)
        return self._with_state(then.read(i - 2 * k, _Part(p, rest), state), state)

    def _handed_over(self, i: int, p: Params, state: State) -> State:
        """The state that sublayer i reads: behind the last block of `first` a new one."""
        (first, then), (k, rest) = self._parts, self._split(p.n_layers)
        return then.start(first.readout(_Part(p, k, HANDOVER), state)) if rest and i == 2 * k else state

    @staticmethod
    def _with_state(found: tuple[Tensor, Any], state: State) -> tuple[Tensor, Any]:
        """`write` must see the state that was read, which at the handover is a new one."""
        x_BTD, carry = found
        return x_BTD, (state, carry)

    def run(self, i: int, p: Params, branch: Branch, x_BTD: Tensor, carry: Any) -> tuple[Tensor, Any]:
        part, j, own = self._at(i, p)
        state, inner = carry
        out_BTD, inner = part.run(j, own, branch, x_BTD, inner)
        return out_BTD, (state, inner)

    def write(self, i: int, p: Params, state: State, out_BTD: Tensor, carry: Any) -> State:
        part, j, own = self._at(i, p)
        state, inner = carry
        return part.write(j, own, state, out_BTD, inner)

    def _at(self, i: int, p: Params) -> tuple[Topology, int, _Part]:
        """The topology of sublayer i, the sublayer's number in it, and its tensors."""
        (first, then), (k, rest) = self._parts, self._split(p.n_layers)
        return (then, i - 2 * k, _Part(p, rest)) if rest and i >= 2 * k else (first, i, _Part(p, k))

    def readout(self, p: Params, state: State) -> Tensor:
        (first, then), (k, rest) = self._parts, self._split(p.n_layers)
        return then.readout(_Part(p, rest), state) if rest else first.readout(_Part(p, k), state)

    def skip(self, i: int, p: Params, state: State) -> State:
        part, j, own = self._at(i, p)
        return part.skip(j, own, self._handed_over(i, p, state))

    def pre_norm(self, i: int, p: Params, state: State) -> Tensor:
        """Also the depth state: d numbers whichever part is at work, where streams would be m d."""
        part, j, own = self._at(i, p)
        return part.pre_norm(j, own, self._handed_over(i, p, state))

    def read_weights(self, i: int, p: Params, state: State) -> Tensor:
        part, j, own = self._at(i, p)
        weights = part.read_weights(j, own, self._handed_over(i, p, state))
        return self._handed(weights.sum(2, keepdim=True), p, state) if self._is_handover(i, p) else weights

    def write_weights(self, i: int, p: Params, state: State, out_BTD: Tensor, carry: Any) -> tuple[Tensor, Tensor]:
        part, j, own = self._at(i, p)
        state_read, inner = carry
        keep, add = part.write_weights(j, own, state_read, out_BTD, inner)
        if self._is_handover(i, p):  # every part of the new state starts as what the old one is read out as
            keep = self._handed(keep.sum(2, keepdim=True), p, state)
        return keep, add

    def _is_handover(self, i: int, p: Params) -> bool:
        k, rest = self._split(p.n_layers)
        return rest > 0 and i == 2 * k

    def _handed(self, weights: Tensor, p: Params, state: State) -> Tensor:
        """Weights of a new state's one part, spread over the parts that it was read out of."""
        k, _ = self._split(p.n_layers)
        read = self._parts[0].read_weights(2 * k, _Part(p, k, HANDOVER), state)
        return weights.to(read.device) * (read if weights.ndim == read.ndim else read.unsqueeze(3))

    def block_tensors(self, block: int, shape: Shape) -> Mapping[Place, Place]:
        (first, then), (k, rest) = self._parts, self._split(shape.n_layers)
        if block >= k:
            own = then.block_tensors(block - k, replace(shape, n_layers=rest))
            return {role: (i + 2 * k, name) for role, (i, name) in own.items()}
        places = first.block_tensors(block, replace(shape, n_layers=k))
        prefix = HANDOVER if rest else ""
        return {role: (i, (prefix if i == 2 * k else "") + name) for role, (i, name) in places.items()}

    def exchanged(self, a: int, b: int) -> Hybrid:
        first, then = self._parts
        if max(a, b) < self.blocks:
            first = first.exchanged(a, b)
        elif min(a, b) >= self.blocks:
            then = then.exchanged(a - self.blocks, b - self.blocks)
        new = replace(self)
        new.__dict__["_parts"] = first, then  # where cached_property keeps what the labels gave
        return new

    def accepts(self, block: int, other: int, n_layers: int) -> bool:
        """Up to the first block of `then`, which hands it over, the state is that of `first`."""
        k, _ = self._split(n_layers)
        return (block <= k) == (other <= k)

    def extra_params(self, shape: Shape) -> Count:
        return self._both(shape, "extra_params", np.add)

    def extra_flops(self, shape: Shape) -> Count:
        return self._both(shape, "extra_flops", np.add)

    def depth_reads(self, shape: Shape) -> Count:
        return self._both(shape, "depth_reads", np.add)

    def state_width(self, shape: Shape) -> Count:
        return self._both(shape, "state_width", np.maximum)

    def _both(self, shape: Shape, count: str, combine: np.ufunc) -> Count:
        """The counts of the parts, each at its own depth, combined; the second counts only where it has blocks."""
        L = np.asarray(shape.n_layers)
        rest = np.maximum(L - self.blocks, 0)
        first, then = (
            getattr(part, count)(replace(shape, n_layers=n))
            for part, n in zip(self._parts, (np.minimum(L, self.blocks), np.maximum(rest, 1)), strict=True)
        )
        total = combine(first, np.where(rest > 0, then, 0))
        return total if isinstance(shape.n_layers, np.ndarray) else int(total)

    def init_scale(self, i: int, matrix: str, shape: Shape) -> float:
        (first, then), (k, rest) = self._parts, self._split(shape.n_layers)
        if i < 2 * k:
            return first.init_scale(i, matrix, replace(shape, n_layers=k))
        return then.init_scale(i - 2 * k, matrix, replace(shape, n_layers=rest))
