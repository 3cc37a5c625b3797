"""Fit a law to the rows of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.scaling import laws
from depthlaw.scaling.columns import NEEDED, UNITS
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.identify import causes, edges, path, profile, spread
from depthlaw.scaling.laws import Array, FitRefusedError, LawError, features
from depthlaw.scaling.outliers import noise_words, outliers
from depthlaw.scaling.pooling import Layout, Problem, layout
from depthlaw.scaling.rows import Rows, read_rows
from depthlaw.scaling.search import clip, latin_hypercube, search
from depthlaw.scaling.units import counted

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FitRefusedError", "FittedLaw", "LawError", "fit"]

AT_BEST = 1e-3  # relative: starts this close to the best objective count as having found it
TIE = 1e-9  # relative: objectives that are the same number
LARGEST_CONDITION = 1e18  # beyond double precision there is nothing to tell apart


def fit(
    frame: pd.DataFrame | Mapping[str, Any],
    law: str = "shape",
    pooling: str = "shared",
    delta: float | None = None,
    starts: int = 64,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
) -> FittedLaw:
    """Minimise the SUM of Huber(ln observed - ln predicted) over the parameters of a law.

    frame: one row a run, with columns topology, backbone_params (N, not embedding or head), tokens (D), n_layers,
    d_model and val_loss (nats per token); other columns are ignored. columns: other names of these, constants, and N
    counted otherwise, see `read_columns`. The result does not depend on the order of the rows. pooling: one of
    `POOLINGS`. delta: where Huber turns from squares to absolute values,
    in ln loss; by default max(1e-3, 1.345 * 1.4826 * MAD), with MAD the median absolute deviation from the median of
    the residuals of a pilot fit at delta = 1e-2 (1 % of the loss). starts, seed: a Latin hypercube over the ranges that
    the law declares.

    Soft trouble is a `status` on the result. Raises FitRefusedError where nothing can be fitted (no usable row, no more
    rows than unknowns), LawError for an unknown law or pooling or missing columns.
    """
    if delta is not None and not (np.isfinite(delta) and delta > 0.0):
        raise LawError(f"delta is {delta}; it must be a positive number of ln loss, such as 1e-3")
    if starts < 1:
        raise LawError(f"starts is {starts}; it must be at least 1, and 64 is usual")
    chosen, rows = laws.law(law), read_rows(frame, columns)
    chosen.accept(rows.N, rows.D)
    unknowns = layout(chosen, rows.topologies, pooling)
    m, K = rows.N.size, len(unknowns.names)
    if m <= K:
        raise FitRefusedError(
            f"{counted(m, 'usable row')} cannot fit the {counted(K, 'unknown')} of law {law!r} over "
            f"{counted(len(rows.topologies), 'topology', 'topologies')} "
            f"({counted(len(rows.left_out), 'row')} left out): run at least "
            f"{counted(K + 1 - m, 'more cell')} or choose a smaller law"
        )
    centre = laws.Centre(*(float(np.exp(np.log(v).mean())) for v in (rows.N, rows.D, rows.L, rows.d)))
    problem = make_problem(rows, chosen, unknowns, centre)
    low, high = problem.ranges("bounds")

    ends, delta = search(problem, latin_hypercube(problem, starts, seed), delta)
    best = float(ends.objective.min())
    if not np.isfinite(best):
        raise FitRefusedError(f"no start of law {law!r} gives a finite objective: check the units of N, D and val_loss")

    # Where the data leave a valley, of equally good ends take the one nearest to the middle of the start ranges; one
    # that still walks along the valley only if none has come to rest.
    tied = ends.objective <= best * (1.0 + TIE)
    tied &= ends.converged | ~np.any(ends.converged & tied)
    start_low, start_high = problem.ranges("start")
    away = np.linalg.norm((ends.theta - 0.5 * (start_low + start_high)) / (start_high - start_low), axis=1)
    winner = int(np.argmin(np.where(tied, away, np.inf)))
    theta = ends.theta[winner]
    r, J = problem.residual(theta[None])[0], problem.jacobian(theta[None])[0]
    scale2, variance = spread(r, delta, K)
    # Where delta is far below the scatter, what is clipped at delta does not tell how far the scatter goes.
    scatter = float(np.sqrt(spread(r, max(delta, clip(r)), K)[0]))
    # A direction that the data say nothing about is known only to within its start range.
    prior = np.diag((start_high - start_low) ** -2.0)
    covariance = np.linalg.inv(J.T @ J / variance + prior)

    edge = (theta <= low + 1e-9) | (theta >= high - 1e-9)
    at_bound = tuple(name for name, hit in zip(unknowns.names, edge, strict=True) if hit)
    unknown = causes(rows, unknowns)
    at_edge = [x for x in edges(rows, problem, theta, centre) if x[0] not in unknown]
    unknown |= profile(problem, theta, best, covariance, scale2, delta, {*unknown, *at_bound})
    unknown = {name: why for name, why in at_edge if name} | unknown
    converged = bool(ends.converged[winner])
    notes = [
        path(rows),
        "" if converged else f"the best of {starts} starts ran out of steps, so its parameters are not final",
        chosen.remark,
        *(why for name, why in at_edge if unknown.get(name) != why),
        *outliers(rows, r, J, covariance, scatter, variance),
        noise_words(rows, scatter, K),
    ]
    return FittedLaw(
        law=law,
        pooling=pooling,
        topologies=rows.topologies,
        names=unknowns.names,
        theta=tuple(theta.tolist()),
        covariance=tuple(tuple(row) for row in covariance.tolist()),
        **centre._asdict(),
        objective=float(ends.objective[winner]),
        delta=float(delta),
        # A flat valley is also slow to walk down, so what the data cannot tell comes before what the fit did not reach.
        status="unidentified" if unknown else "not_converged" if not converged else "bound" if at_bound else "ok",
        unidentified={name: unknown[name] for name in unknowns.names if name in unknown},
        at_bound=at_bound,
        notes=tuple(filter(None, notes)),
        starts=starts,
        share_at_best=float(np.mean(ends.objective <= best * (1.0 + AT_BEST) + 1e-30)),
        condition=_condition(J),
        log_rms=scatter,
        residuals=tuple((-r).tolist()),
        rows_used=tuple(rows.position.tolist()),
        left_out=rows.left_out,
        ranges={t: rows.ranges(t or None) for t in ("", *rows.topologies)},
        units={c: UNITS[c] for c in (rows.columns.n_is, *NEEDED[1:])},
        rows_hash=rows.digest(),
        n_is=rows.columns.n_is,
        counting=rows.columns.counting,
    )


def make_problem(rows: Rows, law: laws.Law, unknowns: Layout, centre: laws.Centre) -> Problem:
    """Residuals and Jacobian of a law on these rows."""
    x = features(rows.N, rows.D, rows.L, rows.d, centre)
    first = [int(np.searchsorted(rows.topology, t)) for t in rows.topologies]  # rows are sorted by topology
    of = tuple(slice(a, b) for a, b in zip(first, [*first[1:], rows.N.size], strict=True))
    return Problem(law, unknowns, tuple(x.take(i) for i in of), of, np.log(rows.loss))


def _condition(J: Array) -> float:
    """Condition number of the Jacobian (m, K) with its columns scaled to unit length."""
    size = np.linalg.norm(J, axis=0)
    if not np.all(size > 0.0):
        return LARGEST_CONDITION
    s = np.linalg.svd(J / size, compute_uv=False)
    return float(s[0] / max(s[-1], s[0] / LARGEST_CONDITION))
