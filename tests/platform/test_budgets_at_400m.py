"""Budget questions about the published 400M suite (source beside the table), each against a plain loop over all shapes.

At one size depth costs no parameters, only memory and time: that is what these questions trade.
"""

import math
from itertools import pairwise

import pandas as pd
import pytest

from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform.bundled import bundled
from depthlaw.platform.query import optimum
from depthlaw.scaling.fit import fit
from depthlaw.scaling.hardware import PRESETS, Workload

TABLE = bundled("published-400m").runs
LOAD = Workload(context=32768, batch=8)
GIB = 2**30


@pytest.fixture(scope="module")
def law():
    return fit(pd.read_csv(TABLE), law="iso_size", delta=1.0)


def by_loop(law, label, limits):
    """(L, d) of the least parabola among all designs of the published size that meet the limits, one at a time."""
    p, on = law.parameters(label), PRESETS["h100"]
    least, most = law.ranges[""]["N"]
    found = []
    for L in range(2, 129):
        for d in range(32, 8193, 32):
            if not least / 1.3 <= 12 * L * d * d + 2 * 50280 * d <= most * 1.3:  # far off: spares the exact count
                continue
            costs = Costs(topology(label), shape_rule("published").shape(L, d, 50280))
            kv = 8 * 2 * 2 * 32768 * L * d
            read = 2 * (costs.params - 50280 * d) + kv
            flops = 8 * costs.decode_flops(32768)
            step = max(read / on.bandwidth_bytes_per_s, flops / on.peak_flops) + 2 * L * on.sublayer_s + on.constant_s
            uses = {"kv_bytes": kv, "tpot": step}
            if least <= costs.params <= most and all(uses[name] <= limit for name, limit in limits.items()):
                found.append((math.exp(p["c"]) + p["kappa"] * (math.log(d / L) - p["rho"]) ** 2, L, d))
    return min(found)


def ask(law, label, limits=None):
    texts = [f"{name}<={limit!r}{'s' if name == 'tpot' else ''}" for name, limit in (limits or {}).items()]
    best = optimum(law, texts, topologies=[label], workload=LOAD).best
    loss, L, d = by_loop(law, label, limits or {})
    assert (best.n_layers, best.d_model) == (L, d)
    assert best.loss == pytest.approx(loss, rel=1e-12)
    return best


def test_hc_and_full_attnres_are_deeper_than_pre_ln_where_nothing_costs(law):
    plain, hyper, attention = (ask(law, label) for label in ("pre_ln", "hc", "full_attnres"))
    assert plain.n_layers < 20  # the published best of pre_ln is 16 or 20 layers
    assert hyper.n_layers > 60
    assert attention.n_layers > 60
    assert hyper.loss < attention.loss < plain.loss
    for best in (plain, hyper, attention):
        assert 399e6 < best.params < 415e6


@pytest.mark.parametrize("label", ["hc", "full_attnres"])
@pytest.mark.parametrize(
    ("name", "limits"), [("tpot", (14e-3, 10e-3, 6e-3, 3e-3)), ("kv_bytes", (40 * GIB, 30 * GIB, 20 * GIB, 9 * GIB))]
)
def test_less_time_or_memory_makes_the_best_design_shallower_and_wider(law, label, name, limits):
    answers = [ask(law, label)] + [ask(law, label, {name: limit}) for limit in limits]
    for looser, tighter in pairwise(answers):
        assert tighter.n_layers < looser.n_layers
        assert tighter.d_model > looser.d_model
        assert tighter.loss > looser.loss
        assert tighter.tpot_s < looser.tpot_s
        assert tighter.kv_bytes < looser.kv_bytes


def test_a_budget_that_leaves_the_best_shape_alone_changes_nothing_for_pre_ln(law):
    assert ask(law, "pre_ln", {"kv_bytes": 30 * GIB}).n_layers == ask(law, "pre_ln").n_layers
    assert ask(law, "pre_ln", {"kv_bytes": 15 * GIB}).n_layers < ask(law, "pre_ln").n_layers


def test_under_a_tight_budget_the_topologies_still_rank_by_their_own_law(law):
    answer = optimum(law, ["tpot<=8ms", "kv_bytes<=25GiB"], workload=LOAD)
    assert len(answer.per_topology) == 10
    for one in answer.per_topology:
        loss, L, d = by_loop(law, one.topology, {"tpot": 8e-3, "kv_bytes": 25 * GIB})
        assert (one.n_layers, one.d_model) == (L, d)
        assert one.loss == pytest.approx(loss, rel=1e-12)
    assert answer.best.loss == min(one.loss for one in answer.per_topology)


def test_an_answer_of_one_size_says_so_and_what_lies_past_the_table(law):
    answer = optimum(law, topologies=["hc"], workload=LOAD)
    assert any("holds at the size and training fitted" in flag for flag in answer.flags)
    assert any("below the smallest R fitted (9.14)" in flag for flag in answer.flags)
    assert not any("N (all parameters)" in flag for flag in answer.flags)
    with pytest.raises(
        ValueError, match=r"law iso_size holds for N from 3.994e\+08 to 4.141e\+08 \(params\) and no design"
    ):
        optimum(law, topologies=["hc"], widest=256)
