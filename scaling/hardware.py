"""Where a model will run, with what load, and how long prefill and one decode step then take."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np

from depthlaw.scaling.design import Design
from depthlaw.scaling.laws import Array

LARGEST = 2**32  # of context and batch: far beyond use, and counts of elements stay within 64 bits


class HardwareError(ValueError):
    """A workload or a hardware that cannot be: one line with the value and what is allowed."""


@dataclass(frozen=True)
class Workload:
    """Decoding of `batch` sequences at once, each with `context` tokens in its cache; bytes of one weight and of one
    cache element; tensor_parallel: devices over which weights, heads and FLOPs are split evenly. Raises HardwareError
    for a value that is not positive."""

    context: int = 4096
    batch: int = 1
    weight_bytes: float = 2
    cache_bytes: float = 2
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("context", "batch", "tensor_parallel"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise HardwareError(f"{name} is {value!r}; it must be a whole number, at least 1")
            if value > LARGEST:
                raise HardwareError(f"{name} is {value}; it must be at most {LARGEST}")
        for name in ("weight_bytes", "cache_bytes"):
            value = getattr(self, name)
            if not 0.0 < value <= 16.0:
                raise HardwareError(f"{name} is {value!r}; it must be bytes per element: 4 (fp32), 2 (bf16), 1 (fp8)")


@dataclass(frozen=True)
class Mixing:
    """What one topology's sublayers cost beyond the roofline. sublayer_s: fixed seconds a sublayer (norms, launches and
    calls of both the branch and the topology); element_s: seconds for each number of the stream (d a token) that passes
    a sublayer; source_s: seconds for each source over depth that is read.

    And what a pass holds at its peak beside weights, cache and state over depth: workspace, numbers for each number of
    the stream (13 is what was measured of pre_ln, most of it SwiGLU's); scores, numbers for each pair of tokens in each
    head, where attention is written out. Raises HardwareError for a negative one."""

    sublayer_s: float
    element_s: float = 0.0
    source_s: float = 0.0
    workspace: float = 13.0
    scores: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _at_least(f"mixing: {name}", value, 0.0)


def _at_least(what: str, value: object, least: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:  # type: ignore[arg-type, operator]
        raise HardwareError(f"{what} is {value!r}; it must be a number, at least {least:g}")


# What a range of `Hardware.measured` may be of: a property of the shape, or of the workload.
OF_SHAPE, OF_WORKLOAD = ("n_layers", "d_model"), tuple(f.name for f in fields(Workload))


@dataclass(frozen=True)
class Hardware:
    """Coefficients of the latency model. bandwidth: bytes/s from memory; peak: FLOP/s; sublayer: fixed seconds for each
    attention or feed-forward branch, which follow one another; constant: fixed seconds a step. source says where the
    numbers come from and which are assumed.

    topologies: the `Mixing` of each topology that was measured; any other costs sublayer_s a sublayer and no more.
    measured: (smallest, largest) n_layers, d_model and whatever of the workload the timings covered; empty if there
    were none. Raises HardwareError for rates not positive or times negative."""

    name: str
    bandwidth_bytes_per_s: float
    peak_flops: float
    sublayer_s: float
    constant_s: float
    source: str
    topologies: Mapping[str, Mixing] = field(default_factory=dict)
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (
            ("bandwidth_bytes_per_s", 1.0),
            ("peak_flops", 1.0),
            ("sublayer_s", 0.0),
            ("constant_s", 0.0),
        ):
            _at_least(f"hardware {self.name!r}: {name}", getattr(self, name), least)
        for what, (low, high) in self.measured.items():
            if what not in OF_SHAPE + OF_WORKLOAD or not low <= high:
                raise HardwareError(
                    f"hardware {self.name!r}: measured {what!r} is {low!r} to {high!r}; it must be a smallest and a "
                    f"largest value of one of {', '.join(OF_SHAPE + OF_WORKLOAD)}"
                )

    def mixing(self, topology: str) -> Mixing:
        return self.topologies.get(topology, Mixing(self.sublayer_s))

    def doubts(self, topology: str, n_layers: int, d_model: int, workload: Workload) -> list[str]:
        """What to doubt about a time of this design, in plain words."""
        # Without measured topologies the costs are those of the plain model.
        known = self.topologies or ("pre_ln",)
        flags = []
        if topology not in known:
            whose = "pre_ln" if "pre_ln" in known else "a typical topology"
            flags.append(
                f"times count branches, weights and cache as in {whose}, not what {topology} adds to mix over depth"
            )
        if workload.tensor_parallel > 1:
            flags.append(
                f"times take bytes and FLOPs as split evenly over {workload.tensor_parallel} devices; the exchange "
                "between them, twice a layer, is not counted"
            )
        at = {"n_layers": n_layers, "d_model": d_model} | asdict(workload)
        for what, (low, high) in self.measured.items():
            if not low <= at[what] <= high:
                covered = f"{low:g}" if low == high else f"{low:g} to {high:g}"
                flags.append(f"times: {what} {at[what]:g} is outside what was measured on {self.name} ({covered})")
        return flags

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def _data_sheet(name: str, what: str, bandwidth: float, peak: float) -> Hardware:
    # 5 us is the order of the launch and synchronisation cost of a branch's few kernels under CUDA graphs.
    source = (
        f"data sheet of the {what}: memory bandwidth and dense bf16 peak, neither reached in practice; "
        "the 5 us a sublayer and 20 us a step are assumed, not measured, and mixing over depth is not in them"
    )
    return Hardware(name, bandwidth, peak, 5e-6, 20e-6, source)


PRESETS = {
    h.name: h
    for h in (
        _data_sheet("a100", "A100 SXM 80GB", 2.039e12, 312e12),
        _data_sheet("h100", "H100 SXM", 3.35e12, 989e12),
        _data_sheet("h200", "H200 SXM", 4.8e12, 989e12),
        Hardware(
            "cpu",
            40e9,
            107e9,
            48e-6,
            50e-6,
            "one thread, fp32: matmul peak measured; overheads and effective bandwidth fitted to cached decode steps "
            "of three Pre-LN models of 3.3M backbone parameters (L64 d64 6.6 ms, L16 d128 2.0 ms, L4 d256 0.72 ms); "
            "prefill at the matmul peak is assumed, not measured",
        ),
    )
}


def hardware(name: str | Path) -> Hardware:
    """A preset by its name, or a JSON file with the fields of `Hardware`. Raises HardwareError."""
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    path = Path(name)
    if path.suffix != ".json":
        raise HardwareError(f"unknown hardware {str(name)!r}; choose one of {', '.join(PRESETS)}, or a .json file")
    wanted = [f.name for f in fields(Hardware)]
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HardwareError(f"cannot read hardware file {path}: {error}") from error
    if not isinstance(data, dict) or set(data) != set(wanted):
        raise HardwareError(f"hardware file {path} must hold exactly {', '.join(wanted)}")
    try:
        data["topologies"] = {label: Mixing(**costs) for label, costs in data["topologies"].items()}
        data["measured"] = {what: (float(low), float(high)) for what, (low, high) in data["measured"].items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise HardwareError(
            f"hardware file {path}: topologies must map a label to {', '.join(f.name for f in fields(Mixing))}, "
            f"measured a name to its smallest and largest value ({error})"
        ) from error
    return Hardware(**data)


def kv_bytes(design: Design, workload: Workload) -> Array:
    """Bytes of the KV cache of the whole batch at full context, over all devices, (m,)."""
    return np.asarray(workload.batch * workload.cache_bytes * np.asarray(design.kv_elements(workload.context), float))


def bytes_moved(design: Design, workload: Workload) -> Array:
    """Bytes of the weights that one pass reads and of the KV cache that it reads or writes, (m,)."""
    return workload.weight_bytes * np.asarray(design.decode_params, float) + kv_bytes(design, workload)


def tpot(design: Design, workload: Workload, on: Hardware) -> Array:
    """Seconds of one decode step of the batch (time per output token), (m,); see `_seconds`.

    bytes = decode_params * weight_bytes + KV cache of the batch, FLOPs = batch * decode_flops(context), one token of
    each sequence.
    """
    flops = workload.batch * np.asarray(design.decode_flops(workload.context), float)
    return _seconds(design, workload, on, flops, workload.batch)


def ttft(design: Design, workload: Workload, on: Hardware) -> Array:
    """Seconds until the first token: prefill of the batch, each prompt `context` tokens, (m,); see `_seconds`.

    bytes as in `tpot` (the cache is written instead of read), FLOPs those of `prefill_flops`.
    """
    return _seconds(design, workload, on, prefill_flops(design, workload), workload.batch * workload.context)


def prefill_flops(design: Design, workload: Workload) -> Array:
    """FLOPs of one prefill of the batch, each prompt `context` tokens, (m,):

    batch * (context * forward_flops_per_token + head), the head for the last token of each prompt alone.
    """
    body = np.asarray(design.forward_flops_per_token(workload.context, head=False), float)
    head = np.asarray(design.forward_flops_per_token(workload.context, head=True), float) - body
    return np.asarray(workload.batch * (workload.context * body + head))


def weight_bytes(design: Design, workload: Workload) -> Array:
    """Bytes of all weights, embedding and head included, over all devices, (m,)."""
    return np.asarray(workload.weight_bytes * np.asarray(design.params, float))


def peak_memory(design: Design, workload: Workload, on: Hardware) -> Array:
    """Bytes that one device holds at the peak, a prefill of the whole batch at once, (m,):

    (weight_bytes + kv_bytes) / tensor_parallel + batch context (state + workspace d + scores n_heads context) number

    state: what the topology carries over depth for a token, `state_elements`; number: bytes of one such number, those
    of a weight and at least 2; workspace and scores: `Mixing` of the topology. State and workspace are counted whole on
    every device. A prefill in pieces holds less; the allocator's own overhead is not counted.
    """
    shared = (weight_bytes(design, workload) + kv_bytes(design, workload)) / workload.tensor_parallel
    own = on.mixing(design.label)
    a_token = np.asarray(design.state_elements(1), float) + own.workspace * np.asarray(design.d_model, float)
    a_token = a_token + own.scores * np.asarray(design.n_heads, float) * workload.context
    return np.asarray(shared + workload.batch * workload.context * a_token * max(2.0, workload.weight_bytes))


def _seconds(design: Design, workload: Workload, on: Hardware, flops: Array, tokens: int) -> Array:
    """One pass of `tokens` tokens over the model:

    max(bytes / bandwidth, FLOPs / peak) / tensor_parallel + n_sublayers (sublayer_s + element_s tokens d)
    + depth_reads source_s + constant_s: the roofline of Williams et al. 2009, plus the serial cost of depth, plus what
    the topology moves. Every device of several does the last three itself; what they exchange is not counted.
    """
    own = on.mixing(design.label)
    roof = np.maximum(bytes_moved(design, workload) / on.bandwidth_bytes_per_s, flops / on.peak_flops)
    roof = roof / workload.tensor_parallel
    sublayers = np.asarray(design.n_sublayers, float)
    elements = sublayers * tokens * np.asarray(design.d_model, float)
    sources = np.asarray(design.depth_reads, float)
    own_s = sublayers * own.sublayer_s + elements * own.element_s + sources * own.source_s
    return np.asarray(roof + own_s + on.constant_s)
