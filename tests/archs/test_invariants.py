"""The invariants of each design, and loops written from the equations; float64 where that makes equality sharp."""

import math

import pytest
import torch
from torch.nn import functional as F

from depthlaw.archs.backbone import Context, build
from depthlaw.archs.ops import norm, rms_norm, sinkhorn
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology

SHAPE = Shape(4, 24, 3, 3, 64, 40)
GROUPED = Shape(3, 32, 4, 2, 64, 40)


def randomised(name, shape=SHAPE, spread=0.3, seed=0):
    model = build(shape, topology(name), seed).double()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=spread)
    return model


def tokens_of(T=9, B=2, seed=3):
    return torch.randint(0, SHAPE.vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def with_branches_of(name, plain):
    """A model of the topology at its start, with the branches of another model."""
    model = build(plain.shape, topology(name), 0).double()
    with torch.no_grad():
        for ours, theirs in zip(model.branches.parameters(), plain.branches.parameters(), strict=True):
            ours.copy_(theirs)
    return model


def strong_branches(shape=SHAPE):
    """Pre-LN whose branches write as much as the stream holds, everything else at its start."""
    model = build(shape, topology("pre_ln"), 0).double()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.branches.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["mha", "gqa"])
def test_decoding_with_a_cache_equals_the_full_pass(variant, shape):
    model, tokens = randomised(variant, shape), tokens_of(11)
    full = model.logits(tokens)
    caches = model.new_caches(2, 11)
    found = [model.decode(tokens[:, :4], caches)]  # a prompt at once, then a chunk, then token by token
    found.append(model.decode(tokens[:, 4:6], caches))
    found += [model.decode(tokens[:, t : t + 1], caches) for t in range(6, 11)]
    expected = full[:, [3, 5, *range(6, 11)]]
    assert torch.allclose(torch.stack(found, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["hc", "full_attnres", "block_attnres", "block_attnres(grows=True)", "hybrid(blocks=2)", "hc(streams=3)"]
)
def test_at_init_the_topology_equals_pre_ln_with_equal_branches(name, monkeypatch):
    # At std 0.02 the eps of the norms alone moves the logits of a mean by per cents: a confounder of toy widths.
    monkeypatch.setattr(norm, "EPS", 1e-30)
    plain = strong_branches()
    expected, found = plain.logits(tokens_of()), with_branches_of(name, plain).logits(tokens_of())
    assert (expected - found).abs().max() < 1e-10 * expected.abs().max()


def test_block_1_of_lns_is_pre_ln_and_later_ones_shrink():
    plain = strong_branches(Shape(1, 24, 3, 3, 64, 40))
    assert torch.equal(plain.logits(tokens_of()), with_branches_of("lns", plain).logits(tokens_of()))
    lns = topology("lns")
    p = build(SHAPE, lns, 0).depth
    x = torch.randn(2, 3, 24)
    for i in range(8):
        read, _ = lns.read(i, p[i], x)
        assert torch.allclose(read, rms_norm(x, p[i].norm) / math.sqrt(i // 2 + 1))


def test_keel_of_one_block_is_pre_ln_up_to_the_last_norm(monkeypatch):
    monkeypatch.setattr(norm, "EPS", 1e-30)
    plain = strong_branches(Shape(1, 24, 3, 3, 64, 40))
    expected, found = plain.logits(tokens_of()), with_branches_of("keel", plain).logits(tokens_of())
    assert (expected - found).abs().max() < 1e-10 * expected.abs().max()


def test_block_attnres_of_length_1_equals_full_attnres():
    full, blocks = (randomised(name) for name in ("full_attnres", "block_attnres(length=1)"))
    assert torch.allclose(full.logits(tokens_of()), blocks.logits(tokens_of()), rtol=1e-12, atol=1e-12)


def test_deepnorm_starts_value_output_and_feed_forward_matrices_at_beta():
    shape = Shape(6, 24, 3, 3, 64, 40)
    plain, deep = (build(shape, topology(name), 5) for name in ("pre_ln", "deepnorm"))
    beta = (8 * 6) ** -0.25
    for ours, theirs in zip(deep.branches, plain.branches, strict=True):
        for (name, a), (_, b) in zip(ours.matrices(), theirs.matrices(), strict=True):
            assert torch.allclose(a, b if name in ("q", "k") else beta * b, rtol=1e-6), name


def stream_after(name, shape=SHAPE):
    """(model, embedding, context) for loops written from the equations."""
    model, tokens = randomised(name, shape), tokens_of()
    x = F.embedding(tokens, model.embedding)
    return model, x, Context(model.rope(0, tokens.shape[1], x.dtype))


def loop(name, h, branch_of, p, i, L):
    """One sublayer of a single-stream design, from its row in the table of topologies."""
    N = lambda x, gain: x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain  # noqa: E731
    if name == "sandwich_ln":
        return h + N(branch_of(N(h, p.norm)), p.out_norm)
    if name == "lns":
        return h + branch_of(N(h, p.norm) / math.sqrt(i // 2 + 1))
    if name == "deepnorm":
        return N((2 * L) ** 0.25 * h + branch_of(h), p.norm)
    inner = branch_of(N(h, p.norm))
    if i == 0:
        return h + inner
    return N((h if i == 1 else 2 * L * h) + inner, p.outer_norm)


@pytest.mark.parametrize("name", ["sandwich_ln", "lns", "deepnorm", "keel"])
def test_single_stream_designs_equal_a_loop_written_from_their_equations(name):
    model, h, context = stream_after(name)
    for i, branch in enumerate(model.branches):
        h = loop(name, h, lambda x, branch=branch: branch(x, context), model.depth[i], i, SHAPE.n_layers)
    logits = F.linear(rms_norm(h, model.final_norm), model.head)
    assert torch.allclose(model.logits(tokens_of()), logits, rtol=1e-10, atol=1e-10)


def plain_sinkhorn(logits):
    """Token by token in Python numbers: a row softmax, then columns and rows in turn."""
    m = logits.shape[-1]
    out = torch.empty_like(logits)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in logits.shape[:-2])):
        rows = [[math.exp(v) for v in row] for row in logits[tuple(place)].tolist()]
        rows = [[v / sum(row) for v in row] for row in rows]
        for _ in range(20):
            sums = [sum(row[k] for row in rows) for k in range(m)]
            rows = [[v / s for v, s in zip(row, sums, strict=True)] for row in rows]
            rows = [[v / sum(row) for v in row] for row in rows]
        out[tuple(place)] = torch.tensor(rows, dtype=logits.dtype)
    return out


@pytest.mark.parametrize("free", [0.0, 0.5, 1.0])
def test_mhc_equals_a_loop_written_from_its_equation(free):
    model, x, context = stream_after(f"mhc(free={free})" if free else "mhc")
    m = 4
    H = [x] * m
    for i, branch in enumerate(model.branches):
        p = model.depth[i]
        flat = torch.cat(H, -1)
        logits = flat / (flat.square().mean(-1, keepdim=True) + 1e-6).sqrt() @ p.dynamic
        a = p.alphas[0] * logits[..., :m] + p.bias[:m]
        b = p.alphas[1] * logits[..., m : 2 * m] + p.bias[m : 2 * m]
        raw = (p.alphas[2] * logits[..., 2 * m :] + p.bias[2 * m :]).unflatten(-1, (m, m))
        E = raw + 8 * (1 - torch.eye(m)) + torch.eye(m)
        one, inf = E.abs().sum(-2).amax(-1), E.abs().sum(-1).amax(-1)
        A = (1 - free) * plain_sinkhorn(raw) + free * E / torch.clamp((one * inf).sqrt(), min=1)[..., None, None]
        read = sum(torch.sigmoid(a[..., j, None]) * H[j] for j in range(m))
        out = branch(rms_norm(read, p.norm), context)
        H = [
            sum(A[..., j, k, None] * H[j] for j in range(m)) + 2 * torch.sigmoid(b[..., k, None]) * out
            for k in range(m)
        ]
    logits = F.linear(rms_norm(sum(H) / m, model.final_norm), model.head)
    assert torch.allclose(model.logits(tokens_of()), logits, rtol=1e-9, atol=1e-9)


def test_sinkhorn_is_doubly_stochastic_as_far_as_20_iterations_go():
    logits = 0.5 * torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(0))
    A = sinkhorn(logits)
    assert (A >= 0).all()
    assert (A.sum(-1) - 1).abs().max() < 1e-6
    assert (A.sum(-2) - 1).abs().max() < 1e-4
    product = torch.eye(4)
    for one in A[:64]:
        product = product @ one
    assert (product.sum(-1) - 1).abs().max() < 1e-4
    assert (product.sum(-2) - 1).abs().max() < 1e-4
    assert sinkhorn(torch.randn(3, 1, 1)).eq(1).all()
    assert torch.autograd.gradcheck(sinkhorn, torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("free", [0.0, 0.3, 1.0])
def test_the_residual_map_of_mhc_never_stretches(free):
    mhc = topology(f"mhc(free={free})" if free else "mhc")
    logits = 3 * torch.randn(300, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # Sinkhorn after 20 iterations is only nearly doubly stochastic for logits this large.
    assert torch.linalg.matrix_norm(mhc._residual(logits), 2).max() <= 1 + 2e-2 * (1 - free) + 1e-12


@pytest.mark.parametrize(("label", "rank"), [("mhc", 4.0), ("mhc(gap=0.0)", 1.0)])
def test_the_gap_of_mhc_decides_the_rank_of_the_product_at_init(label, rank):
    shape = Shape(16, 16, 1, 1, 48, 20)
    model = build(shape, topology(label), 0)
    product = torch.eye(4, dtype=torch.float64)
    for p in model.depth[:-1]:
        product = product @ sinkhorn(p.bias[8:].double().view(4, 4))
    sigma = torch.linalg.svdvals(product)
    share = sigma / sigma.sum()
    assert torch.exp(-(share * share.clamp(min=1e-30).log()).sum()).item() == pytest.approx(rank, abs=0.02)


@pytest.mark.parametrize("name", ["block_attnres", "block_attnres(length=3)", "block_attnres(grows=True)"])
def test_block_attnres_equals_a_loop_written_from_its_equation(name):
    shape = Shape(7, 24, 3, 3, 64, 40)
    model, x, context = stream_after(name, shape)
    b = {"block_attnres": 2, "block_attnres(length=3)": 3, "block_attnres(grows=True)": 4}[name]
    frozen, running = [x], []

    def mix(p):
        sources = frozen + ([sum(running)] if running else [])
        weights = torch.stack([(p.query * rms_norm(v, p.key_norm)).sum(-1) for v in sources], -1).softmax(-1)
        return sum(weights[..., j, None] * v for j, v in enumerate(sources))

    for i, branch in enumerate(model.branches):
        if i > 0 and i % b == 0:
            frozen.append(sum(running))
            running = []
        p = model.depth[i]
        running.append(branch(rms_norm(x if i == 0 else mix(p), p.norm), context))
    logits = F.linear(rms_norm(mix(model.depth[-1]), model.final_norm), model.head)
    assert torch.allclose(model.logits(tokens_of()), logits, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["mha", "gqa"])
def test_moda_equals_a_loop_written_from_its_equation(shape, rotated):
    model, h, (rope, _) = stream_after("moda(rotated=True)" if rotated else "moda", shape)
    B, T, _ = h.shape
    H, G, K = shape.n_heads, shape.n_kv_heads, shape.head_dim
    cos, sin = (t[:, : K // 2] for t in (rope[0], rope[1][:, K // 2 :].repeat(1, 2)))

    def turn(x, t):
        left, right = x[: K // 2], x[K // 2 :]
        return torch.cat([left * cos[t] - right * sin[t], right * cos[t] + left * sin[t]])

    cache = []  # of each earlier sublayer: keys and values, (B, T, G, K)
    for i, branch in enumerate(model.branches):
        p = model.depth[i]
        x = rms_norm(h, p.norm)
        if i % 2 == 1:
            if i < 2 * shape.n_layers - 1:
                both = (x @ p.depth_kv.T).unflatten(-1, (2, G, K))
                cache.append((both[:, :, 0], both[:, :, 1]))
            h = h + branch(x, Context(rope))
            continue
        q, k, v = (x @ w.T for w in branch.qkv.split([H * K, G * K, G * K]))
        q, k, v = (t.unflatten(-1, (-1, K)) for t in (q, k, v))
        mixed = torch.zeros(B, T, H, K, dtype=h.dtype)
        for s, t, head in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(H)).tolist():
            g = head // (H // G)
            asked = turn(q[s, t, head], t) if rotated else q[s, t, head]
            scores = [turn(q[s, t, head], t) @ turn(k[s, u, g], u) for u in range(t + 1)]
            scores += [asked @ keys[s, t, g] for keys, _ in cache]
            weights = (torch.stack(scores) / math.sqrt(K)).softmax(0)
            values = [v[s, u, g] for u in range(t + 1)] + [values[s, t, g] for _, values in cache]
            mixed[s, t, head] = sum(w * value for w, value in zip(weights, values, strict=True))
        cache.append((k, v))
        h = h + mixed.flatten(2) @ branch.out.T
    logits = F.linear(rms_norm(h, model.final_norm), model.head)
    assert torch.allclose(model.logits(tokens_of()), logits, rtol=1e-10, atol=1e-10)


def test_moda_with_an_empty_depth_cache_equals_fused_attention_and_other_tokens_keys_do_not_matter():
    attention = randomised("pre_ln", GROUPED).branches[0]
    x = torch.randn(2, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    context = Context(build(GROUPED, topology("pre_ln"), 0).rope(0, 6, x.dtype))
    alone, _ = attention.over_depth(x, context, (), False)
    assert torch.allclose(alone, attention(x, context), rtol=1e-12, atol=1e-12)
    depth = [tuple(torch.randn(2, 2, 6, 8, dtype=x.dtype) for _ in range(2))]
    before, _ = attention.over_depth(x, context, depth, False)
    changed = [tuple(t.index_fill(2, torch.tensor([3]), 9.0) for t in depth[0])]
    after, _ = attention.over_depth(x, context, changed, False)
    differs = (before - after).abs().amax((0, 2)) > 1e-9
    assert differs.tolist() == [False, False, False, True, False, False]


def test_modas_depth_logits_do_not_depend_on_the_absolute_position_unless_rotated():
    """The same tokens later in the cache's positions: equal where the query meets depth keys before rotation."""
    for name, equal in (("moda", True), ("moda(rotated=True)", False)):
        model, tokens = randomised(name), tokens_of(5)
        shifted = model.rope(7, 12, torch.float64)
        expected = model.logits(tokens)
        model.rope = lambda start, stop, dtype, shifted=shifted: shifted
        assert torch.allclose(model.logits(tokens), expected, rtol=1e-9, atol=1e-9) is equal


def test_modas_published_extra_of_48_million_parameters():
    shape = Shape(24, 1024, 16, 16, 2736, 50280)
    assert topology("moda").extra_params(shape) == 2 * 1024 * 1024 * 23 == 48_234_496


def test_hc_streams_really_mix_and_in_the_right_direction():
    hc = topology("hc")
    model = build(SHAPE, hc, 0).double()
    p = model.depth[1]
    with torch.no_grad():
        p.read_mix[:, 1:] = torch.zeros(4, 4)
        p.read_mix[2, 1 + 0] = 1.0  # A_20: stream 2 feeds stream 0 and nothing else
        p.write_mix.zero_()
    streams = tuple(torch.full((1, 1, 24), float(j + 1), dtype=torch.float64) for j in range(4))
    _, carry = hc.read(1, p, streams)
    out = hc.write(1, p, streams, torch.ones(1, 1, 24, dtype=torch.float64), carry)
    assert [float(h.detach().mean()) for h in out] == pytest.approx([3.0, 0.0, 0.0, 0.0])


def test_a_hybrid_is_its_parts_in_sequence():
    k = 2
    label = f"hybrid(blocks={k}, first='hc', then='block_attnres')"
    model, tokens = randomised(label), tokens_of()
    x = F.embedding(tokens, model.embedding)
    context = Context(model.rope(0, tokens.shape[1], x.dtype))
    for name, span in (("hc", range(2 * k)), ("block_attnres", range(2 * k, 8))):
        part = topology(name)
        state = part.start(x)
        for j, i in enumerate(span):
            p = model.depth[i]
            p.n_layers = len(span) // 2
            x, carry = part.read(j, p, state)
            state = part.write(j, p, state, model.branches[i](x, context), carry)
        x = part.readout(model.depth[8], state)
    logits = F.linear(rms_norm(x, model.final_norm), model.head)
    for p in model.depth:
        p.n_layers = 4
    assert torch.allclose(model.logits(tokens), logits, rtol=1e-12, atol=1e-12)
