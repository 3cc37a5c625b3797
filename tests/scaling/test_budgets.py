"""Quantities, budgets and the latency model against hand calculation."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from depthlaw.scaling.budgets import BUDGETS, BudgetError, Training, budget, parse_budget, parse_budgets
from depthlaw.scaling.hardware import PRESETS, Hardware, HardwareError, Mixing, Workload, hardware, kv_bytes, tpot, ttft
from depthlaw.scaling.units import UnitError, counted, format_quantity, parse_context, parse_quantity


@pytest.mark.parametrize(
    ("text", "name", "limit"),
    [
        ("params<=400M", "params", 400e6),
        ("params <= 400e6", "params", 400e6),
        ("params<1.5B", "params", 1.5e9),
        (" params<=400 m ", "params", 400e6),
        ("params<=400_000_000", "params", 400e6),
        ("params<=2T", "params", 2e12),
        ("params<=1.5e3K", "params", 1.5e6),
        ("kv_bytes<=2GiB", "kv_bytes", 2 * 2**30),
        ("kv_bytes<=2GB", "kv_bytes", 2e9),
        ("kv_bytes <= 2.5 gib", "kv_bytes", 2.5 * 2**30),
        ("kv_bytes<=512KiB", "kv_bytes", 512 * 1024),
        ("kv_bytes<=7B", "kv_bytes", 7),
        ("kv_bytes<=1048576", "kv_bytes", 2**20),
        ("tpot<=15ms", "tpot", 0.015),
        ("tpot<=.5 ms", "tpot", 0.0005),
        ("tpot<=1e-3s", "tpot", 0.001),
        ("tpot<=250us", "tpot", 250e-6),
        ("tpot<=250µs", "tpot", 250e-6),
        ("tpot<=250μs", "tpot", 250e-6),
        ("tpot<=2min", "tpot", 120.0),
        ("tpot<=1h", "tpot", 3600.0),
        ("ttft<=250ms", "ttft", 0.25),
        ("train_flops<=1e20", "train_flops", 1e20),
        ("train_flops<=1e20 FLOPs", "train_flops", 1e20),
        ("train_flops<=2.5 ZFLOPs", "train_flops", 2.5e21),
        ("prefill_flops<=300TFLOPs", "prefill_flops", 3e14),
        ("train_tokens<=8B", "train_tokens", 8e9),
        ("device_hours<=1,000", "device_hours", 1000.0),
        ("device_hours<=12h", "device_hours", 12.0),
        ("device_hours<=2days", "device_hours", 48.0),
        ("peak_memory<=80GB", "peak_memory", 80e9),
    ],
)
def test_budgets_are_read_as_people_write_them(text, name, limit):
    got = parse_budget(text)
    assert got.name == name
    assert got.limit == pytest.approx(limit, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("params<=4GiB", "count take K, M, B, T"),
        ("kv_bytes<=400M", "bytes take B, KB"),
        ("tpot<=15", "no unit; seconds take ns, us"),
        ("tpot<=2GiB", "unit 'GiB'"),
        ("vram<=2GiB", r"unknown budget 'vram'.*params \(count\), kv_bytes \(bytes\), tpot \(seconds\)"),
        ("params>=4M", "upper limit: write params<=4M"),
        ("params==4M", "upper limit"),
        ("train_flops<=4B", "FLOPs take FLOPs, KFLOPs"),
        ("device_hours<=4s", "hours take h, hours, min, days, for example 100h"),
        ("params=4M", "upper limit"),
        ("params", "is not a budget"),
        ("", "is not a budget"),
        ("params<=", "is not a quantity"),
        ("params<=lots", "is not a quantity"),
        ("params<=-4M", "is not a quantity"),
        ("params<=0", "must be positive"),
        ("params<=1e999", "must be positive and finite"),
        ("params<=4M,kv_bytes<=2GiB", "is not a quantity|has unit"),
    ],
)
def test_a_budget_that_cannot_be_read_is_one_line_that_says_what_is_allowed(text, says):
    with pytest.raises(BudgetError, match=says) as error:
        parse_budget(text)
    assert "\n" not in str(error.value)


def test_a_budget_given_twice_is_an_error_that_shows_both():
    with pytest.raises(BudgetError, match="'params<=4M' and 'params<=3M': keep one"):
        parse_budgets(["params<=4M", "tpot<=1ms", "params<=3M"])


def test_context_is_counted_in_powers_of_1024():
    assert [parse_context(t) for t in ("4096", "32k", "32K", "1M", 512)] == [4096, 32768, 32768, 2**20, 512]
    for bad in ("0", "32q", "-1", "1.5k", ""):
        with pytest.raises(UnitError, match="is not a context length"):
            parse_context(bad)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (3.99e8, "count", "399M"),
        (12, "count", "12"),
        (2**31, "bytes", "2 GiB"),
        (100, "bytes", "100 B"),
        (0.0142, "seconds", "14.2 ms"),
        (2.5e-7, "seconds", "250 ns"),
        (3.0, "watts", "3 watts"),
        (1.879e19, "FLOPs", "1.88e+19 FLOPs"),
        (13.2, "hours", "13.2 h"),
        (1234.5, "hours", "1,234 h"),
    ],
)
def test_quantities_are_shown_in_units_that_can_be_read_back(value, kind, text):
    assert format_quantity(value, kind) == text
    assert parse_quantity(text, kind) == pytest.approx(value, rel=5e-3)


def test_kv_bytes_is_two_numbers_a_layer_a_width_a_token(make_lattice):
    grid = make_lattice("pre_ln", [2, 24], [64, 1024])
    got = kv_bytes(grid, Workload(context=8192, batch=3, cache_bytes=2))
    want = [2 * 8192 * L * d * 3 * 2 for L in (2, 24) for d in (64, 1024)]
    assert got.tolist() == want


@pytest.mark.parametrize("batch", [1, 4096])
def test_tpot_is_the_roofline_plus_a_cost_for_each_sublayer(make_lattice, batch):
    """batch 1 is bound by bandwidth, 4096 with a short context by FLOPs."""
    L, d, c = 24, 1024, 16
    on = Hardware("box", 1e12, 1e14, 5e-6, 2e-5, "made up")
    got = tpot(make_lattice("pre_ln", [L], [d]), Workload(context=c, batch=batch, weight_bytes=1, cache_bytes=2), on)
    weights = 12 * L * d * d + 1000 * d
    by_bytes = (weights * 1 + batch * 2 * c * L * d * 2) / 1e12
    by_flops = batch * (2 * weights + 4 * c * L * d) / 1e14
    assert (by_bytes > by_flops) == (batch == 1)
    assert got[0] == pytest.approx(max(by_bytes, by_flops) + 48 * 5e-6 + 2e-5, rel=1e-12)


@pytest.mark.parametrize(("context", "batch"), [(1, 1), (512, 3)])
def test_ttft_is_the_same_model_for_all_tokens_of_the_prompts(make_lattice, context, batch):
    """One token is bound by bandwidth, 3 prompts of 512 by FLOPs; the head counts once a prompt."""
    L, d, c = 6, 128, context
    on = Hardware("box", 1e12, 1e14, 5e-6, 2e-5, "made up", {"hc": Mixing(7e-6, 3e-13)})
    load = Workload(context=c, batch=batch, weight_bytes=1, cache_bytes=2)
    body, head = 12 * L * d * d, 1000 * d
    by_bytes = (body + head + batch * 2 * c * L * d * 2) / 1e12
    by_flops = batch * (c * (2 * body + 2 * (c + 1) * L * d) + 2 * head) / 1e14
    assert (by_bytes > by_flops) == (batch == 1)
    sublayers = 12 * (7e-6 + 3e-13 * batch * c * d)
    got = ttft(make_lattice("hc", [L], [d]), load, on)
    assert got[0] == pytest.approx(max(by_bytes, by_flops) + sublayers + 2e-5, rel=1e-12)
    plain = ttft(make_lattice("pre_ln", [L], [d]), load, on)  # not measured: the default, and no more
    assert plain[0] == pytest.approx(max(by_bytes, by_flops) + 12 * 5e-6 + 2e-5, rel=1e-12)
    assert BUDGETS["ttft"].use(make_lattice("hc", [L], [d]), load, on) == got
    assert BUDGETS["ttft"].unit == "seconds"


def test_every_other_budget_is_its_own_closed_form(make_lattice):
    L, d, c, batch, devices, D, seq = 24, 1024, 8192, 3, 4, 7e9, 2048
    grid = make_lattice("pre_ln", [L], [d])
    load = Workload(context=c, batch=batch, weight_bytes=1, cache_bytes=2, tensor_parallel=devices)
    on = Hardware("box", 1e12, 1e14, 5e-6, 2e-5, "made up")
    backbone, vocabulary = 12 * L * d * d, 1000
    kv, weights = 2 * c * L * d * batch * 2, backbone + 2 * vocabulary * d
    a_token = 6 * (backbone + vocabulary * d) + 6 * seq * L * d
    want = {
        "backbone_params": backbone,
        "weight_bytes": weights,
        # 8-bit weights; a stream and 13 numbers of workspace for each of its own, in 16 bits.
        "peak_memory": (weights + kv) / devices + batch * c * 14 * d * 2,
        "prefill_flops": batch * (c * (2 * backbone + 2 * (c + 1) * L * d) + 2 * vocabulary * d),
        "train_flops": D * a_token,
        "train_tokens": D,
        "device_hours": D * a_token / (0.5 * 1e14) / 3600,
    }
    for name, value in want.items():
        got = BUDGETS[name].of(grid, load, on, Training(np.array([D]), seq, mfu=0.5))
        assert np.ravel(got)[0] == pytest.approx(value, rel=1e-12), name
    assert {*want, "params", "kv_bytes", "tpot", "ttft"} == {
        b for b in BUDGETS if BUDGETS[b].use.__module__.startswith("dep")
    }


def test_devices_share_bytes_and_flops_but_each_pays_for_every_sublayer(make_lattice):
    grid, on = make_lattice("pre_ln", [24], [1024]), Hardware("box", 1e12, 1e14, 5e-6, 2e-5, "made up")
    for time in (tpot, ttft):
        one, four = (time(grid, Workload(8192, 3, tensor_parallel=n), on)[0] for n in (1, 4))
        fixed = 48 * 5e-6 + 2e-5
        assert four - fixed == pytest.approx((one - fixed) / 4, rel=1e-9)
    assert any("exchange between them" in x for x in on.doubts("pre_ln", 24, 1024, Workload(tensor_parallel=4)))
    assert not any("exchange" in x for x in on.doubts("pre_ln", 24, 1024, Workload()))


def test_the_state_of_peak_memory_is_what_the_real_topologies_carry():
    from depthlaw.archs.costs import Costs
    from depthlaw.archs.shape import shape_rule
    from depthlaw.archs.topologies import topology
    from depthlaw.scaling.hardware import peak_memory, weight_bytes

    load, L, d = Workload(context=100, batch=5, weight_bytes=4, cache_bytes=2), 6, 64
    state = {}
    for name in ("pre_ln", "hc", "full_attnres"):
        one = Costs(topology(name), shape_rule("small").shape(L, d, 512))
        rest = float(weight_bytes(one, load) + kv_bytes(one, load))
        none = Hardware("bare", 1e12, 1e14, 0.0, 0.0, "made up", {name: Mixing(0.0, workspace=0.0)})
        state[name] = (float(peak_memory(one, load, none)) - rest) / (100 * 5 * 4 * d)
    # One stream; four; the embedding and the output of each of 2 L sublayers.
    assert state == {"pre_ln": 1.0, "hc": 4.0, "full_attnres": 2 * L + 1}


def test_sources_over_depth_cost_time_by_their_number(make_lattice):
    on = Hardware("box", 1e12, 1e14, 5e-6, 0.0, "made up", {"full_attnres": Mixing(5e-6, 0.0, 2e-6)})
    grid = make_lattice("full_attnres", [4, 24], [128])
    more = tpot(replace(grid, depth_reads=np.array([44, 1224])), Workload(), on) - tpot(grid, Workload(), on)
    assert more == pytest.approx([44 * 2e-6, 1224 * 2e-6], rel=1e-9)


@pytest.mark.parametrize(("L", "d", "measured_ms"), [(64, 64, 6.6), (16, 128, 2.0), (4, 256, 0.72)])
def test_cpu_preset_reproduces_the_decode_steps_it_was_fitted_to(make_lattice, L, d, measured_ms):
    got = tpot(make_lattice("pre_ln", [L], [d]), Workload(context=128, weight_bytes=4, cache_bytes=4), PRESETS["cpu"])
    assert 1e3 * got[0] == pytest.approx(measured_ms, rel=0.15)


def test_data_sheet_presets_say_what_is_assumed():
    assert PRESETS["h100"].bandwidth_bytes_per_s == 3.35e12
    assert PRESETS["a100"].peak_flops == 312e12
    assert PRESETS["h200"].bandwidth_bytes_per_s == 4.8e12
    for name in ("a100", "h100", "h200"):
        assert "data sheet" in PRESETS[name].source
        assert "assumed" in PRESETS[name].source


def test_a_hardware_file_round_trips_and_a_wrong_one_is_refused(tmp_path):
    own = Hardware("mine", 1e11, 2e12, 1e-6, 0.0, "measured here")
    full = replace(
        own, topologies={"hc": Mixing(1e-6, 2e-9), "moda": Mixing(1e-6, 0.0, 3e-6)}, measured={"batch": (1, 8)}
    )
    for one in (own, full):
        one.save(tmp_path / "mine.json")
        assert hardware(tmp_path / "mine.json") == one
    (tmp_path / "bad.json").write_text('{"name": "x"}')
    with pytest.raises(HardwareError, match="must hold exactly name, bandwidth_bytes_per_s"):
        hardware(tmp_path / "bad.json")
    with pytest.raises(HardwareError, match=r"choose one of a100, h100, h200, cpu, or a \.json file"):
        hardware("tpu")
    with pytest.raises(HardwareError, match="peak_flops is -1"):
        Hardware("x", 1e9, -1, 0.0, 0.0, "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"topologies": {"hc": {"sublayer_s": -1.0}}}, "sublayer_s is -1.0; it must be a number, at least 0"),
        ({"topologies": {"hc": {"launch_s": 1.0}}}, "topologies must map a label to sublayer_s, element_s, source_s"),
        ({"topologies": ["hc"]}, "topologies must map a label"),
        ({"measured": {"n_layers": [2]}}, "measured a name to its smallest and largest value"),
        ({"measured": {"n_layers": [8, 2]}}, "measured 'n_layers' is 8.0 to 2.0"),
        ({"measured": {"colour": [1, 2]}}, "one of n_layers, d_model, context, batch, weight_bytes, cache_bytes"),
        ({"sublayer_s": "fast"}, "sublayer_s is 'fast'"),
        ({"extra": 1}, "must hold exactly name, bandwidth_bytes_per_s"),
    ],
)
def test_a_hardware_file_with_a_wrong_value_is_one_line_that_names_it(tmp_path, change, says):
    good = asdict(Hardware("mine", 1e11, 2e12, 1e-6, 0.0, "measured here"))
    (tmp_path / "x.json").write_text(json.dumps(good | change))
    with pytest.raises(HardwareError, match=says) as error:
        hardware(tmp_path / "x.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "bad", [{"context": 0}, {"batch": 1.5}, {"weight_bytes": 0}, {"cache_bytes": -2}, {"tensor_parallel": 0}]
)
def test_a_workload_that_cannot_be_is_refused(bad):
    with pytest.raises(HardwareError, match=next(iter(bad))):
        Workload(**bad)


def test_a_users_budget_is_usable_like_the_built_in_ones(make_lattice, noisy_law, monkeypatch):
    from depthlaw.scaling.optimum import optimise

    monkeypatch.setattr("depthlaw.scaling.budgets.BUDGETS", dict(BUDGETS))

    @budget("watts", unit="watts")
    def watts(design, workload, hardware):
        """Power, made up.

        More text.
        """
        return 0.5 * design.n_layers * workload.batch

    got = optimise(noisy_law, [make_lattice("hc", range(2, 40), [64, 128, 256])], ["watts<=5", "params<=9M"])
    assert got.best.uses["watts"] <= 5.0
    assert got.best.n_layers <= 10
    assert parse_budget("watts <= 2.5 watts").limit == 2.5
    assert parse_budget("watts<=2.5").budget.describe == "Power, made up."
    with pytest.raises(BudgetError, match="cannot name a budget"):
        budget("two words", unit="count")(watts)


def test_a_budget_that_asks_for_training_sees_the_tokens_of_each_design(make_lattice, noisy_law, monkeypatch):
    from depthlaw.scaling.optimum import optimise

    monkeypatch.setattr("depthlaw.scaling.budgets.BUDGETS", dict(BUDGETS))

    @budget("bill", unit="euros")
    def bill(design, workload, hardware, training):
        """A euro a million tokens."""
        return 1e-6 * training.tokens

    grid = make_lattice("hc", range(2, 40), [64, 128, 256])
    got = optimise(noisy_law, [grid], ["bill<=90 euros"], tokens_per_param=10)
    assert got.best.uses["bill"] == pytest.approx(1e-5 * got.best.params)
    assert got.best.params <= 9e6
    with pytest.raises(
        BudgetError, match=r"'two' takes \(design, workload\); write it as a function of \(design, work"
    ):
        budget("two", unit="count")(lambda design, workload: 1)
    with pytest.raises(BudgetError, match=r"'four' takes \(design, workload, hardware, price\)"):
        budget("four", unit="count")(lambda design, workload, hardware, price: 1)
    # A default of one's own is no fourth argument.
    budget("three", unit="count")(lambda design, workload, hardware, price=2: price * design.n_layers)
    assert optimise(noisy_law, [grid], ["three<=20"]).best.n_layers <= 10


def test_a_budget_of_the_wrong_shape_is_named(make_lattice, noisy_law, monkeypatch):
    from depthlaw.scaling.optimum import optimise

    monkeypatch.setattr("depthlaw.scaling.budgets.BUDGETS", dict(BUDGETS))
    budget("broken", unit="count")(lambda design, workload, hardware: np.ones(3))
    with pytest.raises(BudgetError, match="'broken' returned shape"):
        optimise(noisy_law, [make_lattice("hc", range(2, 40), [64])], ["broken<=5"])


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (399_358_848, "count", "399M"),
        (999.7e6, "count", "1B"),
        (1020 * 1024, "bytes", "1020 KiB"),
        (1.98 * 2**30, "bytes", "1.98 GiB"),
        (0.0142, "seconds", "14.2 ms"),
        (0.9996e-3, "seconds", "1 ms"),
        (3e15, "count", "3000T"),
        (0.5, "count", "0.5"),
        (0, "bytes", "0 B"),
    ],
)
def test_quantities_are_shown_to_three_digits_in_their_largest_unit_and_never_in_powers_of_ten(value, kind, shown):
    assert format_quantity(value, kind) == shown


def test_a_budget_name_that_another_function_has_is_refused_and_a_rerun_of_one_is_fine():
    with pytest.raises(BudgetError, match="budget 'params' exists already"):
        budget("params", unit="count")(lambda design, workload, hardware: design.params)

    def again():
        def mine(design, workload, hardware):
            """Mine."""
            return design.params

        return mine

    try:
        budget("mine_again", unit="count")(again())
        assert budget("mine_again", unit="count")(again()).__doc__ == "Mine."
    finally:
        BUDGETS.pop("mine_again")


def test_one_thing_is_counted_without_an_s():
    said = [counted(n, "layer") for n in (0, 1, 2, 1200)] + [counted(n, "topology", "topologies") for n in (1, 3)]
    assert said == ["0 layers", "1 layer", "2 layers", "1,200 layers", "1 topology", "3 topologies"]
