"""Statistics of each sublayer during training: how large its gradient, its weights, its output and the state are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from depthlaw.archs.backbone import Model
from depthlaw.platform.ranks import Ranks

Stats = list[tuple[str, float]]


class _Watched:
    """A topology that also notes root mean squares as the model goes through depth."""

    def __init__(self, model: Model, noted: Stats) -> None:
        self._model, self._topology, self._noted = model, model.topology, noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._topology, name)

    def write(self, i: int, p: Any, state: Any, out_BTD: torch.Tensor, carry: Any) -> Any:
        topology, after = self._topology, self._model.depth[i + 1]
        state = topology.write(i, p, state, out_BTD, carry)
        self._note("output_rms", i, out_BTD)
        if topology.name != "hybrid":  # its readout is that of its second part, whose state this may not be
            with torch.no_grad():
                self._note("state_rms", i, topology.readout(after, state))
        return state

    def _note(self, name: str, i: int, x_BTD: torch.Tensor) -> None:
        self._noted.append((f"{name}.{i}", float(x_BTD.detach().float().square().mean().sqrt())))


@contextmanager
def watched_forward(model: Model) -> Iterator[Stats]:
    """For one forward pass: `output_rms.i` and `state_rms.i`, root mean squares over batch, tokens and channels.

    Sublayer i counts from 0; even ones are attention, odd ones feed-forward. The state is the one after sublayer i, as
    the topology's readout gives it to the next: the stream of pre_ln, the sum (hc) or mean (mhc) of the streams, the
    mix that the next sublayer of full_attnres and block_attnres reads. A hybrid has no `state_rms`. The batch is the
    micro-batch of this rank; `over_ranks` makes it that of all.
    """
    noted: Stats = []
    topology = model.topology
    model.topology = _Watched(model, noted)  # type: ignore[assignment]
    try:
        yield noted
    finally:
        model.topology = topology


def over_ranks(stats: Stats, ranks: Ranks, device: torch.device) -> Stats:
    """Root mean squares over what all ranks saw, from those of each, which saw equally much."""
    if ranks.world == 1:
        return stats
    squares = ranks.total(torch.tensor([value for _, value in stats], dtype=torch.float64, device=device).square())
    return [(name, value) for (name, _), value in zip(stats, (squares / ranks.world).sqrt().tolist(), strict=True)]


def norms(model: Model, zero_stage: int) -> Stats:
    """`grad_norm.i` and `weight_norm.i`: L2 norms over the tensors of sublayer i, the topology's own included.

    Between the backward pass of a step and its update; gradients are those of the whole batch, before clipping.
    """
    gradient = _whole_gradient if zero_stage else lambda tensor: tensor.grad
    found: Stats = []
    for i, branch in enumerate(model.branches):
        tensors = [*branch.parameters(), *model.depth[i].parameters()]
        gradients = [g for g in map(gradient, tensors) if g is not None]
        found.append((f"grad_norm.{i}", _norm(gradients)))
        found.append((f"weight_norm.{i}", _norm([tensor.detach() for tensor in tensors])))
    return found


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0


def _whole_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """From where ZeRO keeps it."""
    from deepspeed.utils import safe_get_full_grad

    gradient: torch.Tensor | None = safe_get_full_grad(tensor)
    return gradient
