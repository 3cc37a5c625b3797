"""Activation checkpointing: the same numbers from far fewer saved values, whatever state the topology carries."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from depthlaw.archs.backbone import build
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import TOPOLOGIES, topology

SHAPE = Shape(n_layers=8, d_model=32, n_heads=4, n_kv_heads=2, d_ff=96, vocab_size=64)
LABELS = [*sorted(set(TOPOLOGIES) - {"hybrid"}), "hybrid(blocks=3)", "hybrid(blocks=2, then='moda')"]


class Living(TorchDispatchMode):
    """Counts the bytes of what was computed inside and is still referred to, by Python or by autograd."""

    def __enter__(self):
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                ref = StorageWeakRef(storage)
                self.made[ref.cdata] = (ref, storage.nbytes())
        return out

    def bytes(self) -> int:
        return sum(size for ref, size in self.made.values() if not ref.expired())


def run(label: str, recompute: bool) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and the bytes that wait for the backward pass after the forward one."""
    model = build(SHAPE, topology(label), 0)
    model.recompute = recompute
    tokens = torch.arange(2 * 33).reshape(2, 33) ** 2 % 61
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with Living() as living:
        loss = model(inputs, targets)
    waiting = living.bytes()
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()], waiting


@pytest.mark.parametrize("label", LABELS)
def test_blocks_computed_again_give_the_same_loss_and_gradients(label):
    loss, gradients, _ = run(label, recompute=False)
    again, others, _ = run(label, recompute=True)
    assert again == pytest.approx(loss, abs=1e-6)
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("label", ["pre_ln", "hc", "full_attnres", "moda"])
def test_what_is_kept_for_the_backward_pass_shrinks(label):
    plain, less = run(label, recompute=False)[2], run(label, recompute=True)[2]
    assert less < plain / 2
