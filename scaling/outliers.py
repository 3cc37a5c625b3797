"""Single runs of a fit that stand out, and runs of one cell that were repeated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from depthlaw.scaling.laws import Array
from depthlaw.scaling.rows import Rows

FAR = 5.0  # standardised residuals; a normal one is beyond it once in two million runs
NAMED = 5  # outliers that are named one by one
LEAST_FREEDOM = 0.05  # of a row whose residual the fit leaves almost no freedom


def outliers(rows: Rows, r: Array, J: Array, covariance: Array, scale: float, variance: float) -> Iterator[str]:
    """Names each row whose standardised residual is beyond FAR, the furthest first.

    Standardised: |ln observed - ln predicted| / (scale sqrt(1 - h)), with h_i = J_i C J_i' / variance the row's
    leverage: a residual is the smaller the more the fit follows its row. r (m,) is ln predicted - ln observed,
    J (m, K), covariance C (K, K); scale the robust scatter, which the outliers themselves hardly move.
    """
    leverage = np.einsum("mk,kl,ml->m", J, covariance, J) / variance
    far = np.abs(r) / (scale * np.sqrt(np.maximum(1.0 - leverage, LEAST_FREEDOM)))
    worst = [int(i) for i in np.argsort(-far, kind="stable") if far[i] > FAR]
    for i in worst[:NAMED]:
        yield (
            f"outlier: {rows.topology[i]} {rows.L[i]:g} x {rows.d[i]:g}, N {rows.N[i]:.3g}, D {rows.D[i]:.3g} (row "
            f"{rows.position[i]}) has loss {rows.loss[i]:.4g} where the law says {rows.loss[i] * np.exp(r[i]):.4g}, "
            f"{far[i]:.2g} times the scatter: look at this run, and leave it out or repeat it"
        )
    if len(worst) > NAMED:
        yield (
            f"and {len(worst) - NAMED} more outliers, beyond {FAR:g} times the scatter: where they are alike, "
            "it is the law that is off"
        )


def noise(rows: Rows) -> tuple[float, int]:
    """(standard deviation of ln loss between runs of one cell, its degrees of freedom), pooled over the cells that have
    several: same topology, N, D, L and d, as with another seed. (nan, 0) if no cell has."""
    cells: dict[tuple[object, ...], list[float]] = {}
    for *cell, loss in zip(rows.topology.tolist(), rows.N, rows.D, rows.L, rows.d, np.log(rows.loss), strict=True):
        cells.setdefault(tuple(cell), []).append(float(loss))
    freedom = sum(len(v) - 1 for v in cells.values())
    squares = sum(float(np.var(v)) * len(v) for v in cells.values())
    return (float(np.sqrt(squares / freedom)), freedom) if freedom and squares else (float("nan"), 0)


def noise_words(rows: Rows, scale: float, unknowns: int) -> str:
    """What repeated runs say of the noise, and whether the scatter about the law (`scale`) is more than that.

    Judged by F = scale^2 / noise^2 against 1 + 2 sqrt(2/f + 2/g), two standard deviations of such a ratio for large
    degrees of freedom f = m - K and g.
    """
    sd, g = noise(rows)
    if not g:
        return ""
    f = max(rows.N.size - unknowns, 1)
    words = f"runs of one cell differ by {100 * sd:.2g} % of the loss ({g} repeated): the noise between seeds"
    if (scale / sd) ** 2 > 1.0 + 2.0 * np.sqrt(2.0 / f + 2.0 / g):
        words += f", less than the {100 * scale:.2g} % about the law: the law does not describe all there is"
    return words
