"""The optimum against a slow loop over every design that shares no code with it."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from scipy.special import stdtrit

from depthlaw.scaling.budgets import BUDGETS, budget
from depthlaw.scaling.fit import LawError, fit
from depthlaw.scaling.hardware import Hardware, HardwareError, Mixing, Workload, tpot
from depthlaw.scaling.optimum import Infeasible, OptimumError, optimise

SEQ_LEN = 512
BOX = Hardware("box", 5e10, 2e12, 2e-5, 1e-4, "made up")


def every_design(law, grids, load, on, tokens=None, tokens_per_param=None, flops=None):
    """[(topology, L, d, params, loss, {budget: use})], one design at a time in plain Python."""
    out = []
    for grid in grids:
        p = law.parameters(grid.label)
        for L, d in zip(grid.n_layers.tolist(), grid.d_model.tolist(), strict=True):
            N = 12 * L * d * d + grid.extra * L * d
            total = N + 2000 * d
            a_token = 6 * (total - 1000 * d) + 6 * SEQ_LEN * L * d
            if flops is not None:
                D = max(flops // a_token, 1.0)
            else:
                D = tokens if tokens is not None else tokens_per_param * total
            n, y = math.log(N / law.N0), math.log(D / law.D0)
            q = math.log(d / L) - p["rho0"] - p["rho1"] * n
            size = math.exp(p["a"] - p["alpha"] * n + p["kappa"] * q * q)
            loss = math.exp(p["e"]) + size + math.exp(p["b"] - p["beta"] * y)
            kv = load.batch * load.cache_bytes * 2 * load.context * L * d
            read = load.weight_bytes * (total - 1000 * d) + kv
            step_flops = load.batch * (2 * (total - 1000 * d) + 4 * load.context * L * d)
            roof = max(read / on.bandwidth_bytes_per_s, step_flops / on.peak_flops) / load.tensor_parallel
            weights = load.weight_bytes * total
            uses = {
                "params": total,
                "backbone_params": N,
                "kv_bytes": kv,
                "weight_bytes": weights,
                # One stream and 13 numbers of workspace for each of its own.
                "peak_memory": (weights + kv) / load.tensor_parallel
                + load.batch * load.context * 14 * d * max(2, load.weight_bytes),
                "tpot": roof + 2 * L * on.sublayer_s + on.constant_s,
                "train_tokens": D,
                "train_flops": D * a_token,
                "device_hours": D * a_token / (on.peak_flops * 0.4) / 3600,
            }
            out.append((grid.label, L, d, total, loss, uses))
    return out


def least(designs, limits):
    fits = [x for x in designs if all(x[5][name] <= limit for name, limit in limits.items())]
    return min(fits, key=lambda x: x[4]) if fits else None


def random_question(seed):
    """(workload, how D follows, {budget: limit}); where D follows from FLOPs, they are also the limit train_flops."""
    rng = np.random.default_rng(seed)
    context, batch, element, devices = (int(rng.choice(x)) for x in ([256, 4096], [1, 16], [1, 2, 4], [1, 1, 4]))
    load = Workload(context, batch, element, 2, devices)
    limits = {
        "params": 10 ** rng.uniform(6, 8),
        "backbone_params": 10 ** rng.uniform(6, 8),
        "kv_bytes": 10 ** rng.uniform(5.5, 9),
        "weight_bytes": 10 ** rng.uniform(6.5, 8.5),
        "peak_memory": 10 ** rng.uniform(6.5, 9),
        "tpot": 10 ** rng.uniform(-3.5, -1.5),
        "train_tokens": 10 ** rng.uniform(7, 10),
        "device_hours": 10 ** rng.uniform(-2, 2),
    }
    limits = {k: v for k, v in limits.items() if rng.random() < 0.45}
    kind = ("tokens", "tokens_per_param", "flops")[seed % 3]
    training = {kind: {"tokens": 10 ** rng.uniform(7, 9), "tokens_per_param": rng.uniform(5, 90)}.get(kind)}
    if kind == "flops":
        training[kind] = limits["train_flops"] = 10 ** rng.uniform(14, 18)
    elif rng.random() < 0.3:
        limits["train_flops"] = 10 ** rng.uniform(14, 18)
    return load, training, limits


def written(limits):
    return [f"{k}<={v!r}{'s' if k == 'tpot' else ''}" for k, v in limits.items()]


@pytest.fixture(scope="module")
def three_grids(make_lattice):
    return [
        make_lattice(t, range(2, 33), range(32, 513, 32), 3 * i) for i, t in enumerate(("pre_ln", "hc", "full_attnres"))
    ]


@pytest.mark.parametrize("seed", range(50))
def test_optimum_binding_budgets_and_conflicts_equal_a_slow_loop(noisy_law, three_grids, seed):
    load, training, limits = random_question(seed)
    designs = every_design(noisy_law, three_grids, load, BOX, **training)
    want = least(designs, limits)
    follows = "flops" in training
    ask = {"workload": load, "hardware": BOX, "seq_len": SEQ_LEN, **({} if follows else training)}
    if want is None:
        with pytest.raises(Infeasible) as caught:
            optimise(noisy_law, three_grids, written(limits), **ask)
        sets = [
            c
            for n in range(1, len(limits) + 1)
            for c in combinations(limits, n)
            if least(designs, {k: limits[k] for k in c}) is None
        ]
        assert len(caught.value.conflict) == len(sets[0])
        assert caught.value.conflict in sets
        ratio = min(max(x[5][k] / limits[k] for k in limits) for x in designs)
        assert max(caught.value.ratios.values()) == pytest.approx(ratio, rel=1e-12)
        return
    got = optimise(noisy_law, three_grids, written(limits), **ask)
    assert (got.best.topology, got.best.n_layers, got.best.d_model, got.best.params) == want[:4]
    assert got.best.loss == pytest.approx(want[4], rel=1e-12)
    assert got.best.tokens == pytest.approx(want[5]["train_tokens"], rel=1e-12)
    assert got.best.lower < got.best.loss < got.best.upper
    assert got.feasible == sum(all(x[5][k] <= limits[k] for k in limits) for x in designs)
    assert got.considered == len(designs)
    for used in got.budgets:
        raised = {**limits, used.name: 1.1 * limits[used.name]}
        longer = follows and used.name == "train_flops"
        richer = every_design(noisy_law, three_grids, load, BOX, flops=raised["train_flops"]) if longer else designs
        relaxed = least(richer, raised)
        gain = 0.0 if relaxed is None else min(relaxed[4] - want[4], 0.0)
        assert used.binds == (gain < 0)
        assert used.price == pytest.approx(gain, abs=1e-12)
        others = {k: v for k, v in limits.items() if k != used.name}
        better = [x[5][used.name] for x in designs if x[4] < want[4] and all(x[5][k] <= v for k, v in others.items())]
        next_limit = min(better) if better and not longer else None
        assert used.next_limit == (next_limit and pytest.approx(next_limit, rel=1e-12))
        assert used.use == pytest.approx(want[5][used.name], rel=1e-12)
        assert used.use <= used.limit
    for topology in ("pre_ln", "hc", "full_attnres"):
        own = least([x for x in designs if x[0] == topology], limits)
        mine = [c for c in got.per_topology if c.topology == topology]
        assert [(c.n_layers, c.d_model) for c in mine] == ([own[1:3]] if own else [])
    fits = [x for x in designs if all(x[5][k] <= limits[k] for k in limits)]
    near = [x for x in fits if math.log(x[4] / want[4]) <= noisy_law.log_rms]
    assert got.near_ties.count == len(near)
    assert got.near_ties.n_layers == (min(x[1] for x in near), max(x[1] for x in near))
    trio = np.array([[x[4], x[5]["tpot"], x[5]["kv_bytes"]] for x in fits])
    on_front = {(c.topology, c.n_layers, c.d_model) for c in got.pareto}
    # By hand in the last bits of rounding: clearly beaten designs are out, clearly unbeaten ones are in.
    for row, x in zip(trio, fits, strict=True):
        clearly = np.all(trio < row * (1 - 1e-12), axis=1).any()
        barely = np.all(trio <= row * (1 + 1e-12), axis=1).sum() > 1
        assert not (clearly and x[:3] in on_front)
        assert barely or x[:3] in on_front


def test_random_questions_cover_feasible_and_infeasible_every_way_to_train_and_conflicts_of_two(noisy_law, three_grids):
    questions = [random_question(s) for s in range(50)]
    assert {tuple(q[1]) for q in questions} == {("tokens",), ("tokens_per_param",), ("flops",)}
    answers, conflicts = [], set()
    for load, training, limits in questions:
        designs = every_design(noisy_law, three_grids, load, BOX, **training)
        answers.append(least(designs, limits) is not None)
        if not answers[-1]:
            conflicts.add(1 if any(least(designs, {k: v}) is None for k, v in limits.items()) else 2)
    assert 20 <= sum(answers) <= 45
    assert conflicts == {1, 2}


def test_every_design_trained_on_a_flop_budget_uses_it_up_to_the_last_token(noisy_law, three_grids):
    got = optimise(noisy_law, three_grids, ["train_flops<=1e16", "params<=20M"], seq_len=SEQ_LEN)
    for c in (got.best, *got.per_topology, *got.pareto):
        a_token = 6 * (c.params - 1000 * c.d_model) + 6 * SEQ_LEN * c.n_layers * c.d_model
        assert c.tokens == 1e16 // a_token
        assert c.uses["train_flops"] == c.tokens * a_token <= 1e16 < (c.tokens + 1) * a_token
    assert "D = 1e+16 FLOPs / FLOPs a token of each design, at 512 tokens" in got.training
    assert optimise(noisy_law, three_grids, ["train_flops<=1e16"], tokens=1e8).training == "D = 1e+08 tokens"
    # Not even one token: the budget itself is what cannot be met.
    with pytest.raises(Infeasible, match="meets train_flops alone with D = 1e\\+06 FLOPs") as caught:
        optimise(noisy_law, three_grids, ["train_flops<=1e6"])
    assert caught.value.conflict == ("train_flops",)


def test_twenty_tokens_per_total_parameter_is_the_default(noisy_law, make_lattice):
    got = optimise(noisy_law, [make_lattice("hc", [4, 8], [64, 128])], ["params<=2M"])
    assert got.best.tokens == 20 * got.best.params
    assert "20 tokens per parameter" in got.training
    with pytest.raises(OptimumError, match="keep one"):
        optimise(noisy_law, [make_lattice("hc", [4], [64])], [], tokens=1e9, tokens_per_param=20)
    with pytest.raises(OptimumError, match="tokens is -1"):
        optimise(noisy_law, [make_lattice("hc", [4], [64])], [], tokens=-1.0)


def test_equal_losses_go_to_fewer_parameters_then_to_the_first_topology(simulated, make_lattice):
    law = fit(simulated(noise=0.003), law="chinchilla", starts=8)
    # Same N, hence same loss at equal tokens: 12 * 8 * 64^2 == 12 * 2 * 128^2; the narrower one has fewer embeddings.
    got = optimise(law, [make_lattice("hc", [2], [128]), make_lattice("hc", [8], [64])], tokens=1e9)
    assert (got.best.n_layers, got.best.d_model) == (8, 64)
    twins = [make_lattice("hc", [8], [64]), make_lattice("hc", [8, 2], [64])]
    assert optimise(law, twins, tokens=1e9).best == optimise(law, twins[::-1], tokens=1e9).best


def test_interval_is_the_scatter_and_the_parameter_error_added_in_quadrature(noisy_law, make_lattice):
    best = optimise(noisy_law, [make_lattice("hc", [4, 8], [64, 128])], ["params<=2M"]).best
    where = (best.topology, best.backbone_params, best.tokens, best.n_layers, best.d_model)
    sd = math.hypot(noisy_law.log_rms, float(noisy_law.log_sd(*where)))
    t = stdtrit(len(noisy_law.residuals) - len(noisy_law.names), 0.975)
    assert math.log(best.upper / best.lower) == pytest.approx(2 * t * sd, rel=1e-4)


def test_flags_say_how_far_outside_the_fit_an_answer_lies(noisy_law, make_lattice):
    far = optimise(noisy_law, [make_lattice("hc", [48, 64, 96], [8192, 16384, 24576])], ["params<=200B"])
    text = " | ".join(far.flags)
    most = noisy_law.ranges["hc"]["N"][1]
    assert f"{far.best.backbone_params / most:.3g}x above the largest N fitted ({most:.3g})" in text
    assert "x above the largest D fitted" in text
    assert "intervals were checked to 8x: run larger sizes first, `depthlaw design` says which" in text
    assert "intervals were checked to 8x: train some runs on more tokens first" in text
    near = optimise(noisy_law, [make_lattice("hc", [40], [768])], tokens=most)
    assert any("above the largest N fitted" in f for f in near.flags)
    assert not any("checked" in f for f in near.flags)
    flat = optimise(noisy_law, [make_lattice("hc", [2, 3], [2048, 4096])])
    assert any("above the largest R fitted" in f for f in flat.flags)


def test_an_answer_inside_the_fit_and_the_lattice_has_no_flags_and_one_at_an_edge_has(noisy_law, make_lattice):
    inside = optimise(noisy_law, [make_lattice("hc", range(2, 60), range(32, 1025, 8))], ["params<=8M"])
    assert inside.flags == ()
    cut = optimise(
        noisy_law, [make_lattice("hc", range(3 * inside.best.n_layers, 60), range(32, 1025, 8))], ["params<=8M"]
    )
    assert any("is the smallest that was tried" in f for f in cut.flags)


def test_what_the_law_cannot_tell_is_flagged_in_the_answer(simulated, make_lattice):
    law = fit(simulated(("hc", "pre_ln"), noise=0.003, tokens_per_n=(20,)), starts=16)
    got = optimise(law, [make_lattice("hc", range(2, 30), range(32, 513, 8))], ["params<=8M"])
    assert any("do not identify alpha" in f for f in got.flags)
    assert got.law["status"] == "unidentified"
    only_other = replace(law, unidentified={"kappa[pre_ln]": "x"})
    assert not any("pre_ln" in f for f in optimise(only_other, [make_lattice("hc", [4], [64])]).flags)


def test_less_than_a_token_of_training_is_refused(noisy_law, make_lattice):
    with pytest.raises(OptimumError, match="tokens is 1e-09; it must be at least 1"):
        optimise(noisy_law, [make_lattice("hc", [4], [64])], tokens=1e-9)


def test_a_topology_outside_the_law_is_an_error(noisy_law, make_lattice):
    with pytest.raises(LawError, match="was not fitted on topology 'mhc'"):
        optimise(noisy_law, [make_lattice("mhc", [4], [64])])
    with pytest.raises(OptimumError, match="no design"):
        optimise(noisy_law, [])
    with pytest.raises(HardwareError, match="unknown hardware"):
        optimise(noisy_law, [make_lattice("hc", [4], [64])], hardware="abacus")


def test_a_topology_without_a_measured_cost_is_doubted_only_where_time_is_asked_about(noisy_law, make_lattice):
    grid = [make_lattice("hc", range(2, 60), range(32, 1025, 8))]
    measured = replace(BOX, topologies={"hc": Mixing(1e-5)})
    other = replace(BOX, topologies={"pre_ln": Mixing(1e-5)})

    def doubts(budgets, on):
        flags = optimise(noisy_law, grid, budgets, hardware=on).flags
        return [f for f in flags if "what hc adds to mix over depth" in f]

    for limit in ("tpot<=1s", "ttft<=1h"):
        assert len(doubts(["params<=8M", limit], BOX)) == 1
        assert len(doubts(["params<=8M", limit], other)) == 1
        assert doubts(["params<=8M", limit], measured) == []
    assert doubts(["params<=8M"], BOX) == []
    plain = optimise(noisy_law, [replace(grid[0], label="pre_ln")], ["params<=8M", "tpot<=1s"], hardware=BOX)
    assert not any("times" in f for f in plain.flags)


def test_a_budget_of_another_unit_is_doubted_as_a_time_is_only_where_it_counts_one(
    noisy_law, make_lattice, monkeypatch
):
    monkeypatch.setattr("depthlaw.scaling.budgets.BUDGETS", dict(BUDGETS))
    budget("price", unit="cents")(lambda design, workload, hardware: 1e3 * tpot(design, workload, hardware))
    budget("rent", unit="cents")(lambda design, workload, hardware: 1e-6 * design.params)
    budget("steps", unit="count")(lambda design, workload, hardware: 3600 / tpot(design, workload, hardware))
    grid = [make_lattice("hc", range(2, 60), range(32, 1025, 8))]
    for limit, said in (("price<=1e6", True), ("rent<=8", False), ("steps<=1e12", True)):
        flags = optimise(noisy_law, grid, ["params<=8M", limit], hardware=BOX).flags
        assert any("what hc adds to mix over depth" in f for f in flags) is said


def test_a_design_says_how_far_its_size_or_its_ratio_lies_past_the_runs_of_its_topology(noisy_law, make_lattice):
    ranges = {**noisy_law.ranges, "hc": noisy_law.ranges["hc"] | {"N": (1e5, 1e6), "R": (10.0, 40.0)}}
    law = replace(noisy_law, ranges=ranges)
    shapes = ((4, 64, 1.0), (16, 64, 2.5), (2, 160, 2.0), (8, 320, 12 * 8 * 320**2 / 1e6), (2, 48, 1e5 / (24 * 48**2)))
    for L, d, past in shapes:
        assert optimise(law, [make_lattice("hc", [L], [d])], tokens=1e7).best.beyond == pytest.approx(past)


def test_a_time_outside_what_was_measured_is_doubted_with_the_range(noisy_law, make_lattice):
    grid = [make_lattice("hc", [8], [256])]
    span = {"n_layers": (2.0, 24.0), "d_model": (64.0, 256.0), "context": (64.0, 4096.0), "weight_bytes": (4.0, 4.0)}
    on = replace(BOX, topologies={"hc": Mixing(1e-5)}, measured=span)

    def doubts(**load):
        flags = optimise(noisy_law, grid, ["tpot<=1s"], hardware=on, workload=Workload(**load)).flags
        return [f for f in flags if f.startswith("times")]

    assert doubts(weight_bytes=4) == []
    assert doubts(weight_bytes=4, context=8192) == [
        "times: context 8192 is outside what was measured on box (64 to 4096)"
    ]
    assert doubts() == ["times: weight_bytes 2 is outside what was measured on box (4)"]
    on = replace(on, measured=span | {"n_layers": (9.0, 24.0), "d_model": (64.0, 128.0)})
    assert doubts(weight_bytes=4) == [
        "times: n_layers 8 is outside what was measured on box (9 to 24)",
        "times: d_model 256 is outside what was measured on box (64 to 128)",
    ]


def test_an_infeasible_answer_names_the_conflict_and_the_nearest_design(noisy_law, make_lattice):
    grid = [make_lattice("hc", range(8, 30), range(64, 513, 8))]
    with pytest.raises(
        Infeasible, match="no design of 1254 meets tpot alone; nearest by smallest worst use / limit"
    ) as e:
        optimise(noisy_law, grid, ["params<=100M", "tpot<=50us"], hardware="h100")
    assert e.value.conflict == ("tpot",)
    assert e.value.nearest.n_layers == 8
    assert json.loads(json.dumps(e.value.to_dict()))["conflict"] == ["tpot"]


def test_the_answer_is_json(noisy_law, make_lattice):
    got = optimise(noisy_law, [make_lattice("hc", [4, 8], [64, 128])], ["params<=2M", "tpot<=15ms"], hardware="cpu")
    text = json.dumps(got.to_dict(), allow_nan=False)
    back = json.loads(text)
    assert back["best"]["n_layers"] == got.best.n_layers
    assert back["hardware"]["name"] == "cpu"
    assert "approximation" in back["interval"]


def test_ten_topologies_of_eight_thousand_shapes_take_well_under_a_second(simulated, make_lattice):
    base = fit(simulated(noise=0.003), starts=8)
    grids = [make_lattice(t, range(2, 127), range(32, 2049, 32)) for t in ("hc", "pre_ln", "full_attnres") * 4][:10]
    best = min(
        _timed(lambda: optimise(base, grids, ["params<=400M", "kv_bytes<=2GiB", "tpot<=15ms"])) for _ in range(3)
    )
    assert best < 0.5


def _timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def test_the_models_own_accounting_is_a_design(noisy_law):
    from depthlaw.archs.costs import Costs
    from depthlaw.archs.shape import shape_rule
    from depthlaw.archs.topologies import topology

    L, d = (v.ravel() for v in np.meshgrid(np.arange(2, 40), np.arange(64, 769, 32), indexing="ij"))
    shape = shape_rule("published").shape(L, d, 1024)
    grids = [Costs(topology(t), shape) for t in ("pre_ln", "hc")]
    got = optimise(noisy_law, grids, ["params<=20M", "tpot<=3ms"], hardware="cpu")
    one = Costs(topology(got.best.topology), shape_rule("published").shape(got.best.n_layers, got.best.d_model, 1024))
    assert got.best.params == one.params <= 20e6
    assert got.best.backbone_params == one.backbone_params


def test_a_query_loads_neither_scipy_nor_pandas_nor_torch(noisy_law, tmp_path):
    noisy_law.save(tmp_path / "law.json")
    code = (
        "import sys; from depthlaw.scaling.law_file import load_law; from depthlaw.scaling.optimum import optimise; "
        "import depthlaw.scaling.budgets; load_law(sys.argv[1]).predict('hc', 1e6, 1e8, 4, 64); "
        "print([m for m in ('scipy', 'pandas', 'torch', 'ray', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "law.json"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_limit_exactly_met_is_met_and_one_less_is_not(noisy_law, make_lattice):
    grid = [make_lattice("hc", range(2, 30), range(32, 513, 8))]
    best = optimise(noisy_law, grid, ["params<=8M"]).best
    assert optimise(noisy_law, grid, [f"params<={best.params}"]).best == best
    assert optimise(noisy_law, grid, [f"params<={best.params - 1}"]).best != best
