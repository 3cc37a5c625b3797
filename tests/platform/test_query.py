"""From a store to a law and from a law to a design, against plain loops."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import depthlaw
from depthlaw.archs.shape import shape_rule
from depthlaw.platform.config import parse_config
from depthlaw.platform.query import fit, lattice, optimum
from depthlaw.platform.store import Store, StoreError
from depthlaw.scaling.fit import LawError
from depthlaw.scaling.hardware import Workload
from depthlaw.scaling.law_file import load_law
from depthlaw.scaling.optimum import OptimumError
from support import partly_installed

LOAD = Workload(context=1024, batch=2, weight_bytes=4, cache_bytes=2)
TOKENS = 2e6


@pytest.fixture(scope="module")
def law(study):
    return depthlaw.fit(study.store, law="shape")


def predicted(law, topology, N, D, L, d):
    p = law.parameters(topology)
    n, y = math.log(N / law.N0), math.log(D / law.D0)
    q = math.log(d / L) - p["rho0"] - p["rho1"] * n
    return math.exp(p["e"]) + math.exp(p["a"] - p["alpha"] * n + p["kappa"] * q * q) + math.exp(p["b"] - p["beta"] * y)


def counts(topology, L, d, vocab):
    """(backbone, all) parameters of a multi-head model with d_ff 8 d / 3, rounded up to 16."""
    d_ff = -(-8 * d // 48) * 16
    own = {"pre_ln": 0, "hc": 2 * L * (26 + 6 * d)}[topology]
    backbone = L * (4 * d * d + 3 * d * d_ff + 2 * d) + d + own
    return backbone, backbone + 2 * vocab * d


def best_by_loop(law, layers, widths, fits, vocab=512, tokens=lambda total: TOKENS, topologies=("pre_ln", "hc")):
    """(loss, topology, L, d) of the best design that `fits(total, L, d)`, one at a time."""
    found = []
    for topology in topologies:
        for L in range(layers[0], layers[1] + 1):
            for d in widths:
                N, total = counts(topology, L, d, vocab)
                if fits(total, L, d):
                    found.append((predicted(law, topology, N, tokens(total), L, d), topology, L, d))
    return min(found)


# ---- from a store to a law


def test_a_law_of_a_store_comes_back_to_the_truth_that_its_losses_were_drawn_from(law, truth):
    for topology in ("pre_ln", "hc"):
        for L, d, D in [(2, 48, 5e5), (4, 72, 2e6), (8, 96, 8e6), (1, 64, 1e6)]:
            N, _ = counts(topology, L, d, 512)
            assert float(law.predict(topology, N, D, L, d)) == pytest.approx(truth(topology, N, D, L, d), rel=0.005)
    assert law.worth("hc") == pytest.approx((1.2 / 1.1) ** (1 / 0.3), rel=0.15)
    assert law.log_rms < 0.002


def test_the_losses_fitted_are_those_of_the_best_rate_of_each_cell(study, law, truth):
    """Each cell has three rates, and only the middle one has no penalty: a mean over rates would be 0.03 higher."""
    shapes = {(s.n_layers, s.d_model) for s in study.specs} - {(1, 136), (32, 48)}
    assert len(law.rows_used) == len(shapes) * 2 * 2 == 60
    cells = study.store.cells()
    used = cells.iloc[list(law.rows_used)]
    assert set(used["lr"]) == {8e-3}
    expected = [
        truth(*x)
        for x in zip(used.topology, used.backbone_params, used.tokens, used.n_layers, used.d_model, strict=True)
    ]
    assert np.allclose(used["val_loss"], expected, rtol=1.1e-3)


def test_cells_where_every_rate_diverged_are_left_out_with_the_reason_and_counted(study, law):
    assert Counter(row.topology for row in law.left_out) == {"pre_ln": 2, "hc": 2}  # two token ratios each
    assert all("val_loss is not finite (nan)" in row.reason for row in law.left_out)
    assert law.context["cells_without_a_finished_trial"] == 4
    assert law.context["n_diverged"] == 4 * 3
    assert law.context["cells"] == 64
    assert law.context["n_trials"] == 64 * 3
    assert law.context["n_finished"] == 60 * 3
    assert (law.context["cells_best_lr_at_edge"], law.context["cells_with_one_lr"]) == (0, 0)
    assert law.context["lr_found"] == {"vertex": 60, "none": 4}
    assert law.context["vertex_ln_lr_sd"] is None  # one seed a rate


def test_a_law_carries_what_a_later_question_needs_of_its_sweep(study, law, tmp_path):
    law.save(tmp_path / "law.json")
    for held in (law, load_law(tmp_path / "law.json")):
        kept = {name: held.context[name] for name in ("shape_rule", "vocab_size", "seq_len", "batch_tokens")}
        assert kept == {"shape_rule": "small", "vocab_size": 512, "seq_len": 64, "batch_tokens": 512}
        assert held.context["data_fingerprint"] == "fingerprint"
        assert "pydoc" not in held.context["data"]
        assert held.context["data"] == study.config.data.describe()


def test_a_law_keeps_the_best_rates_of_its_cells_from_the_parabola_where_there_is_one(store, sweep_of, write_study):
    from depthlaw.platform.observations import context

    means = {1e-3: 3.06, 2e-3: 3.0, 4e-3: 3.03}
    grid = {"shapes": [[2, 32], [4, 24]], "lr": list(means)}

    def outcomes(spec):
        if spec.n_layers == 4 and spec.lr > 3e-3:
            return {"status": "diverged", "reason": "loss nan is not finite, at step 9"}
        return {"status": "finished", "val_loss": means[spec.lr], "bits_per_byte": 1.0}

    write_study(store, parse_config(sweep_of(grid=grid)), outcomes)
    found = dict(context(store, store.cells())["best_lr"]["pre_ln"])
    assert found[26_784] == pytest.approx(2e-3 * 2 ** (1 / 6))  # (3.06 - 3.03) / (2 x 0.09) of a step above the middle
    assert [lr for N, lr in found.items() if N != 26_784] == [2e-3]


def test_a_frame_is_fitted_as_it_is_even_with_a_column_named_cells(study):
    frame = study.store.cells()
    plain, named = fit(frame), fit(frame.assign(cells=1))
    assert plain.theta == named.theta
    assert plain.context == {}


@pytest.fixture
def two_recipes(tmp_path, sweep_of, write_study):
    store = Store.create(tmp_path / "store")
    for name, changes in (("first", {}), ("second", {"optimizer": {"clip": 2.0}})):
        write_study(store, parse_config(sweep_of(name=name, **changes)))
    return store


def test_several_recipes_in_one_store_are_refused_with_the_experiments_to_choose_from(two_recipes):
    with pytest.raises(StoreError, match=r"2 recipes .* experiments first, second") as error:
        fit(two_recipes)
    assert "\n" not in str(error.value)


def test_a_sweep_off_its_shape_rule_says_so_when_the_rule_makes_the_designs(study, tmp_path):
    store = Store.create(tmp_path / "store")
    for row in study.store.trials().to_dict("records"):
        row = {k: v for k, v in row.items() if v == v and v is not None}
        whole = ("tokens_done", "steps", "steps_done", "batch_tokens", "backbone_params", "embedding_params", "params")
        row |= {k: int(row[k]) for k in (*whole, "val_tokens", "peak_memory_bytes") if k in row}
        store.write_trial(row | {"d_ff": row["d_ff"] + (16 if row["d_model"] == 48 else 0)})
    law = fit(store)
    off = law.context["cells_off_the_shape_rule"]
    assert off == (store.cells()["d_model"] == 48).sum() > 0
    assert any("other heads or d_ff" in flag for flag in optimum(law, "params<=400k", tokens=2e6).flags)
    assert fit(study.store).context["cells_off_the_shape_rule"] == 0


def test_one_experiment_of_several_recipes_is_taken_alone(two_recipes):
    from depthlaw.platform.observations import context, law_rows

    for name, clip in (("first", 1.0), ("second", 2.0)):
        cells = law_rows(two_recipes, name)
        assert len(cells) == 1
        assert context(two_recipes, cells)["n_trials"] == 2
        specs = two_recipes.trials().query("experiment == @name")["spec"]
        assert {json.loads(spec)["optimizer"]["clip"] for spec in specs} == {clip}


def test_an_experiment_that_is_not_there_and_an_empty_store_are_refused_by_name(two_recipes, tmp_path):
    with pytest.raises(StoreError, match=r"no experiment 'third'; it has first, second"):
        fit(two_recipes, experiment="third")
    with pytest.raises(StoreError, match="no trials to fit; experiments here: none"):
        fit(Store.create(tmp_path / "empty"))


# ---- from a law to a design


def test_the_optimum_is_that_of_a_loop_over_the_laws_own_rule_and_vocabulary(law):
    answer = depthlaw.optimum(law, ["params<=400k", "kv_bytes<=1MiB"], tokens=TOKENS, workload=LOAD, layers=(2, 24))

    def fits(total, L, d):
        return total <= 400e3 and 2 * 1024 * 2 * 2 * L * d <= 2**20  # batch x context x (keys and values) x bytes

    loss, topology, L, d = best_by_loop(law, (2, 24), range(8, 1025, 8), fits)
    best = answer.best
    assert (best.topology, best.n_layers, best.d_model) == (topology, L, d)
    assert best.loss == pytest.approx(loss, rel=1e-12)
    assert (best.backbone_params, best.params) == counts(topology, L, d, 512)
    assert best.uses == {"params": best.params, "kv_bytes": 8192 * L * d}
    assert answer.considered == 2 * 23 * 128


def test_tokens_follow_the_parameters_unless_given(law):
    answer = optimum(law, ["params<=400k"], layers=(2, 12))
    loss, *where = best_by_loop(
        law, (2, 12), range(8, 1025, 8), lambda total, L, d: total <= 400e3, tokens=lambda x: 20 * x
    )
    assert [answer.best.topology, answer.best.n_layers, answer.best.d_model] == where
    assert answer.best.loss == pytest.approx(loss, rel=1e-12)
    assert answer.best.tokens == 20 * answer.best.params


def test_rule_vocabulary_and_topologies_can_be_others_than_the_laws(law):
    answer = optimum(
        law, ["params<=3M"], tokens=TOKENS, layers=(2, 24), rule="head64", vocab_size=1000, topologies=["hc"]
    )
    widths = range(64, 8193, 64)
    loss, *where = best_by_loop(law, (2, 24), widths, lambda t, L, d: t <= 3e6, vocab=1000, topologies=["hc"])
    assert [answer.best.topology, answer.best.n_layers, answer.best.d_model] == where
    assert answer.best.loss == pytest.approx(loss, rel=1e-12)
    assert answer.considered == 23 * 128
    assert [x.topology for x in answer.per_topology] == ["hc"]


def test_a_law_of_a_frame_knows_no_sweep_and_takes_the_published_rule(law):
    answer = optimum(replace(law, context={}), ["params<=400M"], tokens=8e9)
    assert answer.best.d_model % 32 == 0
    assert answer.best.params == counts(answer.best.topology, answer.best.n_layers, answer.best.d_model, 50_280)[1]


def test_layers_and_widest_bound_what_is_considered(law):
    answer = optimum(law, tokens=TOKENS, layers=(3, 5), widest=40)
    assert answer.considered == 2 * 3 * 5
    _, *where = best_by_loop(law, (3, 5), (8, 16, 24, 32, 40), lambda t, L, d: True)
    assert [answer.best.topology, answer.best.n_layers, answer.best.d_model] == where
    one = optimum(law, tokens=TOKENS, layers=(7, 7), widest=8)
    assert (one.best.n_layers, one.best.d_model, one.considered) == (7, 8, 2)


def test_depths_begin_at_one_layer_only_where_the_sweep_had_such_models(law):
    deeper = replace(law, ranges={**law.ranges, "": {**law.ranges[""], "L": (4.0, 16.0)}})
    assert law.ranges[""]["L"][0] == 1.0
    assert optimum(law, tokens=TOKENS).considered == 2 * 128 * 128  # topologies x depths x widths
    assert optimum(deeper, tokens=TOKENS).considered == 2 * 127 * 128


def test_the_lattice_is_every_depth_with_every_width_of_the_rule():
    n_layers, d_model = lattice(shape_rule("small"), (2, 4), 30)
    assert n_layers.dtype == d_model.dtype == np.int64
    assert sorted(zip(n_layers.tolist(), d_model.tolist(), strict=True)) == [
        (L, d) for L in (2, 3, 4) for d in (8, 16, 24)
    ]


def test_naming_a_topology_twice_asks_about_it_once(law):
    once = optimum(law, ["params<=400k"], tokens=TOKENS, topologies=["hc"])
    twice = optimum(law, ["params<=400k"], tokens=TOKENS, topologies=["hc", "hc(streams=4)"])
    assert twice == once


@pytest.mark.parametrize(
    ("question", "error", "words"),
    [
        ({"layers": (0, 3)}, OptimumError, "layers 0 to 3: give the smallest, at least 1"),
        ({"layers": (5, 4)}, OptimumError, "layers 5 to 4"),
        ({"widest": 7}, OptimumError, "empty lattice"),
        ({"widest": 0}, OptimumError, "empty lattice"),
        ({"vocab_size": 0}, ValueError, "vocab_size is 0"),
        (
            {"rule": "golden"},
            ValueError,
            "unknown shape rule 'golden'; choose one of published, published_1600m, small",
        ),
        ({"topologies": ["full_attnres"]}, LawError, "not fitted on topology 'full_attnres'; it knows hc, pre_ln"),
        ({"topologies": ["resnet"]}, ValueError, "unknown topology 'resnet'"),
        ({"tokens": 1e6, "tokens_per_param": 20}, OptimumError, "both given"),
        ({"tokens": math.nan}, OptimumError, "tokens is nan"),
    ],
)
def test_a_question_that_cannot_be_asked_is_one_line_of_our_own(law, question, error, words):
    with pytest.raises(error, match=words) as found:
        optimum(law, ["params<=400k"], **question)
    assert "\n" not in str(found.value)
    assert type(found.value).__module__.startswith("depthlaw.")


def test_topologies_that_are_not_installed_are_fitted_and_named_and_the_others_answer(law):
    strange = partly_installed(law)
    found = optimum(strange, ["params<=400k"], tokens=TOKENS)
    assert [c.topology for c in found.per_topology] == ["hc"]
    (said,) = [flag for flag in found.flags if "installation" in flag]
    assert said.startswith("no topology of this installation is named resnet: left out, ")
    assert "\n" not in said
    assert found.best == optimum(law, ["params<=400k"], tokens=TOKENS, topologies=["hc"]).best
    assert not any("installation" in flag for flag in optimum(law, ["params<=400k"], tokens=TOKENS).flags)
    alone = replace(strange, topologies=("resnet",), names=tuple(n for n in strange.names if "hc" not in n))
    with pytest.raises(OptimumError, match=r"none of the law's topologies \(resnet\) is installed here: install the"):
        optimum(alone, ["params<=400k"], tokens=TOKENS)
    with pytest.raises(ValueError, match="unknown topology 'resnet'"):
        optimum(strange, ["params<=400k"], tokens=TOKENS, topologies=["resnet"])
