"""How sure a fitted law is: bootstrap, profiles and the error on held-out sizes, in one call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.scaling.bootstrap import bootstrap, clusters, problem_of
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.profiles import intervals
from depthlaw.scaling.rolling import inflation, rolling_origin
from depthlaw.scaling.rows import read_rows

if TYPE_CHECKING:
    import pandas as pd


def assess(fitted: FittedLaw, frame: pd.DataFrame | Mapping[str, Any], draws: int = 1000, seed: int = 0) -> FittedLaw:
    """The law with bootstrap draws, 95 % profile intervals, errors on held-out sizes and the inflation they call for.

    frame: the one that was fitted, with a column `run` where several rows come from one training run. Raises LawError
    for another frame.
    """
    rows = read_rows(frame)
    held_out = rolling_origin(rows, fitted.law, fitted.pooling)
    return replace(
        bootstrap(fitted, frame, draws, seed),
        profiles=intervals(problem_of(fitted, rows), fitted, clusters(frame, rows)),
        held_out=tuple(
            {
                "N": h.N,
                "rows": float(h.error.size),
                "rms_error": float(np.sqrt(np.mean(h.error**2))),
                "expected": float(np.sqrt(np.mean(h.sd**2))),
            }
            for h in held_out
        ),
        inflation=inflation(held_out),
    )
