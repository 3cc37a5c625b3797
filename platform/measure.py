"""Times real prefill and decode passes on the machine at hand, counts what they hold, and fits the models of both."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from depthlaw.archs.backbone import Model, build
from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import Shape, shape_rule
from depthlaw.archs.topologies import TOPOLOGIES, topology
from depthlaw.scaling.calibrate import MODELS, Calibration, Measurement, calibrate
from depthlaw.scaling.hardware import Workload

VOCABULARY = 512
PREFILLS, DECODES = 1, 3  # timed passes of one model under one load in one visit; the visits repeat
LEAST_SECONDS = 1.0
BUSY = 1.2  # wall-clock over processor time from which on the source says so


class MeasureError(ValueError):
    """A measurement that cannot be made: one line with the value and what is allowed."""


@dataclass(frozen=True)
class Grid:
    """What is measured: every topology at every depth, width and context."""

    topologies: tuple[str, ...]
    layers: tuple[int, ...]
    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    rule: str


# By kind of device: models small enough to repeat often, large enough that weights, arithmetic and depth all show.
DEFAULTS = {
    "cpu": Grid((), (2, 6, 12, 24), (32, 96, 192, 288), (64, 256), "small"),
    "cuda": Grid((), (4, 8, 16, 32), (256, 512, 1024, 2048), (256, 2048), "head64"),
}


def measure(
    name: str,
    *,
    topologies: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    widths: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    rule: str | None = None,
    device: str | None = None,
    seconds: float = 300.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Times a grid of models with random weights for about `seconds` and returns the hardware with its errors.

    CPU: one thread, fp32, in processor time of that thread, which is wall-clock time while nothing else runs and does
    not count the turns of other programs. CUDA: bf16 with the topology's own numbers in fp32, wall-clock time of
    eager passes up to synchronisation. A pass
    over the grid visits the smallest models first; more passes follow while there is time, and each time is the median
    of all its repeats. If the first pass does not fit, the largest shapes are left out. Peak memory is that of one
    prefill, by the allocator's own count. Raises MeasureError, and the errors of labels, shapes and `calibrate`.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in DEFAULTS or (kind == "cuda" and not torch.cuda.is_available()):
        raise MeasureError(f"device is {kind!r}; it must be cpu, or cuda where there is one")
    if not LEAST_SECONDS <= seconds < float("inf"):
        raise MeasureError(f"seconds is {seconds:g}; it must be at least {LEAST_SECONDS:g}")
    usual = DEFAULTS[kind]
    grid = Grid(
        tuple(topologies or (label for label in sorted(TOPOLOGIES) if _plain(label))),
        tuple(sorted(set(layers or usual.layers))),
        tuple(sorted(set(widths or usual.widths))),
        tuple(sorted(set(contexts or usual.contexts))),
        rule or usual.rule,
    )
    if len(grid.layers) < 2 or len(grid.widths) < 2:
        raise MeasureError(
            f"layers {list(grid.layers)} and widths {list(grid.widths)}: give at least two of each, to tell the cost "
            "of depth from that of width"
        )
    with _one_thread(kind):
        clocks = time.perf_counter(), time.thread_time()
        times, left_out = _rounds(grid, kind, seconds, progress)
        busy = (time.perf_counter() - clocks[0]) / max(time.thread_time() - clocks[1], 1e-9) if kind == "cpu" else 1.0
        fastest = _fastest(kind)
    measured = [Measurement(costs, load, what, median(seen)) for (costs, load, what), seen in times.items()]
    found = calibrate(measured, name, "", fastest=fastest)
    return replace(found, hardware=replace(found.hardware, source=_source(found, kind, measured, left_out, busy)))


def _plain(label: str) -> bool:
    """Whether a name alone is a topology: a hybrid also needs its number of blocks."""
    try:
        topology(label)
    except ValueError:
        return False
    return True


Cell = tuple[Costs, Workload, str]  # one model and load, and which figure of it


def _rounds(
    grid: Grid, kind: str, seconds: float, progress: Callable[[str], None]
) -> tuple[dict[Cell, list[float]], list[tuple[int, int]]]:
    """Figures of every cell, and the (n_layers, d_model) that there was no time for."""
    rule = shape_rule(grid.rule)
    designs = list(dict.fromkeys(topology(label) for label in grid.topologies))
    element = 4 if kind == "cpu" else 2
    loads = [Workload(c, 1, element, element) for c in grid.contexts]
    shapes = [rule.shape(L, d, VOCABULARY) for L in grid.layers for d in grid.widths]
    shapes.sort(key=lambda s: (s.branch_params, s.n_layers))
    began, times = time.monotonic(), dict[Cell, list[float]]()
    passes, left_out = 0, list[Shape]()
    while True:
        pass_began = time.monotonic()
        for k, shape in enumerate(shapes):
            shape_began = time.monotonic()
            for design in designs:
                _visit(Costs(design, shape), loads, kind, times)
            now = time.monotonic()
            progress(f"pass {passes + 1}: {k + 1} of {len(shapes)} shapes, {now - began:.0f} of {seconds:.0f} s")
            # The next shape may take longer by as much as it has more weights.
            growth = shapes[k + 1].branch_params / shape.branch_params if k + 1 < len(shapes) else 0.0
            if now - began + growth * (now - shape_began) > seconds:
                if passes == 0:
                    shapes, left_out = shapes[: k + 1], shapes[k + 1 :]
                break
        passes += 1
        now = time.monotonic()
        # The next pass may take no longer than the last: it must end in time.
        if now - began + (now - pass_began) > seconds:
            return times, [(int(s.n_layers), int(s.d_model)) for s in left_out]


def _visit(costs: Costs, loads: Sequence[Workload], kind: str, times: dict[Cell, list[float]]) -> None:
    """Builds one model, warms it up with a pass of each kind, times it under each load and drops it."""
    with torch.device(kind):  # weights are drawn where they are used: a processor would take minutes for large ones
        model = build(costs.shape, costs.topology, 0).eval()
    if kind == "cuda":
        to_bf16(model)
    for k, load in enumerate((loads[-1], *loads)):  # the first, of the longest context, warms up
        tokens = torch.randint(VOCABULARY, (load.batch, load.context), device=kind)
        caches = model.new_caches(load.batch, load.context)
        for what, given, held, repeats in (
            ("ttft", tokens, 0, PREFILLS),
            ("tpot", tokens[:, -1:], load.context - 1, DECODES),
        ):
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                taken = [_pass_seconds(model, given, caches, held, kind) for _ in range(repeats if k else 1)]
            if k:
                times.setdefault((costs, load, what), []).extend(taken)
        if k and (costs, load, "peak_memory") not in times:
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                held = _held_bytes(partial(_pass_seconds, model, tokens, caches, 0, kind), kind)
            cached = sum(c.keys.nbytes + c.values.nbytes for c in caches)
            weights = sum(p.nbytes for p in model.parameters())
            times[costs, load, "peak_memory"] = [weights + cached + held]


def to_bf16(model: Model) -> None:
    """Branches, embedding and head in bf16, to be run under autocast; the topology's own numbers stay fp32."""
    model.branches.to(torch.bfloat16)
    for table in (model.embedding, model.head):
        table.data = table.data.to(torch.bfloat16)


def _pass_seconds(model: Model, tokens: torch.Tensor, caches: Sequence[Any], held: int, kind: str) -> float:
    """One pass of these tokens after the `held` ones in the cache."""
    for cache in caches:
        cache.length = held
    return _seconds(lambda: model.decode(tokens, caches), kind)


def _seconds(work: Callable[[], object], kind: str) -> float:
    if kind == "cpu":
        began = time.thread_time()
        work()
        return time.thread_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _held_bytes(work: Callable[[], object], kind: str) -> int:
    """The most that `work` holds at once of what it allocates."""
    if kind == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return int(torch.cuda.max_memory_allocated() - before)
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it writes two lines a profile to stderr at any lower level
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = accumulate(e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"]))
    return max(held, default=0)


def _fastest(kind: str) -> tuple[float, float]:
    """Bytes/s of the best plain matrix-vector product and FLOP/s of a matrix product, best of some: upper bounds."""
    dtype, width = (torch.float32, 1024) if kind == "cpu" else (torch.bfloat16, 8192)
    rates = []
    for rows in (256, width, 8 * width):
        matrix, vector = (torch.ones(*n, dtype=dtype, device=kind) for n in ((rows, width), (width,)))
        took = min(_seconds(lambda a=matrix, b=vector: a @ b, kind) for _ in range(9))
        rates.append(matrix.nbytes / took)
    square = torch.ones(width, width, dtype=dtype, device=kind)
    return max(rates), 2 * width**3 / min(_seconds(lambda: square @ square, kind) for _ in range(5))


@contextmanager
def _one_thread(kind: str) -> Iterator[None]:
    """On a CPU, one thread inside, as before outside: its processor time is then the time of the pass."""
    before = torch.get_num_threads()
    if kind == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _source(
    found: Calibration, kind: str, measured: Sequence[Measurement], left_out: Sequence[tuple[int, int]], busy: float
) -> str:
    """busy: wall-clock over processor time; above 1, others had turns, and shared caches and memory were slower too."""
    how = "1 thread, fp32, processor time" if kind == "cpu" else "bf16, eager"
    device = _processor() if kind == "cpu" else torch.cuda.get_device_name()
    low, high = zip(*found.hardware.measured.values(), strict=True)
    (L0, d0, c0), (L1, d1, c1) = low[:3], high[:3]
    errors = ", ".join(
        f"{what} median {100 * e.median:.2g} % (worst {100 * e.worst:.2g} %)" for what, e in found.held_out.items()
    )
    notes = f"; no time for the {len(left_out)} largest of the shapes" if left_out else ""
    if busy > BUSY:
        notes += f"; the machine was busy (wall-clock {busy:.1f} times processor time): an idle one is faster"
    return (
        f"measured: {device}, {how}; {len(measured)} figures of {len(found.hardware.topologies)} topologies, {L0:g} to "
        f"{L1:g} layers of width {d0:g} to {d1:g}, context {c0:g} to {c1:g}, batch 1; error on shapes held out: "
        f"{errors}{notes}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "CPU"


def report(found: Calibration) -> str:
    """The calibration in plain words."""
    on = found.hardware
    lines = [
        f"{on.name}: {on.source}",
        f"rates         {on.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {on.peak_flops / 1e9:.3g} GFLOP/s, "
        f"{1e6 * on.constant_s:.3g} us a pass",
        f"{'a sublayer':14}{'us':>8}  {'ns a number':>12}  {'us a source':>12}  {'workspace':>10}  {'scores':>7}",
    ]
    for label, m in on.topologies.items():
        source = f"{1e6 * m.source_s:12.3g}" if m.source_s else f"{'-':>12}"
        times = f"{1e6 * m.sublayer_s:8.3g}  {1e9 * m.element_s:12.3g}  {source}"
        lines.append(f"{label:14}{times}  {m.workspace:10.3g}  {m.scores:7.3g}")
    for what in MODELS:
        for whose, e in (("fitted", found.fitted[what]), ("held out", found.held_out[what])):
            lines.append(
                f"{what} {whose:9}median {100 * e.median:.1f} %, worst {100 * e.worst:.1f} % of {e.n} ({e.worst_at})"
            )
    return "\n".join(lines)
