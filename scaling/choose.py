"""Choice of the law and of what topologies share: by error on held-out sizes first, ranks second, AICc last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.scaling.fit import fit
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import LAWS, Array, FitRefusedError
from depthlaw.scaling.lm import huber
from depthlaw.scaling.pooling import POOLINGS
from depthlaw.scaling.rolling import HeldOut, groups, rolling_origin
from depthlaw.scaling.rows import Rows, read_rows

if TYPE_CHECKING:
    import pandas as pd

AUTO = "auto"
# Fitted and shown, never chosen: the best shape of this law is always at a bound of what was asked.
ONLY_COMPARED = {"morph"}


def choose(frame: pd.DataFrame | Mapping[str, Any], law: str = AUTO, pooling: str = AUTO, **options: Any) -> FittedLaw:
    """The fit of the law and pooling that predict held-out sizes best, with the table of candidates in `choice`.

    Each candidate is fitted on the sizes below each size from the third on and predicts that size. First, those whose
    mean absolute error in ln loss is above the least by more than one standard error of the paired difference go (the
    one-standard-error rule, Breiman et al. 1984; the clusters are the held-out sizes, for all errors at one size share
    the errors of its parameters; so with one size none goes). Second, those go whose rank
    correlation, among the runs of one held-out size and amount of training, is below the highest by the same rule.
    Last, the least AICc = m ln(2 H / m) + 2 k + 2 k (k + 1) / (m - k - 1) decides, with H the Huber sum of the fit to
    all rows at one delta and k the unknowns and the scale. Where no size can be held out, AICc decides alone, and `why`
    says so.

    law, pooling: a name to keep to, or `auto`. options go to `fit`. Raises FitRefusedError if no candidate can be
    fitted.
    """
    rows = read_rows(frame, options.get("columns"))
    poolings = list(POOLINGS) if pooling == AUTO else [pooling]
    if len(rows.topologies) == 1 and pooling == AUTO:
        poolings = poolings[:1]  # nothing to share: all are one
    fits: list[FittedLaw] = []
    refused = []
    for name in LAWS if law == AUTO else [law]:
        for share in poolings:
            try:
                fitted = fit(frame, name, share, **options)
            except FitRefusedError as error:
                refused.append({"law": name, "pooling": share, "refused": str(error)})
                continue
            # Two poolings are one where a law has nothing for them to differ in.
            if all((f.law, f.names) != (name, fitted.names) for f in fits):
                fits.append(fitted)
    allowed = [i for i, f in enumerate(fits) if f.law not in ONLY_COMPARED or law != AUTO]
    if not allowed:
        raise FitRefusedError(f"no law can be fitted; {refused[0]['law']}: {refused[0]['refused']}")
    delta = min(f.delta for f in fits)
    held = [rolling_origin(rows, f.law, f.pooling, options.get("delta")) for f in fits]
    aicc = [_aicc(f, delta) for f in fits]
    errors = [_errors(rows, h) for h in held]
    ranks = [_ranks(rows, h) for h in held]
    chosen, why = _decide(rows, allowed, errors, ranks, aicc)
    table = [
        {
            "law": f.law,
            "pooling": f.pooling,
            "unknowns": len(f.names),
            "status": f.status,
            "held_out": None if np.isnan(s).all() else float(np.nanmean(s)),
            "rank": None if np.isnan(r).all() else float(np.nanmean(r)),
            "aicc": a,
        }
        for f, s, r, a in zip(fits, errors, ranks, aicc, strict=True)
    ]
    return replace(fits[chosen], choice={"candidates": table + refused, "why": why})


def _decide(
    rows: Rows, allowed: list[int], errors: list[Array], ranks: list[Array], aicc: list[float]
) -> tuple[int, str]:
    """Number of the candidate chosen, and why in words."""
    near = _as_good([i for i in allowed if not np.isnan(errors[i]).all()], errors, groups(rows.N))
    if not near:
        return min(allowed, key=lambda i: aicc[i]), "least AICc: no size could be held out"
    if len(near) == 1:
        return near[0], "least error on held-out sizes, all others more than a standard error worse"
    first = f"{len(near)} candidates predict held-out sizes within a standard error of the best"
    if np.unique(groups(rows.N)[~np.isnan(errors[near[0]])]).size == 1:
        first = f"one held-out size, so no standard error to tell {len(near)} candidates apart by"
    # Correlations count the other way.
    ranked = _as_good(near, [-r for r in ranks], np.arange(ranks[0].size)) or near
    if len(ranked) == 1:
        return ranked[0], f"{first}; this one ranks the runs within a size best"
    second = first if len(ranked) == len(near) else f"{first}, {len(ranked)} of them rank the runs within a size so too"
    return min(ranked, key=lambda i: aicc[i]), f"{second}; this one has the least AICc"


def _as_good(among: list[int], losses: list[Array], cluster: Array) -> list[int]:
    """Those of the candidates whose mean loss is not by more than a standard error above the least, compared where
    none of them is nan; empty if that is nowhere."""
    common = np.all([~np.isnan(losses[i]) for i in among], axis=0) if among else np.zeros(0, dtype=bool)
    if not common.any():
        return []
    best = min(among, key=lambda i: float(losses[i][common].mean()))
    return [i for i in among if not _worse(losses[i][common] - losses[best][common], cluster[common])]


def _worse(difference: Array, cluster: Array) -> bool:
    """Whether the mean of paired differences (r,) is more than one clustered standard error above zero; never with one
    cluster."""
    _, number = np.unique(cluster, return_inverse=True)
    sums = np.bincount(number, difference - difference.mean())
    G = sums.size
    return G > 1 and bool(difference.mean() > np.sqrt(G / (G - 1) * np.sum(sums**2)) / difference.size)


def _errors(rows: Rows, held: tuple[HeldOut, ...]) -> Array:
    """(m,): absolute error in ln loss where a row was held out, else nan."""
    out = np.full(rows.N.size, np.nan)
    for h in held:
        out[h.rows] = np.abs(h.error)
    return out


def _ranks(rows: Rows, held: tuple[HeldOut, ...]) -> Array:
    """Spearman correlation of observed and predicted loss in each group of rows of one size and, within it, one amount
    of training; nan where a group has fewer than three rows or was not held out whole."""
    predicted = np.full(rows.N.size, np.nan)
    for h in held:
        predicted[h.rows] = np.log(rows.loss[h.rows]) - h.error
    found = []
    size = groups(rows.N)
    for k in range(int(size.max()) + 1):
        of = np.flatnonzero(size == k)
        tokens = groups(rows.D[of])
        for j in range(int(tokens.max()) + 1):
            some = of[tokens == j]
            good = some.size >= 3 and not np.isnan(predicted[some]).any()
            found.append(spearman(np.log(rows.loss[some]), predicted[some]) if good else np.nan)
    return np.array(found)


def spearman(a: Array, b: Array) -> float:
    """Rank correlation with mean ranks for ties; 0 where one of the two is constant."""
    ranks = []
    for v in (a, b):
        _, number, count = np.unique(v, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - 0.5 * (count - 1))[number])
    sd = np.std(ranks[0]) * np.std(ranks[1])
    return float(np.mean((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())) / sd) if sd > 0 else 0.0


def _aicc(fitted: FittedLaw, delta: float) -> float:
    m, k = len(fitted.residuals), len(fitted.names) + 1
    if m <= k + 1:
        return float("inf")
    total = max(float(huber(np.array(fitted.residuals), delta).sum()), 1e-300)
    return float(m * np.log(2.0 * total / m) + 2 * k + 2 * k * (k + 1) / (m - k - 1))
