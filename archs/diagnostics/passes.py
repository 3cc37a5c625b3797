"""One batch through a model block by block, with every state in between kept, and the two ways to disturb a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from depthlaw.archs.backbone import Context, InContext, Model
from depthlaw.archs.ops import rms_norm, widened
from depthlaw.archs.shape import Shape
from depthlaw.archs.topology import Param, Params, State, Topology


class Step(NamedTuple):
    """One sublayer: its tensors, the state before it, its branch's output and what `write` gets beside it."""

    i: int
    p: Params
    state: State
    out_BTD: Tensor
    carry: Any


class Pass:
    """The states before block 0, 1, .. L - 1 and behind the last, `states[0] .. states[L]`, for inputs (B, T).

    A state is never changed in place, so what a disturbed block does is computed from the kept state before it. The
    operations are those of `Model.hidden` in the same order: the results are equal to the last bit.
    """

    def __init__(self, model: Model, inputs_BT: Tensor) -> None:
        self.model = model
        x_BTD = F.embedding(inputs_BT, model.embedding)
        self._context = Context(model.rope(0, inputs_BT.shape[1], x_BTD.dtype))
        self.n_layers: int = model.shape.n_layers
        self.states: list[State] = [model.topology.start(x_BTD)]
        self.states += self.onwards(0, self.states[0])

    def block(self, block: int, state: State) -> State:
        """The state behind a block that is given `state`."""
        for i in (2 * block, 2 * block + 1):
            state = self.model.topology.write(*self._step(i, state))
        return state

    def steps(self) -> Iterator[Step]:
        """Every sublayer of the pass, computed again."""
        state = self.states[0]
        for i in range(2 * self.n_layers):
            step = self._step(i, state)
            yield step
            state = self.model.topology.write(*step)

    def _step(self, i: int, state: State) -> Step:
        topology, p = self.model.topology, self.model.depth[i]
        x_BTD, carry = topology.read(i, p, state)
        return Step(i, p, state, *topology.run(i, p, InContext(self.model.branches[i], self._context), x_BTD, carry))

    def onwards(self, block: int, state: State) -> Iterator[State]:
        """The states behind `block`, the next, .. and the last."""
        for each in range(block, self.n_layers):
            state = self.block(each, state)
            yield state

    def end(self, block: int, state: State) -> State:
        """The last of `onwards`; `state` itself if there are no more blocks."""
        for each in range(block, self.n_layers):
            state = self.block(each, state)
        return state

    def skip(self, block: int) -> State:
        """The state behind `block` if it is skipped and nothing before it is."""
        return self.model.topology.skip(2 * block, self.model.depth[2 * block], self.states[block])

    def z(self, depth: int, state: State) -> Tensor:
        """The depth state of a state before block `depth`, (B, T, d or m d)."""
        return self.model.topology.depth_state(2 * depth, self.model.depth[2 * depth], state)

    def lens(self, depth: int, state: State) -> Tensor:
        """Logits (B, T, V) of what the next consumer reads at a depth, through the final norm and the head."""
        x_BTD = self.model.topology.pre_norm(2 * depth, self.model.depth[2 * depth], state)
        return F.linear(rms_norm(x_BTD, self.model.final_norm), self.model.head)

    def loss(self, state: State, targets_BT: Tensor) -> float:
        """Mean next-token loss of a state behind the last block, in nats."""
        x_BTD = rms_norm(self.model.topology.readout(self.model.depth[-1], state), self.model.final_norm)
        logits = widened(F.linear(x_BTD, self.model.head))
        return float(F.cross_entropy(logits.flatten(0, 1), targets_BT.flatten()))


@dataclass(frozen=True)
class _Skipping(Topology):
    """Another topology, one of whose blocks does nothing; its branches are not run."""

    inner: Topology
    block: int

    name = "skipping"

    def params(self, i: int, shape: Shape) -> Mapping[str, Param]:
        return self.inner.params(i, shape)

    def start(self, x_BTD: Tensor) -> State:
        return self.inner.start(x_BTD)

    def read(self, i: int, p: Params, state: State) -> tuple[Any, Any]:
        return (None, None) if i // 2 == self.block else self.inner.read(i, p, state)

    def run(self, i: int, p: Params, branch: Any, x_BTD: Any, carry: Any) -> tuple[Any, Any]:
        return (None, None) if i // 2 == self.block else self.inner.run(i, p, branch, x_BTD, carry)

    def write(self, i: int, p: Params, state: State, out_BTD: Tensor, carry: Any) -> State:
        if i // 2 != self.block:
            return self.inner.write(i, p, state, out_BTD, carry)
        return self.inner.skip(i, p, state) if i % 2 == 0 else state

    def readout(self, p: Params, state: State) -> Tensor:
        return self.inner.readout(p, state)


def _check(model: Model, *blocks: int) -> None:
    for block in blocks:
        if not 0 <= block < model.shape.n_layers:
            raise IndexError(f"block is {block}; this model has blocks 0 to {model.shape.n_layers - 1}")


@contextmanager
def skipped(model: Model, block: int) -> Iterator[Model]:
    """The model with a block that passes its state on unchanged. Restored on leaving, however that happens.

    moda's depth cache gets no entry; in attention over depth nothing is added to the sources, and the mix right after
    returns its newest source. A boundary of block_attnres at the skipped block's start is passed over with it. No
    tensor is touched.
    """
    _check(model, block)
    kept = model.topology
    model.topology = _Skipping(kept, block)
    try:
        yield model
    finally:
        model.topology = kept


@contextmanager
def swapped(model: Model, a: int, b: int) -> Iterator[Model]:
    """The model with all learned tensors of two blocks exchanged, the topology's included. Restored on leaving.

    Exchanged are the storages, nothing is copied: what comes back is what was there, to the last bit. Tensors that only
    one of the blocks has, or has in another shape, stay.
    """
    _check(model, a, b)
    topology, pairs = model.topology, list(_pairs(model, a, b))
    model.topology = topology.exchanged(a, b)
    _exchange(pairs)
    try:
        yield model
    finally:
        _exchange(pairs)
        model.topology = topology


def _pairs(model: Model, a: int, b: int) -> Iterator[tuple[Tensor, Tensor]]:
    for k in (0, 1):
        first, second = (dict(model.branches[2 * block + k].named_parameters()) for block in (a, b))
        yield from ((first[name], second[name]) for name in first)
    places, others = (model.topology.block_tensors(block, model.shape) for block in (a, b))
    for role in places.keys() & others.keys():
        x, y = (getattr(model.depth[i], name) for i, name in (places[role], others[role]))
        if x.shape == y.shape:
            yield x, y


def _exchange(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for x, y in pairs:
            x.data, y.data = y.data, x.data
