"""Each diagnostic on a case whose answer is known, or against its definition written out for one token."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from depthlaw.archs.backbone import build
from depthlaw.archs.diagnostics.angular import angular_distance
from depthlaw.archs.diagnostics.dead_zone import dead_zone
from depthlaw.archs.diagnostics.finding import late, share_above
from depthlaw.archs.diagnostics.lens import logit_lens
from depthlaw.archs.diagnostics.passes import Pass
from depthlaw.archs.diagnostics.paths import path_weights
from depthlaw.archs.diagnostics.rank import effective_rank, residual_rank
from depthlaw.archs.diagnostics.skips import skip_scores
from depthlaw.archs.ops import norm, rms_norm
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology


def silence(model, block):
    with torch.no_grad():
        model.branches[2 * block].out.zero_()
        model.branches[2 * block + 1].down.zero_()


# ---- skips


@pytest.mark.parametrize("name", ["pre_ln", "sandwich_ln", "lns"])
def test_a_block_with_zero_output_has_causal_and_pruning_score_0(name, random_model, batches):
    model = random_model(name)
    silence(model, 1)
    causal, pruning = skip_scores(model, batches)
    assert causal.values["score"][1, 2:].tolist() == [0, 0]
    assert pruning.values["loss_increase"][1] == 0
    assert (causal.values["score"][0, 2:] > 0).all()
    assert np.isnan(causal.values["score"][0, 1])  # a block that does nothing has no contribution to change


def test_summaries_take_the_last_three_quarters_and_the_curve_has_the_threshold_in_it(random_model, batches):
    assert [late(n) for n in (4, 12, 13, 32)] == [1, 3, 4, 8]
    causal, _ = skip_scores(random_model("pre_ln"), batches)
    scores = causal.values["score"]
    rest = [scores[s, l] for s in range(1, 4) for l in range(s + 1, 4)]  # noqa: E741
    assert causal.summary["share_late"] == sum(x > 0.45 for x in rest) / 3
    assert causal.curve[18] == causal.summary["share_late"]  # 18 x 0.025
    assert share_above(np.array([0.1, 0.5, np.nan, 0.9]), np.array([0.0, 0.5, 0.95])).tolist() == [1, 1 / 3, 0]


# ---- angular distance


@pytest.mark.parametrize(("write", "distance"), [((-1, 1), 0.5), ((-2, 0), 1.0), ((3, 0), 0.0), ((0, 1), 0.25)])
def test_angular_distance_of_states_at_a_known_angle(write, distance):
    """z_0 = e_0 for each token, and one attention that adds `write` in the plane of e_0 and e_1."""
    model = build(Shape(1, 8, 1, 1, 16, 5), topology("pre_ln"), 0).double()
    with torch.no_grad():
        for p in (model.embedding, *model.branches.parameters()):
            p.zero_()
        model.embedding[:, 0] = 1
        model.branches[0].qkv[16, 0] = 1 / math.sqrt(8 / (1 + 8e-6))  # value 0 is 1: the norm makes e_0 sqrt(8) long
        model.branches[0].out[:2, 0] = torch.tensor(write, dtype=torch.float64)
    found = angular_distance(model, [(torch.arange(5)[None], torch.arange(5)[None])])
    assert found.values["distance"][0, 0] == pytest.approx(distance, abs=1e-6)


def test_angular_distance_equals_the_definition_token_by_token(variant, random_model, batches):
    model = random_model(variant)
    found = angular_distance(model, batches).values["distance"]
    angles = []
    for inputs, _ in batches:
        with torch.no_grad():
            run = Pass(model, inputs)
            z = [run.z(l, state).flatten(0, 1).numpy() for l, state in enumerate(run.states)]  # noqa: E741
        for a, b in zip(z[1], z[3], strict=True):
            angles.append(math.acos(a @ b / math.sqrt(a @ a) / math.sqrt(b @ b)) / math.pi)
    assert found[1, 1] == pytest.approx(np.mean(angles), abs=1e-9)
    assert np.isfinite(found).sum() == 4 + 3 + 2 + 1


# ---- logit lens and early exit


def test_logit_lens_at_the_last_depth_is_the_model(variant, random_model, batches):
    model = random_model(variant)
    lens, early = logit_lens(model, batches)
    with torch.no_grad():
        loss = sum(i.numel() * float(model(i, t)) for i, t in batches) / sum(i.numel() for i, _ in batches)
    assert lens.values["cross_entropy"][-1] == pytest.approx(loss, rel=1e-12)
    assert (lens.values["kl"][-1], lens.values["top5_overlap"][-1]) == (0, 1)
    assert (lens.values["kl"][:-1] > 0).all()
    assert (lens.values["top5_overlap"][:-1] < 1).any()
    # Nobody is sure enough: all stay. At confidence 0 all leave at the embedding.
    assert early.values["cross_entropy"][[0, -1]] == pytest.approx(lens.values["cross_entropy"][[0, -1]], rel=1e-12)
    assert early.values["blocks_run"][[0, -1]].tolist() == [0, 1]


def test_logit_lens_and_early_exit_equal_a_loop_over_tokens(random_model, batches):
    model = random_model("pre_ln", spread=0.1)
    lens, early = logit_lens(model, batches)
    kl, overlap, exits = np.zeros(5), np.zeros(5), []
    for inputs, targets in batches:
        with torch.no_grad():
            run = Pass(model, inputs)
            logits = [F.linear(rms_norm(h, model.final_norm), model.head) for h in run.states]
        p = [torch.softmax(x, -1).flatten(0, 1).numpy() for x in logits]
        for t, target in enumerate(targets.flatten()):
            best = set(np.argsort(p[4][t])[-5:])
            for depth in range(5):
                kl[depth] += (p[4][t] * np.log(p[4][t] / p[depth][t])).sum()
                overlap[depth] += len(best & set(np.argsort(p[depth][t])[-5:])) / 5
            depth = next((k for k in range(5) if p[k][t].max() >= 0.1), 4)
            exits.append((-math.log(p[depth][t][target]), depth / 4))
    tokens = len(exits)
    assert lens.values["kl"] == pytest.approx(kl / tokens, abs=1e-12)
    assert lens.values["top5_overlap"] == pytest.approx(overlap / tokens)
    assert 0 < np.mean(exits, 0)[1] < 1
    assert [early.values[name][2] for name in ("cross_entropy", "blocks_run")] == pytest.approx(np.mean(exits, 0))


def test_early_exit_takes_no_block_where_the_embedding_knows(random_model, batches):
    """Blocks that do nothing: every depth says the same, so leaving at once costs nothing."""
    model = random_model("pre_ln")
    for block in range(4):
        silence(model, block)
    lens, early = logit_lens(model, batches)
    assert early.summary["least_blocks_within_0.05"] == 0
    assert lens.summary["first_within_tenth"] == 0


# ---- residual-path weights


@pytest.mark.parametrize("name", ["pre_ln", "sandwich_ln", "lns", "moda"])
def test_path_weights_of_plain_adds_are_1(name, random_model, batches):
    weight = path_weights(random_model(name), batches).values["weight"]
    assert np.array_equal(np.isnan(weight), np.tril(np.ones((9, 9)), -1) > 0)
    assert (weight[np.triu_indices(9)] == 1).all()


def test_branch_outputs_times_path_weights_are_what_each_sublayer_reads(variant, random_model):
    """For one token, whose average is itself. Gains are one number a tensor, so that they have one weight."""
    model, inputs = random_model(variant), torch.tensor([[7]])
    with torch.no_grad():
        for i, p in enumerate(model.depth):
            for name in ("norm", "outer_norm"):
                if hasattr(p, name):
                    getattr(p, name).fill_(1 + 0.1 * i)
    with torch.no_grad():
        end = model.hidden(inputs)
        weight = path_weights(model, [(inputs, inputs)]).values["weight"]
        steps = list(Pass(model, inputs).steps())
        reads = [model.topology.read(step.i, step.p, step.state)[0] for step in steps]
        outs = [step.out_BTD for step in steps]
    sources = [F.embedding(inputs, model.embedding)]
    for i, out in enumerate(outs):
        p = model.depth[i]
        sources.append(rms_norm(out, p.out_norm) if hasattr(p, "out_norm") else out)
    for k in range(9):
        total = sum(weight[source, k] * sources[source] for source in range(k + 1))
        if k == 8:
            torch.testing.assert_close(rms_norm(total, model.final_norm), end)
        elif variant == "deepnorm":
            torch.testing.assert_close(total, reads[k])
        else:  # what the branch got is this, normed: the same direction
            torch.testing.assert_close(F.normalize(total, dim=-1), F.normalize(reads[k], dim=-1))


def test_path_weights_of_hc_are_an_explicit_product_of_matrices(random_model):
    """beta_i^T A_(i+1) ... A_(k-1) alpha_k, coefficients by the equation, one token."""
    model, m = random_model("hc"), 4
    inputs = torch.tensor([[11]])
    with torch.no_grad():
        found = path_weights(model, [(inputs, inputs)]).values["weight"]
        coefficients = []
        for step in Pass(model, inputs).steps():
            H, p = torch.stack(step.state, 2)[0, 0], step.p
            x = H * torch.rsqrt(H.square().mean(-1, keepdim=True) + norm.EPS)
            mix = p.read_mix + p.scales[0] * torch.tanh(x @ p.dynamic[:, : m + 1])
            beta = p.write_mix + p.scales[1] * torch.tanh(x @ p.dynamic[:, m + 1])
            coefficients.append((mix[:, 0].numpy(), mix[:, 1:].numpy(), beta.numpy()))
    for i, (_, _, beta) in enumerate(coefficients):
        path = beta
        for k in range(i + 1, 8):
            assert found[i + 1, k] == pytest.approx(float(path @ coefficients[k][0]), rel=1e-9)
            path = path @ coefficients[k][1]
        assert found[i + 1, 8] == pytest.approx(path.sum(), rel=1e-9)


def test_path_weights_of_attention_over_depth_sum_to_1(random_model, batches):
    for name in ("full_attnres", "block_attnres(length=1)"):
        weight = path_weights(random_model(name), batches).values["weight"]
        assert np.nansum(weight, 0) == pytest.approx(np.ones(9))
    # Of sums of sublayers every member has the weight of its sum.
    weight = path_weights(random_model("block_attnres(length=3)"), batches).values["weight"]
    assert weight[1, 6] == weight[2, 6] == weight[3, 6] != weight[4, 6] == weight[5, 6]


# ---- effective rank


def test_effective_rank_of_a_uniform_matrix_is_1_and_of_an_identity_m():
    assert float(effective_rank(torch.linalg.svdvals(torch.full((4, 4), 0.25)))) == pytest.approx(1, abs=1e-5)
    assert float(effective_rank(torch.linalg.svdvals(torch.eye(3)))) == pytest.approx(3)
    assert float(effective_rank(torch.tensor([2.0, 1.0, 1.0]))) == pytest.approx(2 ** (1.5))  # entropy 1.5 bits


@pytest.mark.parametrize(
    ("name", "rank", "sigma"),
    [("mhc(gap=0.0)", 1, [1, 0, 0, 0]), ("hc", 4, [1, 1, 1, 1]), ("hc(streams=2)", 2, [1, 1])],
)
def test_rank_of_whole_products_at_starts_that_are_uniform_or_the_identity(name, rank, sigma, batches):
    model = build(Shape(4, 24, 3, 3, 64, 40), topology(name), 0).double()
    found, _ = residual_rank(model, batches)
    spans = np.triu_indices(4, 1, 5)
    assert found.values["effective_rank"][spans] == pytest.approx(np.full(10, rank), abs=1e-6)
    for j, value in enumerate(sigma):
        assert found.values[f"sigma_{j + 1}"][spans] == pytest.approx(np.full(10, value), abs=1e-9)
    assert np.isnan(found.values["effective_rank"]).sum() == 10


@pytest.mark.parametrize("name", ["hc", "mhc(gap=1.0)", "mhc(streams=2, free=0.5)"])
def test_rank_equals_svds_of_the_maps_multiplied_one_by_one(name, random_model, batches):
    model = random_model(name)
    found, streams = residual_rank(model, batches[:1])
    inputs = batches[0][0]
    ranks = []
    with torch.no_grad():
        run = Pass(model, inputs)
        # The map that `write` applies to the streams, found by giving it unit streams and no output.
        m = model.topology.streams
        maps = []
        for step in list(run.steps())[2:6]:
            unit = tuple(torch.eye(m, dtype=torch.float64)[j].expand(*inputs.shape, m) for j in range(m))
            mixed = model.topology.write(step.i, step.p, unit, torch.zeros(*inputs.shape, m).double(), step.carry)
            maps.append(torch.stack(mixed, -1))  # rows: old streams
        for b in range(3):
            for t in range(9):
                sigma = np.linalg.svd(np.linalg.multi_dot([x[b, t].numpy() for x in maps]), compute_uv=False)
                p = sigma / sigma.sum()
                ranks.append(math.exp(-(p * np.log(p)).sum()))
        H = torch.stack(run.states[4], 2)
        cosines = [F.cosine_similarity(H[:, :, a], H[:, :, b], -1) for a in range(m) for b in range(m) if a != b]
    assert found.values["effective_rank"][1, 3] == pytest.approx(np.mean(ranks))
    assert streams.values["cosine"][4] == pytest.approx(float(torch.stack(cosines).mean()))
    assert streams.values["cosine"][0] == pytest.approx(1)


def test_a_single_stream_has_no_rank_and_no_dead_zone(random_model, batches):
    for name in ("pre_ln", "full_attnres", "hybrid(blocks=2)"):
        assert residual_rank(random_model(name), batches) is None
        assert dead_zone(random_model(name), batches) is None


# ---- dead zone


@pytest.mark.parametrize(("length", "dead"), [(2, 3), (3, 2), (4, 4), (3, 0)])
def test_dead_zone_of_queries_forced_away_from_the_running_sum(length, dead, random_model, batches):
    """Channel 0 is large in the embedding and empty in every branch output. Queries of the first `dead` blocks look for
    it, so that their mixes return the embedding; the others are 0, so that their mixes are means."""
    model = random_model(f"block_attnres(length={length})")
    with torch.no_grad():
        model.embedding[:, 0] = 5
        for i in range(8):
            branch = model.branches[i]
            (branch.out if i % 2 == 0 else branch.down)[0] = 0
        for i in range(1, 9):
            p = model.depth[i]
            p.query.zero_()
            p.key_norm.fill_(1)
            if i // 2 < dead:
                p.query[0] = 20
    found = dead_zone(model, batches)
    assert found.summary["dead_blocks"] == dead
    weight = found.values["running_weight"]
    expected = [np.nan if i == 0 or i % length == 0 else 1 / (2 + i // length) for i in range(8)]
    expected.append(1 / (2 + 8 // length) if 8 % length else 1 / (1 + 8 // length))  # the readout
    for i in range(9):
        assert weight[i] < 1e-6 if i // 2 < dead and not np.isnan(expected[i]) else True
        if i // 2 >= dead or np.isnan(expected[i]):
            assert weight[i] == pytest.approx(expected[i], nan_ok=True), i


def test_blocks_of_one_sublayer_have_no_running_sum_but_the_readout_s(random_model, batches):
    found = dead_zone(random_model("block_attnres(length=1)"), batches)
    assert np.isnan(found.values["running_weight"]).tolist() == [True] * 8 + [False]
