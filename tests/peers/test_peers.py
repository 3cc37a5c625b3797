"""Each topology that another package also has, against that package, with random parameters that are not the start's.

Run by `make test-peers`, which installs the packages. They are imported inside the tests, so that collecting this file
needs none of them, and plainly, so that a missing one is a failure here and not a skip.

Not compared here: `x-transformers` (its streams become their sum), `liger-kernel` and the fused kernel of `fla-core`
(Triton: they do not run on a CPU).
"""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from depthlaw.archs.backbone import Context, build
from depthlaw.archs.ops import depth_mix, norm, rms_norm, source
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology

pytestmark = pytest.mark.peers

SHAPE = Shape(4, 24, 3, 3, 64, 40)
GROUPED = Shape(3, 32, 4, 2, 64, 40)


def randomised(name, shape=SHAPE, dtype=torch.float64, spread=0.3):
    model = build(shape, topology(name), 0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=spread)
    return model


def tokens_of(T=9, B=2):
    return torch.randint(0, SHAPE.vocab_size, (B, T), generator=torch.Generator().manual_seed(3))


def random_like(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- hc: hyper-connections ---


def peer_hc(p, i, m):
    """Their module with our tensors. Its norm has a gain, ours none: a random gain there, and our W = diag(gain) W."""
    from hyper_connections import HyperConnections

    d = p.dynamic.shape[0]
    peer = HyperConnections(m, dim=d, layer_index=i).double()
    gain = 1 + 0.2 * random_like(d, seed=i)
    with torch.no_grad():
        peer.norm.gamma.copy_(gain - 1)
        peer.static_alpha.copy_(p.read_mix)
        peer.static_beta.copy_(p.write_mix)
        peer.dynamic_alpha_fn.copy_(p.dynamic[:, :-1] / gain[:, None])
        peer.dynamic_beta_fn.copy_(p.dynamic[:, -1] / gain)
        peer.dynamic_alpha_scale.copy_(p.scales[0])
        peer.dynamic_beta_scale.copy_(p.scales[1])
    return peer


def joined(streams):
    """Our tuple of streams as their (B m, T, d)."""
    return torch.stack(streams, 1).flatten(0, 1)


@pytest.mark.parametrize("m", [2, 4])
def test_one_sublayer_of_hc_equals_the_hyper_connections_package(m, monkeypatch):
    """Width connection (what is read, and the mixed streams), then depth connection with a random branch output."""
    monkeypatch.setattr(norm, "EPS", 1e-30)  # theirs divides by the norm and has no eps inside it
    hc = topology(f"hc(streams={m})")
    p = randomised(hc.label).depth[3]
    streams = tuple(random_like(2, 5, 24, seed=j) for j in range(m))
    out = random_like(2, 5, 24, seed=9)
    read, write = peer_hc(p, 3, m)(joined(streams))
    x, carry = hc.read(3, p, streams)
    assert torch.allclose(x, rms_norm(read, p.norm), rtol=1e-11, atol=1e-11)
    unwritten = hc.write(3, p, streams, torch.zeros_like(out), carry)
    found = hc.write(3, p, streams, out, carry)
    assert torch.allclose(joined(found), write(out), rtol=1e-11, atol=1e-11)
    assert torch.allclose(joined(unwritten), write(torch.zeros_like(out)), rtol=1e-11, atol=1e-11)


def test_hc_over_all_sublayers_equals_a_chain_of_the_package_in_value_and_gradient(monkeypatch):
    """Their expansion to streams, their connections around our branches, their sum over streams."""
    from hyper_connections import HyperConnections

    monkeypatch.setattr(norm, "EPS", 1e-30)
    model, tokens = randomised("hc"), tokens_of()
    expand, reduce = HyperConnections.get_expand_reduce_stream_functions(4)
    context = Context(model.rope(0, tokens.shape[1], torch.float64))
    H = expand(F.embedding(tokens, model.embedding))
    for i, branch in enumerate(model.branches):
        p = model.depth[i]
        read, write = peer_hc(p, i, 4)(H)
        H = write(branch(rms_norm(read, p.norm), context))
    expected = F.linear(rms_norm(reduce(H), model.final_norm), model.head)
    found = model.logits(tokens)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    wanted = [model.embedding, *model.branches.parameters(), *(model.depth[i].norm for i in range(8))]
    weights = random_like(*found.shape)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-8 * float(theirs.abs().max()))


# --- mhc: the hyper-connection of DeepSeek-V4 in transformers ---


def test_mhc_equals_the_hyper_connection_of_deepseek_v4_up_to_its_eps():
    """Read, write and residual coefficients of one sublayer, and the streams that come out.

    Theirs computes in fp32, adds its eps to the read gate and in each normalisation (1e-6: the tolerance here), and
    normalises columns last where ours normalises rows last: one row normalisation of theirs is the remaining step.
    Its `comb` is indexed [from, to] and applied transposed, which is our A.
    """
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

    m, d = 4, 24
    config = DeepseekV4Config(hidden_size=d, hc_mult=m, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=norm.EPS)
    peer = DeepseekV4HyperConnection(config)
    mhc, model = topology("mhc"), randomised("mhc", dtype=torch.float32, spread=0.5)
    p = model.depth[2]
    with torch.no_grad():
        p.bias.copy_(0.5 * random_like(2 * m + m * m))  # random, and not so near the identity that A says little
        peer.fn.copy_(p.dynamic.T)
        peer.base.copy_(p.bias)
        peer.scale.copy_(p.alphas)
    streams = tuple(random_like(2, 5, d, seed=j).float() for j in range(m))
    stacked = torch.stack(streams, 2)
    with torch.no_grad():
        post, comb, collapsed = peer(stacked)
        x, carry = mhc.read(2, p, streams)
        A, write = carry[:, :, :m], carry[:, :, m]
        assert (A.flatten(2).std(1) > 1e-2).all()  # A depends on the token
        assert torch.allclose(A, comb / comb.sum(-1, keepdim=True), rtol=0, atol=2e-5)
        assert torch.allclose(write, post, rtol=1e-5, atol=1e-6)
        assert torch.allclose(x, rms_norm(collapsed, p.norm), rtol=1e-4, atol=1e-5)
        out = random_like(2, 5, d, seed=9).float()
        expected = post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), stacked)
        found = torch.stack(mhc.write(2, p, streams, out, carry), 2)
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)
        mirrored = post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb, stacked)
        assert not torch.allclose(found, mirrored, rtol=0.1, atol=0.1)


# --- full_attnres: fla-core ---


@pytest.fixture(scope="module")
def naive_attnres():
    """The reference function of fla-core, from its own file.

    Importing the package itself needs Triton, which a CPU build of torch does not bring; this file needs torch and
    einops only.
    """
    (root,) = importlib.util.find_spec("fla").submodule_search_locations
    spec = importlib.util.spec_from_file_location("fla_attnres_naive", Path(root) / "ops" / "attnres" / "naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_attnres


@pytest.mark.parametrize("n_sources", [1, 2, 9])
def test_the_mix_of_full_attnres_equals_the_reference_of_fla_core(n_sources, naive_attnres):
    """Value and gradients of one mix. Theirs computes in fp32 whatever it is given."""
    sources = [random_like(2, 5, 24, seed=j).float().requires_grad_() for j in range(n_sources)]
    query, gain = random_like(24, seed=20).float().requires_grad_(), (1 + random_like(24, seed=21)).float()
    gain.requires_grad_()
    wanted, weights = [*sources, query, gain], random_like(2, 5, 24, seed=22).float()
    expected = naive_attnres(query, sources, gain, rms_eps=norm.EPS)
    found = depth_mix([source(v) for v in sources], query * gain)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_full_attnres_over_all_sublayers_equals_a_chain_of_the_reference(naive_attnres):
    model, tokens = randomised("full_attnres", dtype=torch.float32), tokens_of()
    context = Context(model.rope(0, tokens.shape[1], torch.float32))
    sources = [F.embedding(tokens, model.embedding)]

    def mix(p):
        return naive_attnres(p.query, sources, p.key_norm, rms_eps=norm.EPS)

    for i, branch in enumerate(model.branches):
        p = model.depth[i]
        sources.append(branch(rms_norm(sources[0] if i == 0 else mix(p), p.norm), context))
    expected = F.linear(rms_norm(mix(model.depth[-1]), model.final_norm), model.head)
    assert (model.logits(tokens) - expected).abs().max() < 1e-4 * expected.abs().max()


# --- deepnorm: torchscale ---


@pytest.fixture
def torchscale_decoder(monkeypatch):
    """(deepnorm?, L) -> a torchscale decoder.

    torchscale imports fairscale's activation checkpointing and timm's stochastic depth, which it calls for neither of
    the two numbers compared here: empty functions stand for them.
    """
    fairscale, timm = types.ModuleType("fairscale.nn"), types.ModuleType("timm.models.layers")
    fairscale.checkpoint_wrapper = fairscale.wrap = lambda module, *_, **__: module
    timm.drop_path = lambda x, *_: x
    for module in (fairscale, timm):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    from torchscale.architecture.config import DecoderConfig
    from torchscale.architecture.decoder import Decoder

    def decoder(deepnorm, L):
        torch.manual_seed(0)
        config = DecoderConfig(
            deepnorm=deepnorm, subln=False, decoder_layers=L, decoder_embed_dim=24, decoder_ffn_embed_dim=64,
            decoder_attention_heads=3, vocab_size=40, no_output_layer=True,
        )  # fmt: skip
        return Decoder(config)

    return decoder


@pytest.mark.parametrize("L", [1, 6, 24])
def test_deepnorm_has_the_alpha_and_beta_of_torchscale(L, torchscale_decoder):
    """alpha by what a zero branch leaves of the stream, beta by the start of each matrix over that without deepnorm.

    The matrices that torchscale scales (value, output, both of its feed-forward) and does not (query, key) are the
    same. Its feed-forward has one matrix before the activation, ours two, which both take that one's factor.
    """
    shape = Shape(L, 24, 3, 3, 64, 40)
    deepnorm = topology("deepnorm")
    deep, plain = (dict(torchscale_decoder(kind, L).named_parameters()) for kind in (True, False))
    theirs = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "out_proj", "gate": "fc1", "up": "fc1", "down": "fc2"}
    for ours, name in theirs.items():
        found = [key for key in deep if name in key and key.endswith("weight")]
        assert len(found) == L
        for key in found:
            beta = float((deep[key].norm() / plain[key].norm()).detach())
            assert deepnorm.init_scale(0, ours, shape) == pytest.approx(beta, rel=1e-5), ours
    layer = torchscale_decoder(True, L).layers[0]
    x = random_like(2, 5, 24)
    scaled = layer.residual_connection(torch.zeros_like(x), x)
    p = randomised("deepnorm", shape).depth[0]
    out = random_like(2, 5, 24, seed=6)
    assert torch.allclose(deepnorm.write(0, p, x, out, None), rms_norm(scaled + out, p.norm), rtol=1e-12)


# --- pre_ln: transformers' Llama ---


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 2e-5), (torch.float64, 2e-6)], ids=["fp32", "fp64"])
@pytest.mark.parametrize("shape", [SHAPE, GROUPED], ids=["mha", "gqa"])
def test_pre_ln_equals_transformers_llama_with_copied_weights(shape, dtype, within):
    """Logits of the full pass. In fp64, too, theirs has norms and rotation tables in fp32: so is the tolerance."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, tokens = randomised("pre_ln", shape, dtype), tokens_of(17)
    peer = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size, hidden_size=shape.d_model, intermediate_size=shape.d_ff,
            num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.n_kv_heads, rms_norm_eps=norm.EPS, tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    ).to(dtype)  # fmt: skip
    state = {
        "model.embed_tokens.weight": model.embedding,
        "model.norm.weight": model.final_norm,
        "lm_head.weight": model.head,
    }
    places = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "out": "self_attn.o_proj"}
    places |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    for i, branch in enumerate(model.branches):
        layer = f"model.layers.{i // 2}"
        state[f"{layer}.{('input', 'post_attention')[i % 2]}_layernorm.weight"] = model.depth[i].norm
        state |= {f"{layer}.{places[name]}.weight": matrix for name, matrix in branch.matrices()}
    peer.load_state_dict(state)  # strict: every tensor of theirs is one of ours
    with torch.no_grad():
        expected, found = peer(input_ids=tokens, use_cache=False).logits, model.logits(tokens)
    assert found.dtype == dtype
    assert (found - expected).abs().max() < within * expected.abs().max()
