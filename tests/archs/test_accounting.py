"""Counts against the published suites, against real modules, and against torch's own FLOP counter."""

import csv
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthlaw.archs import backbone
from depthlaw.archs.backbone import Model, build
from depthlaw.archs.costs import Costs
from depthlaw.archs.errors import ShapeError, TopologyError
from depthlaw.archs.lazy import ops  # as the topologies see them
from depthlaw.archs.ops import Source
from depthlaw.archs.shape import Shape, shape_rule
from depthlaw.archs.topologies import TOPOLOGIES, topology

# The published DepthBench suites: shapes and exact Pre-LN counts, figures from the report.
PUBLISHED = list(csv.DictReader((Path(__file__).parent / "published_shapes.csv").open()))
SHAPES = [Shape(1, 16, 2, 2, 48, 31), Shape(3, 24, 3, 1, 64, 50), Shape(5, 32, 4, 2, 96, 7)]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row['suite']}-{row['n_layers']}")
def test_published_counts_are_reproduced_exactly(row):
    fields = ("n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size")
    shape = Shape(**{name: int(row[name]) for name in fields})
    costs = Costs(topology("pre_ln"), shape)
    assert costs.backbone_params == int(row["backbone_params"])
    assert costs.params == int(row["total_params"])
    rule = shape_rule("published_1600m" if row["suite"] == "1600m" else "published")
    assert rule.shape(shape.n_layers, shape.d_model, shape.vocab_size) == shape


def test_all_28_published_rows_are_checked():
    assert len(PUBLISHED) == 28


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.n_layers}x{s.d_model}")
def test_counts_equal_the_tensors_of_the_real_module(variant, shape):
    with torch.device("meta"):
        model = Model(shape, topology(variant))
    costs = Costs(topology(variant), shape)
    total = sum(p.numel() for p in model.parameters())
    assert costs.params == total
    assert costs.backbone_params == total - model.embedding.numel() - model.head.numel()
    assert costs.decode_params == total - model.embedding.numel()


@pytest.mark.parametrize(("L", "d"), [(28, 2048), (40, 1728), (54, 1504)])
def test_models_of_1600m_parameters_are_built_and_counted_without_their_memory(variant, L, d):
    shape = shape_rule("published_1600m").shape(L, d, 50280)
    with torch.device("meta"):
        model = Model(shape, topology(variant))
    tensors = list(model.parameters())
    assert Costs(topology(variant), shape).params == sum(p.numel() for p in tensors) > 1.6e9
    assert all(p.is_meta for p in [*tensors, *model.buffers()])


def tensors(state):
    """Every tensor inside a state over depth, the numbers that are kept only for speed aside."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Source):
        yield state.value_BTD
    elif isinstance(state, (tuple, list)):
        for part in state:
            yield from tensors(part)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.n_layers}x{s.d_model}")
def test_the_state_over_depth_holds_as_many_numbers_as_declared(variant, shape):
    design = topology(variant)
    model = build(shape, design, 0)
    widest, write = 0, type(design).write

    def watched(self, i, p, state, out, carry):
        nonlocal widest
        state = write(self, i, p, state, out, carry)
        widest = max(widest, sum(t.numel() for t in tensors(state)))
        return state

    watching = type("Watching", (type(design),), {"write": watched, "name": "watching"})
    model.topology = watching(**design.__dict__) if not variant.startswith("hybrid") else design
    model.logits(torch.zeros(1, 1, dtype=torch.long))
    if variant.startswith("hybrid"):
        parts = [topology(part) for part in (design.first, design.then)]
        assert Costs(design, shape).state_elements() <= sum(Costs(part, shape).state_elements() for part in parts)
    else:
        assert widest == Costs(design, shape).state_elements()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.n_layers}x{s.d_model}")
def test_as_many_sources_over_depth_are_read_as_declared(variant, shape, monkeypatch):
    read = []
    mix, attend = ops.depth_mix, backbone.attend_over_depth
    monkeypatch.setattr(ops, "depth_mix", lambda sources, query: read.append(len(sources)) or mix(sources, query))
    monkeypatch.setattr(
        backbone,
        "attend_over_depth",
        lambda q, k, v, ask, depth: read.append(len(depth)) or attend(q, k, v, ask, depth),
    )
    build(shape, topology(variant), 0).logits(torch.zeros(1, 1, dtype=torch.long))
    assert Costs(topology(variant), shape).depth_reads == sum(read)


def test_a_lattice_is_counted_as_its_single_shapes(variant):
    rule = shape_rule("small")
    pairs = [(1, 8), (2, 24), (7, 48), (128, 640)]
    lattice = Costs(topology(variant), rule.shape(*np.array(pairs, dtype=np.int64).T, 512))
    for k, (n_layers, d_model) in enumerate(pairs):
        one = Costs(topology(variant), rule.shape(n_layers, d_model, 512))
        for count in ("params", "backbone_params", "decode_params", "depth_reads"):
            assert getattr(lattice, count)[k] == getattr(one, count)
        assert lattice.state_elements(3)[k] == one.state_elements(3)
        assert lattice.kv_elements(77)[k] == one.kv_elements(77)
        assert lattice.decode_flops(77)[k] == one.decode_flops(77)
        assert lattice.train_flops_per_token(128)[k] == one.train_flops_per_token(128)


def test_flops_of_pre_ln_equal_torchs_counter():
    shape, T = SHAPES[2], 12
    model = build(shape, topology("pre_ln"), 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.logits(torch.zeros(1, T, dtype=torch.long))
    scores = 4 * T * T * shape.d_model * shape.n_layers  # the counter takes the whole square of scores
    causal = 2 * T * (T + 1) * shape.d_model * shape.n_layers
    costs = Costs(topology("pre_ln"), shape)
    assert T * costs.forward_flops_per_token(T, head=True) == counter.get_total_flops() - scores + causal
    assert costs.train_flops_per_token(T) == 3 * costs.forward_flops_per_token(T, head=True)


def test_decode_flops_over_a_context_sum_to_the_forward_pass(variant):
    costs = Costs(topology(variant), SHAPES[1])
    assert sum(costs.decode_flops(c) for c in range(1, 10)) == 9 * costs.forward_flops_per_token(9, head=True)


def test_prefill_and_cache_match_the_published_figures():
    """2.98 and 4.33 TFLOPs at T = 4096 without the head, cache ratio 2.30; 3.48 and 4.59 with the head."""
    rule = shape_rule("published")
    wide, deep = (Costs(topology("pre_ln"), rule.shape(*pair, 50280)) for pair in [(16, 1216), (70, 640)])
    for costs, without, with_head in [(wide, 2.98, 3.48), (deep, 4.33, 4.59)]:
        assert round(4096 * costs.forward_flops_per_token(4096, head=False) / 1e12, 2) == without
        assert round(4096 * costs.forward_flops_per_token(4096, head=True) / 1e12, 2) == with_head
    assert round(deep.kv_elements(4096) / wide.kv_elements(4096), 2) == 2.30
    assert wide.kv_elements(4096) == 2 * 4096 * 16 * 1216


def test_mixing_flops_match_a_count_from_the_equations():
    shape = SHAPES[1]
    L, d = shape.n_layers, shape.d_model
    assert topology("hc").extra_flops(shape) == 192 * d * L  # the published figures at m = 4
    assert topology("mhc").extra_flops(shape) == 480 * d * L
    mixes = [i + 1 for i in range(1, 2 * L + 1)]
    assert topology("full_attnres").extra_flops(shape) == sum(4 * s * d for s in mixes)
    assert topology("pre_ln").extra_flops(shape) == 0


def test_accounting_imports_and_runs_with_torch_blocked():
    code = """
import sys
sys.modules["torch"] = None
from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import TOPOLOGIES, topology
topology("pre_ln")
for name in TOPOLOGIES:
    name = name if name != "hybrid" else "hybrid(blocks=4)"
    costs = Costs(topology(name), shape_rule("published").shape(16, 1216, 50280))
    assert costs.params >= 406534336 and costs.decode_flops(4096) > 0 and costs.topology.params(1, costs.shape)
print(len(TOPOLOGIES))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == len(TOPOLOGIES) >= 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_heads": 5}, "n_heads 5 does not divide d_model 24"),
        ({"n_kv_heads": 2}, "n_kv_heads 2 does not divide n_heads 3"),
        ({"n_heads": 8, "n_kv_heads": 8}, "odd head_dim 3"),
        ({"n_layers": 0}, "n_layers is 0"),
        ({"d_ff": -16}, "d_ff is -16"),
    ],
)
def test_impossible_shapes_are_refused_with_the_value(change, says):
    with pytest.raises(ShapeError, match=says):
        Shape(**(asdict(SHAPES[1]) | change))


def test_widths_that_a_rule_cannot_make_are_refused():
    with pytest.raises(ShapeError, match=r"d_model 1000 .* multiple of 32"):
        shape_rule("published").shape(16, 1000, 50280)
    with pytest.raises(ShapeError, match="choose one of"):
        shape_rule("square")


def test_labels_name_a_topology_and_its_options_both_ways(variant):
    assert topology(variant).label == variant
    assert topology("hc(streams=4)").label == "hc"
    with pytest.raises(ValueError, match="streams is 0"):
        topology("hc(streams=0)")


@pytest.mark.parametrize(
    ("label", "says"),
    [
        ("nope", "unknown topology 'nope'; choose one of"),
        ("hc(m=2)", "options of hc are streams"),
        ("hc(2)", "option=value"),
        ("hc(streams=", "is not a topology"),
        ("pre_ln(x=1)", "none"),
    ],
)
def test_wrong_labels_are_refused_with_what_exists(label, says):
    with pytest.raises(TopologyError, match=says):
        topology(label)
