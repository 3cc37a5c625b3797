"""From measurements of real models to the coefficients of the latency and memory models, and how far off they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from depthlaw.scaling.design import Design
from depthlaw.scaling.hardware import (
    OF_SHAPE,
    OF_WORKLOAD,
    Hardware,
    Mixing,
    Workload,
    bytes_moved,
    peak_memory,
    tpot,
    ttft,
)
from depthlaw.scaling.laws import Array
from depthlaw.scaling.units import counted

TIMES = {"tpot": tpot, "ttft": ttft}
MODELS = TIMES | {"peak_memory": peak_memory}
# Which side of the roofline a pass is on depends on the rates: they and the sides are found in turns.
TURNS = 10


class CalibrationError(ValueError):
    """Measurements that do not determine the model: one line with what is there and what is needed."""


@dataclass(frozen=True)
class Measurement:
    """One figure of a real model. design: one topology at one shape. what: `tpot`, seconds of a decode step that makes
    token number `workload.context`; `ttft`, those of a prefill of that many tokens; `peak_memory`, bytes held at the
    peak of that prefill, weights and cache included."""

    design: Design
    workload: Workload
    what: str
    value: float

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.design.n_layers), int(self.design.d_model)

    @property
    def words(self) -> str:
        L, d = self.shape
        return f"{self.design.label}, {counted(L, 'layer')} of width {d}, context {self.workload.context}"

    def predicted(self, on: Hardware) -> float:
        return float(MODELS[self.what](self.design, self.workload, on))


@dataclass(frozen=True)
class Errors:
    """Relative errors |predicted / measured - 1| of n measurements; worst_at says which one is the worst."""

    n: int
    median: float
    worst: float
    worst_at: str


@dataclass(frozen=True)
class Calibration:
    """The hardware, and by `tpot`, `ttft` and `peak_memory` its errors on what was fitted and on shapes held out."""

    hardware: Hardware
    fitted: dict[str, Errors]
    held_out: dict[str, Errors]
    held_out_shapes: tuple[tuple[int, int], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def held_out(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every third (n_layers, d_model) along the diagonals of the grid, the smallest shape never: a fixed choice that
    takes some of each depth and each width, and leaves others of them to fit."""
    depths, widths = (sorted({s[k] for s in shapes}) for k in (0, 1))
    return [s for s in sorted(set(shapes)) if (depths.index(s[0]) + widths.index(s[1])) % 3 == 1]


def calibrate(
    measured: Sequence[Measurement], name: str, source: str, *, fastest: tuple[float, float] = (np.inf, np.inf)
) -> Calibration:
    """Fits the model of `tpot` and `ttft` to both kinds of timings at once, and that of `peak_memory`, all of
    (n_layers, d_model) held out left aside, by non-negative least squares on the relative error:
    min sum_i (sum_k c_k x_ik / t_i - 1)^2.

    fastest: bytes/s and FLOP/s that the machine reaches at best; no rate is fitted above them, so that also where
    every model measured is small, more weights cost more time. The errors are those of the hardware returned. Raises
    CalibrationError if there are too few shapes or a rate is not determined.
    """
    shapes = sorted({t.shape for t in measured})
    aside = held_out(shapes)
    if any(len({s[k] for s in shapes}) < 2 for k in (0, 1)) or len(shapes) - len(aside) < 2:
        raise CalibrationError(
            f"measurements of {len(shapes)} shapes (n_layers, d_model) do not determine the model: take at least two "
            "depths, each at the same two widths or more"
        )
    for t in measured:
        if t.what not in MODELS or not 0.0 < t.value < np.inf:
            raise CalibrationError(f"{t.words}: {t.what} of {t.value!r}; it must be a positive number")
    used = [t for t in measured if t.shape not in aside]
    labels = list(dict.fromkeys(t.design.label for t in measured))
    coefficients = _fit([t for t in used if t.what in TIMES], labels, fastest)
    on = _hardware(coefficients, labels, name, source, measured)
    memory = {
        label: _memory([t for t in used if t.what == "peak_memory" and t.design.label == label]) for label in labels
    }
    on = replace(on, topologies={label: replace(m, **memory[label]) for label, m in on.topologies.items()})
    groups = {whose: [t for t in measured if (t.shape in aside) == (whose == "held")] for whose in ("fit", "held")}
    errors = {
        whose: {what: _errors([t for t in group if t.what == what], on) for what in MODELS}
        for whose, group in groups.items()
    }
    return Calibration(on, errors["fit"], errors["held"], tuple(aside))


def _fit(timings: Sequence[Measurement], labels: Sequence[str], fastest: tuple[float, float]) -> Array:
    """[1 / bandwidth, 1 / peak, constant, then sublayer_s, element_s, source_s of each label]."""
    from scipy.optimize import nnls

    seconds = np.array([t.value for t in timings])
    rows = np.array([_terms(t, labels) for t in timings]) / seconds[:, None]  # (n, K), parts of the time for c = 1
    floor = np.zeros(rows.shape[1])
    floor[:2] = 1.0 / np.array(fastest)
    # First guess: a decode step waits for memory, a prefill for arithmetic.
    by_bytes = np.array([t.what == "tpot" for t in timings])
    for _ in range(TURNS):
        x = rows.copy()
        x[~by_bytes, 0] = 0.0
        x[by_bytes, 1] = 0.0
        scale = x.max(axis=0)
        scale[scale == 0.0] = 1.0
        solved, _ = nnls(x / scale, np.maximum(1.0 - x @ floor, 0.0))
        c = floor + solved / scale
        before, by_bytes = by_bytes, rows[:, 0] * c[0] >= rows[:, 1] * c[1]
        if np.array_equal(before, by_bytes):
            break
    for rate, what in zip(c[:2], ("bytes", "FLOPs"), strict=True):
        if rate <= 0.0:
            raise CalibrationError(f"the times measured do not grow with {what}: measure wider models")
    return np.asarray(c)


def _memory(measured: Sequence[Measurement]) -> dict[str, float]:
    """workspace and scores of one topology; nothing where its memory was not measured."""
    from scipy.optimize import nnls

    if not measured:
        return {}
    value = np.array([t.value for t in measured])

    def at(**held: float) -> Array:
        one = Mixing(0.0, **{"workspace": 0.0, "scores": 0.0} | held)
        return np.array([t.predicted(Hardware("", 1.0, 1.0, 0.0, 0.0, "", {t.design.label: one})) for t in measured])

    rest = at()
    terms = np.stack([at(workspace=1.0) - rest, at(scores=1.0) - rest], -1) / value[:, None]
    (workspace, scores), _ = nnls(terms, 1.0 - rest / value)
    return {"workspace": float(workspace), "scores": float(scores)}


def _terms(t: Measurement, labels: Sequence[str]) -> list[float]:
    """What each coefficient multiplies: the latency model itself, at a hardware where that coefficient alone is 1.

    Both sides of the roofline are given; which of them counts is the fit's to find.
    """
    nothing = Hardware("", 1e300, 1e300, 0.0, 0.0, "")
    flops = Hardware("", 1e300, 1.0, 0.0, 0.0, "")
    model = MODELS[t.what]

    def at(mixing: Mixing) -> float:
        on = Hardware("", 1e300, 1e300, 0.0, 0.0, "", {t.design.label: mixing})
        return float(model(t.design, t.workload, on))

    rest = float(model(t.design, t.workload, nothing))
    own = [at(Mixing(1.0)) - rest, at(Mixing(0.0, 1.0)) - rest, at(Mixing(0.0, 0.0, 1.0)) - rest]
    by_label = [part if label == t.design.label else 0.0 for label in labels for part in own]
    return [float(bytes_moved(t.design, t.workload)), float(model(t.design, t.workload, flops)), 1.0, *by_label]


def _hardware(c: Array, labels: Sequence[str], name: str, source: str, timings: Sequence[Measurement]) -> Hardware:
    topologies = {label: Mixing(*(float(v) for v in c[3 + 3 * k : 6 + 3 * k])) for k, label in enumerate(labels)}
    plain = topologies.get("pre_ln")
    # A topology that was not measured costs as the plain one, or as the middle one of those measured.
    default = plain.sublayer_s if plain else float(np.median([m.sublayer_s for m in topologies.values()]))
    measured = {}
    for what in OF_SHAPE + OF_WORKLOAD:
        values = [float(getattr(t.design if what in OF_SHAPE else t.workload, what)) for t in timings]
        measured[what] = (min(values), max(values))
    return Hardware(name, float(1 / c[0]), float(1 / c[1]), default, float(c[2]), source, topologies, measured)


def _errors(timings: Sequence[Measurement], on: Hardware) -> Errors:
    if not timings:
        return Errors(0, float("nan"), float("nan"), "")
    off = np.array([abs(t.predicted(on) / t.value - 1.0) for t in timings])
    worst = int(off.argmax())
    return Errors(len(timings), float(np.median(off)), float(off[worst]), timings[worst].words)
