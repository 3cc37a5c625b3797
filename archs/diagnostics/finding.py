"""What a diagnostic returns, and what it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

# Inputs and targets, whole numbers (B, T) each. Several, so that the states of one at a time are in memory.
Batches = Sequence[tuple[Tensor, Tensor]]
# Told the fraction that is done.
Tick = Callable[[float], None]


def silent(done: float) -> None:
    pass


@dataclass(frozen=True)
class Finding:
    """Arrays over named axes (NaN where nothing is defined), and the figures that sum them up.

    `axes`: name -> coordinates; every array in `values` has their lengths as its shape. `curve`: of a score that is
    summed up by a threshold, the share above each of `THRESHOLDS`.
    """

    axes: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]
    summary: Mapping[str, float] = field(default_factory=dict)
    curve: np.ndarray | None = None


THRESHOLDS = np.round(np.arange(0, 1.0001, 0.025), 3)


def late(n_layers: int) -> int:
    """ceil(L / 4): the first block of the last three quarters, over which scores are summed up."""
    return math.ceil(n_layers / 4)


def mean(values: np.ndarray) -> float:
    """Of those that are defined; NaN without any."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def median(values: np.ndarray) -> float:
    """Of those that are defined; NaN without any."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else float("nan")


def share_above(scores: np.ndarray, thresholds: np.ndarray = THRESHOLDS) -> np.ndarray:
    """Fraction of the scores that are defined above each threshold; NaN without any."""
    known = scores[~np.isnan(scores)]
    return np.array([(known > t).mean() if len(known) else np.nan for t in thresholds])
