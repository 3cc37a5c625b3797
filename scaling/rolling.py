"""Rolling origin: a law fitted on the sizes below each size, and how far off it is there.

The next size up is what a scaling law is for, so the error there, and not the fit's own scatter, says what to trust.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from depthlaw.scaling.fit import fit
from depthlaw.scaling.identify import NEXT_SIZE, spread
from depthlaw.scaling.laws import Array, FitRefusedError
from depthlaw.scaling.rows import Rows

WIDEST = float(np.log(3.0))  # no group of sizes spans more, however close its members
STARTS = 16
QUANTITIES = {"N": "backbone_params", "D": "tokens", "L": "n_layers", "d": "d_model"}


@dataclass(frozen=True)
class HeldOut:
    """One held-out size. N: geometric mean of its runs' sizes. rows: which of `Rows`, (r,). error: ln observed - ln
    predicted, (r,). sd: what the law expected of that error, (r,): parameters and scatter."""

    N: float
    rows: Array
    error: Array
    sd: Array


def groups(values: Array) -> Array:
    """(m,): the number of the group that each value is in: a gap of 1.3x starts another, and so does 3x the least."""
    number = np.zeros(values.size, dtype=np.int64)
    order = np.argsort(values, kind="stable")
    first = last = np.log(values[order[0]])
    current = 0
    for i in order[1:]:
        v = np.log(values[i])
        if v - last > NEXT_SIZE or v - first > WIDEST:
            current, first = current + 1, v
        number[i], last = current, v
    return number


def as_frame(rows: Rows, of: Array) -> dict[str, Any]:
    """Some of the rows as a frame that `fit` reads."""
    frame = {column: getattr(rows, symbol)[of] for symbol, column in QUANTITIES.items()}
    return {**frame, "topology": rows.topology[of], "val_loss": rows.loss[of]}


def rolling_origin(rows: Rows, law: str, pooling: str, delta: float | None = None) -> tuple[HeldOut, ...]:
    """Fits on the sizes below each size from the third on, and predicts that size.

    A size whose smaller ones span less than a factor 3 or cannot be fitted (no more rows than unknowns) is passed over,
    and so are topologies that no smaller size has. Empty for fewer than three sizes.
    """
    size = groups(rows.N)
    found = []
    for k in range(2, int(size.max()) + 1):
        below = np.flatnonzero(size < k)
        if np.ptp(np.log(rows.N[below])) < WIDEST:
            continue
        try:
            fitted = fit(as_frame(rows, below), law, pooling, delta, STARTS)
        except FitRefusedError:
            continue
        held = np.flatnonzero((size == k) & np.isin(rows.topology, fitted.topologies))
        if not held.size:
            continue
        error, sd = np.empty(held.size), np.empty(held.size)
        for t in fitted.topologies:
            mine = rows.topology[held] == t
            if mine.any():
                at = (t, *(getattr(rows, symbol)[held[mine]] for symbol in QUANTITIES))
                error[mine] = np.log(rows.loss[held[mine]]) - fitted.log_loss(*at)
                sd[mine] = np.hypot(fitted.log_sd(*at), fitted.log_rms)
        found.append(HeldOut(float(np.exp(np.log(rows.N[held]).mean())), held, error, sd))
    return tuple(found)


def inflation(held_out: tuple[HeldOut, ...]) -> float:
    """max(1, s), with s^2 the mean over the held-out sizes of the variance of error / sd about zero.

    A law of the right form gives about 1: its errors are what its parameters' covariance and its scatter make them.
    What s is beyond 1 is what the form of the law adds, one size step ahead. The variance is Huber's (`spread`), as
    that of the scatter in sd is: a few runs that are far off do not decide it, a bias of all of them does. 1 if no size
    could be held out.
    """
    squares = []
    for h in held_out:
        z = h.error / h.sd
        squares.append(spread(z, 1.345 * 1.4826 * float(np.median(np.abs(z))), 0)[0])
    return max(1.0, float(np.sqrt(np.mean(squares)))) if squares else 1.0
