"""CKA, repetition, recomputation and Jacobians against closed forms and explicit matrices."""

import copy

import numpy as np
import pytest
import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.diagnostics import DIAGNOSTICS
from depthlaw.archs.diagnostics import cka as cka_module
from depthlaw.archs.diagnostics.cka import _hollow, _hsic, cka
from depthlaw.archs.diagnostics.jacobian import jacobian
from depthlaw.archs.diagnostics.passes import Pass
from depthlaw.archs.diagnostics.recomputation import recomputation
from depthlaw.archs.diagnostics.repetition import repetition
from depthlaw.archs.diagnostics.run import diagnose
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology


def hsic(x, y):
    return float(_hsic(_hollow(x @ x.T), _hollow(y @ y.T)))


def test_unbiased_hsic_is_right_on_average_where_the_plain_estimate_is_far_off():
    """x and y = x W + noise: HSIC of linear kernels is |Cov(x, y)|_F^2 = |W|_F^2. Of unrelated ones it is 0."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(6, 6, generator=generator).double() / 6
    related, unrelated = [], []
    for _ in range(2000):
        x, noise = torch.randn(2, 12, 6, generator=generator).double()
        related.append(hsic(x, x @ W + noise))
        unrelated.append(hsic(x, noise))
    for found, truth in ((related, float(W.square().sum())), (unrelated, 0.0)):
        assert abs(np.mean(found) - truth) < 4 * np.std(found) / np.sqrt(len(found))
    centred = x - x.mean(0), noise - noise.mean(0)
    assert float((centred[0].T @ centred[1]).square().sum()) / 11**2 > 1  # the plain one: far from 0 at 12 tokens


def test_cka_sees_neither_rotation_nor_scale_nor_shift_and_takes_the_first_tokens(monkeypatch, random_model, batches):
    model = random_model("pre_ln")
    found = cka(model, batches).values["cka"]
    assert np.diag(found) == pytest.approx(np.ones(5))
    with torch.no_grad():
        z = [[Pass(model, i).states[d].flatten(0, 1) for d in (1, 3)] for i, _ in batches]
    x, y = (torch.cat(part) for part in zip(*z, strict=True))
    rotation = torch.linalg.qr(torch.randn(24, 24, generator=torch.Generator().manual_seed(1)).double())[0]
    turned = 3 * y @ rotation + 5
    assert found[1, 3] == pytest.approx(hsic(x, turned) / np.sqrt(hsic(x, x) * hsic(turned, turned)))
    monkeypatch.setattr(cka_module, "MOST_TOKENS", 30)  # the first batch has 27
    fewer = cka(model, batches).values["cka"]
    assert fewer[1, 3] == pytest.approx(hsic(x[:30], y[:30]) / np.sqrt(hsic(x[:30], x[:30]) * hsic(y[:30], y[:30])))


def test_repeating_a_block_is_the_deeper_model_that_has_it_twice(random_model, batches):
    model = random_model("pre_ln")
    found = repetition(model, batches).values["loss_increase"]
    deeper = build(Shape(5, 24, 3, 3, 64, 40), topology("pre_ln"), 0).double()
    with torch.no_grad():
        for name in ("embedding", "head", "final_norm"):
            getattr(deeper, name).copy_(getattr(model, name))
        for block, source in enumerate((0, 1, 2, 2, 3)):
            for k in (0, 1):
                deeper.branches[2 * block + k].load_state_dict(model.branches[2 * source + k].state_dict())
                deeper.depth[2 * block + k].load_state_dict(model.depth[2 * source + k].state_dict())
        tokens = sum(i.numel() for i, _ in batches)
        increase = sum(i.numel() * float(deeper(i, t) - model(i, t)) for i, t in batches) / tokens
    assert found[2] == pytest.approx(increase, rel=1e-9)


def test_every_topology_can_repeat_and_recompute_its_blocks(variant, random_model, batches):
    model = random_model(variant)
    repeated = repetition(model, batches).values["loss_increase"]
    change = recomputation(model, batches).values["change"]
    k = model.topology.blocks if variant.startswith("hybrid") else None
    assert np.isnan(repeated).tolist() == [block == k for block in range(4)]
    for e in range(4):
        for block in range(4):
            defined = e < block and (k is None or (e <= k) == (block <= k))
            assert np.isfinite(change[e, block]) == defined


def test_recomputation_equals_the_block_run_on_the_earlier_stream(random_model, batches):
    model = random_model("pre_ln")
    found = recomputation(model, batches).values["change"]
    moved = size = 0.0
    with torch.no_grad():
        for inputs, _ in batches:
            run = Pass(model, inputs)
            h = run.states
            other = run.block(3, h[1]) - h[1]
            moved += float((other - (h[4] - h[3])).norm(dim=-1).sum())
            size += float((h[4] - h[3]).norm(dim=-1).sum())
    assert found[1, 3] == pytest.approx(moved / size)
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.branches[4].out.zero_()
        silent.branches[5].down.zero_()
    assert recomputation(silent, batches).values["change"][2, 3] == 0  # block 2 does nothing, so nothing depends on it


@pytest.mark.parametrize("name", ["pre_ln", "deepnorm", "hc(streams=2)", "mhc(streams=2)", "moda"])
def test_jacobian_figures_agree_with_the_explicit_matrix_within_their_errors(name, random_model):
    model = random_model(name, shape=Shape(2, 8, 1, 1, 16, 40), spread=0.15)
    inputs = torch.arange(5)[None]
    found = jacobian(model, [(inputs, inputs)], probes=64, iterations=200).values
    run = Pass(model, inputs)
    for block in range(2):
        state = run.states[block]

        def f(z, state=state, block=block):
            return run.z(block + 1, run.block(block, model.topology.with_depth_state(state, z)))

        z = run.z(block, state).detach()
        J = torch.autograd.functional.jacobian(f, z).reshape(z.numel(), z.numel())
        sigma = torch.linalg.svdvals(J)
        added = torch.linalg.svdvals(J - torch.eye(z.numel()))
        assert float(sigma.square().mean().sqrt()) == pytest.approx(
            found["rms"][block], abs=4 * found["rms_error"][block] + 1e-9
        )
        assert float(added.square().mean().sqrt()) == pytest.approx(
            found["step_rms"][block], abs=4 * found["step_rms_error"][block] + 1e-9
        )
        assert found["rms_error"][block] < 0.1 * found["rms"][block]
        nearest = float((sigma - found["largest"][block]).abs().min())
        assert nearest <= 2 * found["largest_error"][block] + 1e-6
        assert found["largest"][block] == pytest.approx(float(sigma[0]), rel=0.01)


def test_attention_over_depth_has_no_jacobian_of_one_vector(random_model, batches):
    for name in ("full_attnres", "block_attnres", "hybrid(blocks=2)"):
        assert jacobian(random_model(name), batches) is None


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.filterwarnings("error")
def test_shallow_models_have_every_diagnostic_without_a_warning(variant, layers, random_model, batches):
    """What has no pairs to sum up is NaN, not a crash; and the model's mode is as it was."""
    model, told = random_model(variant, shape=Shape(layers, 24, 3, 3, 64, 40)), []
    model.train()
    found = diagnose(model, batches, DIAGNOSTICS, lambda what, done: told.append((what, done)))
    assert {"angular", "causal", "pruning", "permutation", "lens", "early_exit", "paths", "cka"} <= set(found)
    assert model.training
    assert all(0 < done <= 1 + 1e-9 for _, done in told)
    for finding in found.values():
        shape = tuple(len(axis) for axis in finding.axes.values())
        assert all(values.shape == shape for values in finding.values.values())
