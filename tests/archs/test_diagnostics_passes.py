"""Skipping and swapping blocks: what they compute, that they restore, and that reused states change no bit."""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from depthlaw.archs.backbone import Context
from depthlaw.archs.diagnostics.passes import Pass, skipped, swapped
from depthlaw.archs.diagnostics.permutation import permutation
from depthlaw.archs.diagnostics.skips import skip_scores
from depthlaw.archs.ops import norm, rms_norm


def test_a_pass_block_by_block_is_the_model_to_the_last_bit(variant, random_model, batches):
    model, (inputs, targets) = random_model(variant), batches[0]
    with torch.no_grad():
        run = Pass(model, inputs)
        assert torch.equal(run.lens(4, run.states[4]), model.logits(inputs))
        assert run.loss(run.states[4], targets) == float(model(inputs, targets))
        again = list(run.steps())
        assert torch.equal(run.z(4, model.topology.write(*again[-1])), run.z(4, run.states[4]))


@pytest.mark.parametrize("disturb", [lambda m: skipped(m, 2), lambda m: swapped(m, 1, 3)], ids=["skip", "swap"])
def test_a_disturbed_model_is_restored_bit_for_bit_even_when_the_body_raises(variant, disturb, random_model, batches):
    model, (inputs, _) = random_model(variant), batches[0]
    before, topology = copy.deepcopy(model.state_dict()), model.topology
    with torch.no_grad():
        logits = model.logits(inputs)
        with disturb(model):
            assert not torch.allclose(model.logits(inputs), logits)
        with pytest.raises(RuntimeError, match="in the body"), disturb(model):
            raise RuntimeError("in the body")
        assert torch.equal(model.logits(inputs), logits)
    assert model.topology is topology
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_blocks_that_do_not_exist_are_refused(random_model):
    model = random_model("pre_ln")
    with pytest.raises(IndexError, match="block is 4; this model has blocks 0 to 3"), skipped(model, 4):
        pass
    with pytest.raises(IndexError, match="block is -1"), swapped(model, 0, -1):
        pass


# ---- reused states


def test_causal_scores_and_pruning_from_reused_states_equal_full_recomputation(variant, random_model, batches):
    model, L = random_model(variant), 4
    causal, pruning = skip_scores(model, batches)
    change, size, losses, tokens = np.zeros((L, L)), np.zeros(L), np.zeros(L + 1), 0
    with torch.no_grad():
        for inputs, targets in batches:
            n = inputs.numel()
            plain = states_of(model, inputs)
            size += [float((b - a).norm(dim=-1).sum()) for a, b in pairwise(plain)]
            for s in range(L):
                with skipped(model, s):
                    z = states_of(model, inputs, model.topology.inner)
                    losses[s] += n * float(model(inputs, targets))
                for block in range(s + 1, L):
                    moved = (z[block + 1] - z[block]) - (plain[block + 1] - plain[block])
                    change[s, block] += float(moved.norm(dim=-1).sum())
            losses[L] += n * float(model(inputs, targets))
            tokens += n
    expected = np.where(np.triu(np.ones((L, L)), 1) > 0, change / size, np.nan)
    assert np.array_equal(causal.values["score"], expected, equal_nan=True)
    assert np.array_equal(pruning.values["loss_increase"], losses[:L] / tokens - losses[L] / tokens)
    assert np.isnan(causal.values["score"]).sum() == 10
    assert causal.summary["share_late"] == np.mean(expected[1:][~np.isnan(expected[1:])] > 0.45)


def states_of(model, inputs, viewed=None):
    """z_0 .. z_L of one whole pass through whatever topology the model has now."""
    run, viewed = Pass(model, inputs), viewed or model.topology
    return [viewed.depth_state(2 * l, model.depth[2 * l], state) for l, state in enumerate(run.states)]  # noqa: E741


def test_permutation_scores_from_reused_states_equal_full_recomputation(variant, random_model, batches):
    model = random_model(variant)
    found = permutation(model, batches)
    tokens = sum(inputs.numel() for inputs, _ in batches)
    with torch.no_grad():
        loss = sum(i.numel() * float(model(i, t)) for i, t in batches)
        for a in range(4):
            for b in range(a + 1, 4):
                with swapped(model, b, a):
                    other = sum(i.numel() * float(model(i, t)) for i, t in batches)
                assert found.values["score"][a, b] == abs(loss - other) / loss
                assert found.values["loss"][a, b] == other / tokens
    assert np.isnan(found.values["score"]).sum() == 10


def test_permutation_takes_no_more_batches_than_are_enough(monkeypatch, random_model, batches):
    model = random_model("pre_ln")
    first, both = (permutation(model, given).values["score"] for given in (batches[:1], batches))
    assert not np.array_equal(first, both, equal_nan=True)
    for enough, expected in ((27, first), (28, both)):  # the first batch has 27 tokens
        monkeypatch.setattr("depthlaw.archs.diagnostics.permutation.ENOUGH_TOKENS", enough)
        assert np.array_equal(permutation(model, batches).values["score"], expected, equal_nan=True)


# ---- what skipping means


def naive_attnres(model, inputs, length, skip):
    """Logits of attention over depth with one block skipped, as the definition says; `length` 1 is the full form."""
    x = F.embedding(inputs, model.embedding)
    context = Context(model.rope(0, inputs.shape[1], x.dtype))
    frozen, running, newest = [x], None, False

    def mix(p, sources):
        if newest:
            return sources[-1]
        stacked = torch.stack(sources, 2)
        keys = stacked * torch.rsqrt(stacked.square().mean(-1, keepdim=True) + norm.EPS) * p.key_norm
        return (torch.softmax(keys @ p.query, -1).unsqueeze(-1) * stacked).sum(2)

    for i, (branch, p) in enumerate(zip(model.branches, model.depth, strict=False)):
        if i // 2 == skip:
            newest = True
            continue
        if i > 0 and i % length == 0 and running is not None:
            frozen, running = [*frozen, running], None
        sources = [*frozen, running] if running is not None else frozen
        x = frozen[0] if i == 0 else mix(p, sources)
        out = branch(rms_norm(x, p.norm), context)
        running = out if running is None else running + out
        newest = False
    x = mix(model.depth[-1], [*frozen, running] if running is not None else frozen)
    return F.linear(rms_norm(x, model.final_norm), model.head)


@pytest.mark.parametrize("skip", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "length"),
    [("full_attnres", 1), ("block_attnres(length=2)", 2), ("block_attnres(length=3)", 3), ("block_attnres", 1)],
)
def test_a_skip_in_attention_over_depth_adds_no_source_and_the_next_mix_returns_the_newest(
    name, length, skip, random_model, batches
):
    model, (inputs, _) = random_model(name), batches[0]
    with torch.no_grad(), skipped(model, skip):
        torch.testing.assert_close(model.logits(inputs), naive_attnres(model, inputs, length, skip))


def test_a_skipped_block_of_moda_leaves_no_entry_in_the_depth_cache(random_model, batches):
    model, (inputs, _) = random_model("moda"), batches[0]
    with torch.no_grad(), skipped(model, 1):
        run = Pass(model, inputs)
    assert [len(state.cache) for state in run.states] == [0, 2, 2, 4, 5]  # the last feed-forward has none


@pytest.mark.parametrize("name", ["pre_ln", "sandwich_ln", "hc", "mhc", "deepnorm", "keel", "lns"])
def test_skipping_equals_the_same_model_without_the_block(name, random_model, batches):
    """With streams and plain residuals the state is all there is, so the rest is a shallower model."""
    model, (inputs, _) = random_model(name), batches[0]
    with torch.no_grad():
        with skipped(model, 2):
            logits = model.logits(inputs)
        x = F.embedding(inputs, model.embedding)
        run, state = Pass(model, inputs), model.topology.start(x)
        for block in (0, 1, 3):
            state = run.block(block, state)
        assert torch.equal(logits, run.lens(4, state))


# ---- what swapping means


def test_swapping_pre_ln_blocks_is_renaming_their_tensors(random_model, batches):
    model, (inputs, _) = random_model("pre_ln"), batches[0]
    renamed = copy.deepcopy(model)
    places = {2: 6, 3: 7, 6: 2, 7: 3}
    state = {}
    for name, tensor in model.state_dict().items():
        group, *rest = name.split(".")
        if rest and int(rest[0]) in places:
            name = ".".join([group, str(places[int(rest[0])]), *rest[1:]])
        state[name] = tensor.clone()
    renamed.load_state_dict(state)
    with torch.no_grad(), swapped(model, 1, 3):
        assert torch.equal(model.logits(inputs), renamed.logits(inputs))


def test_swapping_in_attention_over_depth_takes_the_queries_that_follow_a_block(random_model, batches):
    model, (inputs, _) = random_model("full_attnres"), batches[0]
    renamed = copy.deepcopy(model)
    with torch.no_grad():
        for a, b in ((2, 6), (3, 7)):
            for ours, theirs in ((a, b), (b, a)):
                renamed.branches[ours].load_state_dict(model.branches[theirs].state_dict())
                renamed.depth[ours].norm.copy_(model.depth[theirs].norm)
        for a, b in ((3, 7), (4, 8)):
            for ours, theirs in ((a, b), (b, a)):
                renamed.depth[ours].query.copy_(model.depth[theirs].query)
                renamed.depth[ours].key_norm.copy_(model.depth[theirs].key_norm)
        with swapped(model, 1, 3):
            assert torch.equal(model.logits(inputs), renamed.logits(inputs))


def test_the_factor_of_lns_travels_with_its_block(random_model, batches):
    """lns is pre_ln with 1 / sqrt(l) in its gains, and there the gains travel."""
    lns, plain, (inputs, _) = random_model("lns"), random_model("pre_ln"), batches[0]
    plain.load_state_dict(lns.state_dict())
    with torch.no_grad():
        for i in range(8):
            plain.depth[i].norm.mul_((i // 2 + 1) ** -0.5)
        for a, b in ((0, 3), (1, 2)):
            with swapped(lns, a, b), swapped(plain, a, b):
                torch.testing.assert_close(lns.logits(inputs), plain.logits(inputs))
        with swapped(lns, 0, 1), swapped(lns, 1, 2), swapped(plain, 0, 1), swapped(plain, 1, 2):
            torch.testing.assert_close(lns.logits(inputs), plain.logits(inputs))
    hybrid = random_model("hybrid(blocks=2, first='lns', then='lns')")
    hybrid.load_state_dict(lns.state_dict())
    with torch.no_grad(), swapped(hybrid, 0, 1):
        first = hybrid.topology.read(0, hybrid.depth[0], F.embedding(inputs, hybrid.embedding))[0]
        expected = rms_norm(F.embedding(inputs, hybrid.embedding), hybrid.depth[0].norm) * 2**-0.5
        torch.testing.assert_close(first, expected)


def make_blocks_identical(model):
    """Every tensor of a sublayer becomes that of the first sublayer of its parity that has it."""
    first = {}
    with torch.no_grad():
        for i, modules in enumerate(zip([*model.branches, torch.nn.Identity()], model.depth, strict=True)):
            for module in modules:
                for name, tensor in module.named_parameters():
                    tensor.copy_(first.setdefault((i % 2, name, tensor.shape), tensor))


def test_identical_blocks_swap_at_score_0(variant, random_model, batches):
    """Except lns, whose factor travels. What keel's first attention does without an outer norm stays where it is."""
    model = random_model(variant)
    make_blocks_identical(model)
    score = permutation(model, batches).values["score"]
    for a in range(4):
        for b in range(a + 1, 4):
            if variant.startswith("hybrid"):
                k = model.topology.blocks
                if (a < k) != (b < k) or (a == k and "keel" in variant):
                    continue
            if variant == "lns":
                assert score[a, b] > 1e-6
            else:
                assert score[a, b] == 0, (a, b)
