"""Real timings of tiny models, the file they become, and a question answered with it."""

import json
import math

import pytest
import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.costs import Costs
from depthlaw.archs.errors import ShapeError, TopologyError
from depthlaw.archs.shape import shape_rule
from depthlaw.archs.topologies import TOPOLOGIES, topology
from depthlaw.platform import measure as module
from depthlaw.platform.measure import MeasureError, measure, report
from depthlaw.scaling.hardware import Workload, hardware, tpot

TINY = ["--layers", "1,2", "--widths", "16,32,64", "--context", "8,32", "--seconds", "10"]


@pytest.mark.engine
def test_a_measured_file_answers_a_question_with_what_each_topology_costs(run, study, tmp_path):
    path, law = tmp_path / "here.json", tmp_path / "law.json"
    two = ["--topology", "pre_ln", "--topology", "hc"]
    code, out, err = run("measure", "--out", path, *two, *TINY, "--json", "--device", "cpu")
    assert code == 0, err
    found, on = json.loads(out), hardware(path)
    assert found["hardware"]["source"] == on.source
    assert on.source.startswith("measured: ")
    assert "1 thread, fp32" in on.source
    assert "1 to 2 layers of width 16 to 64, context 8 to 32" in on.source
    assert f"tpot median {100 * found['held_out']['tpot']['median']:.2g} %" in on.source
    assert on.measured["n_layers"] == (1, 2)
    assert set(on.topologies) == {"pre_ln", "hc"}
    assert on.topologies["hc"].sublayer_s > on.topologies["pre_ln"].sublayer_s > 0
    for what in ("tpot", "ttft", "peak_memory"):
        assert found["fitted"][what]["n"] + found["held_out"][what]["n"] == 6 * 2 * 2
        assert 0 < found["held_out"][what]["median"] < 1
    assert found["held_out"]["peak_memory"]["median"] < 0.1
    assert 5 < on.topologies["hc"].workspace < 30
    assert "pass 1: 6 of 6 shapes" in err

    assert run("fit", study.store.path, "--out", law)[0] == 0
    ask = [
        "--tokens",
        "2M",
        "--context",
        "32",
        "--weight-bytes",
        "4",
        "--cache-bytes",
        "4",
        "--hardware",
        path,
        "--json",
    ]
    code, out, _ = run("optimum", law, "params<=400k", "tpot<=1s", "ttft<=1s", "peak_memory<=1GB", *ask)
    answer = json.loads(out)
    assert code == 0
    best = answer["best"]
    shape = shape_rule("small").shape(best["n_layers"], best["d_model"], 512)
    load = Workload(context=32, weight_bytes=4, cache_bytes=4)
    assert best["uses"]["tpot"] == pytest.approx(float(tpot(Costs(topology(best["topology"]), shape), load, on)))
    assert not any("mix over depth" in flag for flag in answer["flags"])
    inside = best["n_layers"] <= 2 and 16 <= best["d_model"] <= 64
    assert inside != any("outside what was measured on here" in flag for flag in answer["flags"])


def test_a_measurement_ends_near_its_time_and_keeps_the_smallest_shapes(monkeypatch):
    """A clock of one second a model of two topologies: 7 shapes of 9 fit into 14 seconds, smallest first."""
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def visit(costs, loads, kind, times):
        now[0] += 1.0
        for load in loads:
            for what in ("tpot", "ttft"):
                times.setdefault((costs, load, what), []).append(1e-3 * costs.n_layers + 1e-6 * costs.d_model)

    monkeypatch.setattr(module, "_visit", visit)
    monkeypatch.setattr(module, "_fastest", lambda kind: (1e10, 1e11))
    grid = module.Grid(("pre_ln", "hc"), (2, 4, 8), (32, 64, 128), (8,), "small")
    times, left_out = module._rounds(grid, "cpu", 14.0, lambda text: None)
    assert now[0] <= 14.0
    assert len({(c.n_layers, c.d_model) for c, _, _ in times}) == 7
    assert left_out == [(4, 128), (8, 128)]
    now[0] = 0.0
    times, left_out = module._rounds(grid, "cpu", 60.0, lambda text: None)
    assert left_out == []
    assert {len(seen) for seen in times.values()} == {3}  # passes of 18 seconds
    assert now[0] == 54.0


def test_a_busy_machine_is_named_in_the_source(monkeypatch):
    def rounds(grid, kind, seconds, progress):
        shapes = [shape_rule("small").shape(L, d, 512) for L in (2, 4) for d in (32, 64)]
        costs = [Costs(topology("pre_ln"), shape) for shape in shapes]
        load = Workload(8, 1, 4, 4)
        return {(c, load, w): [1e-3 + 1e-8 * c.params] for c in costs for w in ("tpot", "ttft")}, [(8, 64)]

    monkeypatch.setattr(module, "_rounds", rounds)
    monkeypatch.setattr(module, "_fastest", lambda kind: (1e10, 1e11))
    for turns, said in ((1.0, False), (3.0, True)):
        wall = iter((0.0, turns))
        processor = iter((0.0, 1.0))
        monkeypatch.setattr(module.time, "perf_counter", lambda wall=wall: next(wall))
        monkeypatch.setattr(module.time, "thread_time", lambda processor=processor: next(processor))
        source = measure("x", device="cpu").hardware.source
        assert ("the machine was busy (wall-clock 3.0 times processor time)" in source) == said
        assert "no time for the 1 largest of the shapes" in source


def test_every_topology_that_a_name_alone_describes_is_measured_by_default(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "_rounds", lambda grid, *rest: asked.append(grid) or ({}, []))
    monkeypatch.setattr(module, "_fastest", lambda kind: (1e10, 1e11))
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="measurements of 0 shapes"):
        measure("x", device="cpu")
    assert set(asked[0].topologies) == TOPOLOGIES.keys() - {"hybrid"}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        ({"device": "abacus"}, MeasureError, "device is 'abacus'; it must be cpu, or cuda"),
        ({"seconds": 0.0}, MeasureError, "seconds is 0; it must be at least 1"),
        ({"seconds": math.nan}, MeasureError, "seconds is nan"),
        ({"layers": [2]}, MeasureError, r"layers \[2\] and widths .*: give at least two of each"),
        ({"widths": [64, 64]}, MeasureError, r"widths \[64\]: give at least two"),
        ({"widths": [60, 64]}, ShapeError, "d_model 60 does not fit the shape rule 'small'"),
        ({"rule": "golden"}, ShapeError, "unknown shape rule 'golden'"),
        ({"topologies": ["resnet"]}, TopologyError, "unknown topology 'resnet'"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused_before_it_starts(ask, error, says):
    with pytest.raises(error, match=says):
        measure("x", **({"device": "cpu"} | ask))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "here.txt"], ["out is 'here.txt'", ".json"]),
        (["--out", "nowhere/here.json"], ["folder that exists"]),
        (["--out", "here.json", "--layers", "2,x"], ["layers is '2,x'", "64,256"]),
        (["--out", "here.json", "--widths", ""], ["widths is ''"]),
        (["--out", "here.json", "--context", "0"], ["context is '0'"]),
        (["--out", "here.json", "--topology", "hybrid"], ["hybrid"]),
        (["--out", "here.json", "--layers", "4"], ["at least two"]),
    ],
)
def test_a_wrong_option_is_one_line_and_code_2_and_writes_nothing(run, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("measure", *options)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("error: ")
    assert all(word in err for word in words), err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("label", sorted(TOPOLOGIES.keys() - {"hybrid"}))
def test_bf16_as_on_an_accelerator_gives_the_logits_of_fp32(label):
    shape, tokens = shape_rule("small").shape(3, 64, 50), torch.arange(9)[None]
    logits = []
    for half in (False, True):
        model = build(shape, topology(label), 0)
        if half:
            module.to_bf16(model)
        caches = model.new_caches(1, 9)
        assert caches[0].keys.dtype == (torch.bfloat16 if half else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            model.decode(tokens[:, :8], caches)
            logits.append(model.decode(tokens[:, 8:], caches).float())
    assert torch.linalg.norm(logits[1] - logits[0]) < 0.05 * torch.linalg.norm(logits[0])


@pytest.mark.slow
@pytest.mark.engine  # so that nothing runs beside it: it takes times
def test_on_shapes_held_out_the_calibrated_decode_step_is_within_15_percent_of_the_measured_one(record_property):
    """The goal of the latency model; median over all topologies, each time the median of interleaved repeats."""
    found = measure("here", device="cpu", seconds=240.0)
    for what, errors in found.held_out.items():
        record_property(f"{what}_median", errors.median)
        record_property(f"{what}_worst", errors.worst)
    assert found.held_out["tpot"].n >= 50
    assert found.held_out["tpot"].median <= 0.15
    assert f"tpot held out median {100 * found.held_out['tpot'].median:.1f} %" in report(found)


def test_what_a_pass_holds_is_counted_to_the_byte_and_in_silence(capfd):
    """Two buffers at once, one of them left behind; what was there before does not count."""
    before = torch.zeros(10_000)

    def work():
        first = torch.empty(1000)
        second = torch.empty(2000)
        del first
        return torch.empty(500), second, before

    assert module._held_bytes(work, "cpu") == 4 * 3000
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("label", ["pre_ln", "hc", "full_attnres"])
def test_the_state_over_depth_is_part_of_what_a_prefill_holds(label):
    """Doubling the depth adds exactly the state's growth, for what a branch holds does not grow with depth."""
    held = []
    shapes = [shape_rule("small").shape(L, 96, 64) for L in (4, 8)]
    tokens = torch.zeros(1, 64, dtype=torch.long)
    for shape in shapes:
        model = build(shape, topology(label), 0)
        caches = model.new_caches(1, 64)
        model.decode(tokens, caches)  # tables of the rotation are made once
        for cache in caches:
            cache.length = 0
        held.append(module._held_bytes(lambda model=model, caches=caches: model.decode(tokens, caches), "cpu"))
    state = [Costs(topology(label), shape).state_elements(64) for shape in shapes]
    assert held[1] - held[0] == pytest.approx(4 * (state[1] - state[0]), rel=0.05, abs=4096)
