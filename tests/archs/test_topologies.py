"""What must hold for every topology, with random parameters that are not the starting ones unless a name says so."""

import pytest
import torch
from torch.nn import functional as F

from depthlaw.archs.backbone import Context, build, causal_attention
from depthlaw.archs.ops import depth_mix, normed_projection, rms_norm, source, stream_mix
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology

SHAPE = Shape(4, 24, 3, 3, 64, 40)


def randomised(name, seed=0, shape=SHAPE, spread=0.4):
    """A float64 model whose every tensor is far from its starting value."""
    model = build(shape, topology(name), seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=spread)
    return model


def some_tokens(T=9, B=2, vocab=SHAPE.vocab_size, seed=3):
    return torch.randint(0, vocab, (B, T), generator=torch.Generator().manual_seed(seed))


def test_changing_a_token_changes_no_logit_before_it(variant):
    model, tokens = randomised(variant), some_tokens()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % SHAPE.vocab_size
    before, after = model.logits(tokens), model.logits(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).min() > 1e-6


def test_every_tensor_gets_a_gradient_that_finite_differences_confirm(variant):
    model, tokens = randomised(variant), some_tokens()
    model(tokens, tokens.roll(-1, 1)).backward()
    generator = torch.Generator().manual_seed(5)
    for label, p in model.named_parameters():
        direction = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        slope = (p.grad * direction).sum()
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                p.add_(direction, alpha=sign * 1e-6)
                losses.append(model(tokens, tokens.roll(-1, 1)))
                p.add_(direction, alpha=-sign * 1e-6)
        assert slope.abs() > 0, label
        assert torch.isclose((losses[0] - losses[1]) / 2e-6, slope, rtol=2e-4, atol=1e-8), label


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_finite_in_fp32_and_under_bf16_autocast(variant, dtype):
    model, tokens = build(SHAPE, topology(variant), 0), some_tokens()
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        loss = model(tokens, tokens)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_topologies_of_one_seed_start_from_the_same_branches():
    plain, mixed = (build(SHAPE, topology(name), 7) for name in ("pre_ln", "full_attnres"))
    streams = build(SHAPE, topology("hc"), 7)
    for (name, a), b, c in zip(
        plain.branches.named_parameters(), mixed.branches.parameters(), streams.branches.parameters(), strict=True
    ):
        assert torch.equal(a, b)
        shrunk = name.endswith(("out", "down"))
        assert torch.allclose(c, a / 2 if shrunk else a, rtol=1e-6)


def test_start_is_a_normal_of_std_002_cut_at_three():
    model = build(Shape(2, 128, 8, 8, 352, 2000), topology("pre_ln"), 0)
    for tensor in (model.embedding, model.head, model.branches[0].qkv, model.branches[1].down):
        assert abs(tensor.std().item() / 0.02 / 0.98658 - 1) < 0.02  # sd of a normal cut at 3 sd
        assert tensor.abs().max() <= 0.06
    assert (model.final_norm == 1).all()


def test_hc_equals_a_loop_written_from_its_equation():
    model, tokens = randomised("hc", spread=0.3), some_tokens()
    m = 4
    x = F.embedding(tokens, model.embedding)
    context = Context(model.rope(0, tokens.shape[1], x.dtype))
    streams = [x] * m
    for branch, p in zip(model.branches, model.depth[:-1], strict=True):
        dynamic = [torch.tanh(h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() @ p.dynamic) for h in streams]
        alpha = [p.read_mix[j, 0] + p.scales[0] * dynamic[j][..., 0] for j in range(m)]
        A = [[p.read_mix[j, 1 + k] + p.scales[0] * dynamic[j][..., 1 + k] for k in range(m)] for j in range(m)]
        beta = [p.write_mix[j] + p.scales[1] * dynamic[j][..., 1 + m] for j in range(m)]
        mixed = sum(alpha[j][..., None] * streams[j] for j in range(m))
        out = branch(rms_norm(mixed, p.norm), context)
        streams = [sum(A[j][k][..., None] * streams[j] for j in range(m)) + beta[k][..., None] * out for k in range(m)]
    logits = F.linear(rms_norm(sum(streams), model.final_norm), model.head)
    assert torch.allclose(model.logits(tokens), logits, rtol=1e-10, atol=1e-10)


def test_full_attnres_equals_a_loop_written_from_its_equation():
    model, tokens = randomised("full_attnres"), some_tokens()

    def mix(p, sources):
        logits = torch.stack([(p.query * rms_norm(v, p.key_norm)).sum(-1) for v in sources], -1)
        weights = logits.softmax(-1)
        return sum(weights[..., j, None] * v for j, v in enumerate(sources))

    sources = [F.embedding(tokens, model.embedding)]
    context = Context(model.rope(0, tokens.shape[1], sources[0].dtype))
    for i, branch in enumerate(model.branches):
        p = model.depth[i]
        x = sources[0] if i == 0 else mix(p, sources)
        sources.append(branch(rms_norm(x, p.norm), context))
    logits = F.linear(rms_norm(mix(model.depth[-1], sources), model.final_norm), model.head)
    assert torch.allclose(model.logits(tokens), logits, rtol=1e-10, atol=1e-10)


def test_depth_mix_passes_gradcheck():
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, 3, 5, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(4)]
    query = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, *vs: depth_mix([source(v) for v in vs], q), (query, *values))


def test_stream_operations_pass_gradcheck():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    streams = [draw(2, 3, 5) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda w, *xs: stream_mix(w, xs), (draw(2, 3, 3, 2), *streams))
    assert torch.autograd.gradcheck(normed_projection, (streams[0], draw(5, 4)))
    assert torch.autograd.gradcheck(rms_norm, (streams[0], draw(5)))


def test_rms_norm_equals_torchs_own():
    x, gain = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    assert torch.allclose(rms_norm(x, gain), F.rms_norm(x, (8,), gain, 1e-6), rtol=1e-13)
    half = x.bfloat16()
    assert rms_norm(half, gain.float()).dtype == torch.bfloat16
    assert torch.equal(rms_norm(half, gain.float()), F.rms_norm(half.float(), (8,), gain.float(), 1e-6).bfloat16())


def saved_bytes(name, n_layers):
    """Distinct storage that one forward pass keeps for its backward pass, the parameters aside."""
    shape = Shape(n_layers, 32, 2, 2, 96, 16)
    model = build(shape, topology(name), 0)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = some_tokens(16, 2, 16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model(tokens, tokens)
    assert loss.requires_grad  # the graph is alive, so no storage was reused
    return sum(kept.values())


def test_saved_activations_grow_linearly_with_depth(variant):
    shallow, deep, deeper = (saved_bytes(variant, n_layers) for n_layers in (32, 64, 128))
    assert deep <= 2.05 * shallow
    assert deeper <= 2.05 * deep


def test_grouped_queries_equal_repeated_key_and_value_heads():
    grouped = build(Shape(1, 32, 4, 2, 64, 20), topology("pre_ln"), 0).double()
    full = build(Shape(1, 32, 4, 4, 64, 20), topology("pre_ln"), 0).double()
    with torch.no_grad():
        for ours, theirs in zip(full.parameters(), grouped.parameters(), strict=True):
            if ours.shape == theirs.shape:
                ours.copy_(theirs)
        q, k, v = grouped.branches[0].qkv.split([32, 16, 16])
        twice = [w.view(2, 1, 8, 32).expand(2, 2, 8, 32).reshape(32, 32) for w in (k, v)]
        full.branches[0].qkv.copy_(torch.cat([q, *twice]))
    tokens = some_tokens(7, 2, 20)
    assert torch.allclose(grouped.logits(tokens), full.logits(tokens), rtol=1e-12, atol=1e-12)


def test_rotation_makes_scores_depend_on_distance_only():
    from depthlaw.archs.backbone import rope_tables, rotate

    cos, sin = rope_tables(12, 8)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, dtype=torch.float64, generator=generator).expand(1, 1, 12, 8) for _ in range(2))
    scores = (rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(2, 3))[0, 0]
    for offset in range(-11, 12):
        along = scores.diagonal(offset)
        assert torch.allclose(along, along[:1].expand_as(along), rtol=1e-12)
    assert scores[0].std() > 0.01


@pytest.mark.parametrize("n_kv_heads", [4, 2], ids=["mha", "gqa"])
def test_bf16_attention_of_a_short_sequence_is_as_near_to_fp64_as_torchs_fused_one(n_kv_heads):
    """On a CPU it is written out. torch's kernel keeps fp32 scores, ours rounds them: 3 times its error."""
    torch.manual_seed(n_kv_heads)
    q, k, v = (torch.randn(2, heads, 40, 16) for heads in (4, n_kv_heads, n_kv_heads))
    narrow = [x.bfloat16() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*(x.double() for x in narrow), is_causal=True, enable_gqa=True)
    fused = F.scaled_dot_product_attention(*narrow, is_causal=True, enable_gqa=True)
    found = causal_attention(*narrow)
    assert found.dtype == torch.bfloat16
    assert (found - exact).abs().max() < 3 * (fused - exact).abs().max()
