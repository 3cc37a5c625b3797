"""How sure a fitted law is: bootstrap, profiles and the error on held-out sizes, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def assess(
    fitted: FittedLaw,
    frame: pd.DataFrame | Mapping[str, Any],
    draws: int = 1000,
    columns: Mapping[str, str] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> FittedLaw:
    """The law with bootstrap draws, 95 % profile intervals, errors on held-out sizes and the inflation they call for.

    frame, columns: those that were fitted, with a column `run` where several rows come from one training run. Raises
    LawError for another frame.
    """
    rows = read_rows(frame, columns)
    run = clusters(rows)
    drawn = bootstrap(fitted, rows, run, draws, progress=progress)
    progress("held-out sizes")
    held_out = rolling_origin(rows, fitted.law, fitted.pooling)
    progress("profiles")
    return replace(
        drawn,
        profiles=intervals(problem_of(fitted, rows), fitted, run),
        held_out=tuple(
            {
                "N": h.N,
                "rows": float(h.error.size),
                "error": float(np.mean(np.abs(h.error))),
                "expected": float(np.sqrt(2.0 / np.pi) * np.mean(h.sd)),
            }
            for h in held_out
        ),
        inflation=inflation(held_out),
    )
