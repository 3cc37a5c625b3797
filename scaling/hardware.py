"""Where a model will run, with what load, and how long one decode step then takes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
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
    cache element. Raises HardwareError for a value that is not positive."""

    context: int = 4096
    batch: int = 1
    weight_bytes: float = 2
    cache_bytes: float = 2

    def __post_init__(self) -> None:
        for name in ("context", "batch"):
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
class Hardware:
    """Coefficients of the latency model. bandwidth: bytes/s from memory; peak: FLOP/s; sublayer: fixed seconds for each
    attention or feed-forward branch, which follow one another; constant: fixed seconds a step. source says where the
    numbers come from and which are assumed. Raises HardwareError for rates not positive or times negative."""

    name: str
    bandwidth_bytes_per_s: float
    peak_flops: float
    sublayer_s: float
    constant_s: float
    source: str

    def __post_init__(self) -> None:
        for name, least in (
            ("bandwidth_bytes_per_s", 1.0),
            ("peak_flops", 1.0),
            ("sublayer_s", 0.0),
            ("constant_s", 0.0),
        ):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < least:
                raise HardwareError(
                    f"hardware {self.name!r}: {name} is {value!r}; it must be a number, at least {least:g}"
                )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def _data_sheet(name: str, what: str, bandwidth: float, peak: float) -> Hardware:
    # 5 us is the order of the launch and synchronisation cost of a branch's few kernels under CUDA graphs.
    source = (
        f"data sheet of the {what}: memory bandwidth and dense bf16 peak, neither reached in practice; "
        "the 5 us a sublayer and 20 us a step are assumed, not measured"
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
            "of three Pre-LN models of 3.3M backbone parameters (L64 d64 6.6 ms, L16 d128 2.0 ms, L4 d256 0.72 ms)",
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
    return Hardware(**data)


def kv_bytes(design: Design, workload: Workload) -> Array:
    """Bytes of the KV cache of the whole batch at full context, (m,)."""
    return np.asarray(workload.batch * workload.cache_bytes * np.asarray(design.kv_elements(workload.context), float))


def tpot(design: Design, workload: Workload, on: Hardware) -> Array:
    """Seconds of one decode step of the batch (time per output token), (m,):

    max(bytes / bandwidth, FLOPs / peak) + n_sublayers * sublayer_s + constant_s,
    bytes = decode_params * weight_bytes + KV cache of the batch, FLOPs = batch * decode_flops(context): the roofline of
    Williams et al. 2009 plus the serial cost of depth.
    """
    read = workload.weight_bytes * np.asarray(design.decode_params, float) + kv_bytes(design, workload)
    flops = workload.batch * np.asarray(design.decode_flops(workload.context), float)
    roof = np.maximum(read / on.bandwidth_bytes_per_s, flops / on.peak_flops)
    return np.asarray(roof + np.asarray(design.n_sublayers, float) * on.sublayer_s + on.constant_s)
