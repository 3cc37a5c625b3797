"""Rows of a sweep made ready for a fit: checked, in one order, with what was left out and why."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.scaling.columns import Columns, read_columns
from depthlaw.scaling.laws import Array, FitRefusedError, LawError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LeftOut:
    """A row that was not fitted: its position in the frame, its topology, and the reason in words."""

    row: int
    topology: str
    reason: str


@dataclass(frozen=True)
class Rows:
    """Rows fitted, in an order that does not depend on the frame's: sorted by topology, N, D, L, d and loss."""

    topology: Array  # str, (m,)
    N: Array
    D: Array
    L: Array
    d: Array
    loss: Array
    position: Array  # of each row in the frame
    left_out: tuple[LeftOut, ...]
    columns: Columns  # what was read, every row of the frame

    @property
    def topologies(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.topology.tolist()))

    def digest(self) -> str:
        """SHA-256 over the rows fitted, the same for any order of the frame."""
        lines = zip(*(v.tolist() for v in (self.topology, self.N, self.D, self.L, self.d, self.loss)), strict=True)
        return hashlib.sha256("\n".join(repr(line) for line in lines).encode()).hexdigest()

    def ranges(self, topology: str | None = None) -> dict[str, tuple[float, float]]:
        """Smallest and largest N, D, L, d, R = d / L and D/N among the rows (of one topology)."""
        of = np.ones(self.N.size, dtype=bool) if topology is None else self.topology == topology
        values = {"N": self.N, "D": self.D, "R": self.d / self.L, "L": self.L, "d": self.d, "D/N": self.D / self.N}
        return {name: (float(v[of].min()), float(v[of].max())) for name, v in values.items()}


def read_rows(frame: pd.DataFrame | Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Rows:
    """The rows that can be fitted; `columns` as in `read_columns`.

    A row with a missing topology or with a loss, N, D, L or d that is not a finite positive number is left out with
    its reason. Raises LawError if a column is missing or is not numeric or a depth or width is no whole number,
    FitRefusedError if no row remains.
    """
    read = read_columns(frame, columns)
    labels = read.values["topology"]
    numbers = {read.n_is if name == "N" else name: v for name, v in read.values.items() if name != "topology"}
    good = np.array([isinstance(label, str) and bool(label) for label in labels], dtype=bool)
    for v in numbers.values():
        good &= np.isfinite(v) & (v > 0.0)
    left_out = []
    for i in np.flatnonzero(~good).tolist():
        label = labels[i]
        reasons = [] if isinstance(label, str) and label else ["no topology"]
        for column, v in numbers.items():
            if not np.isfinite(v[i]):
                reasons.append(f"{column} is not finite ({v[i]})")
            elif v[i] <= 0.0:
                reasons.append(f"{column} is not positive ({v[i]:g})")
        left_out.append(LeftOut(i, label if isinstance(label, str) else "", "; ".join(reasons)))
    chosen = np.flatnonzero(good)
    if not chosen.size:
        first = f"; the first: {left_out[0].reason}" if left_out else ""
        raise FitRefusedError(f"no row of {len(labels)} can be fitted{first}: check that the sweep has finished trials")
    for column in ("n_layers", "d_model"):
        v = read.values[column][chosen]
        for i in chosen[v != np.floor(v)][:1].tolist():
            raise LawError(
                f"row {i} (the first is 0) has {column} {read.values[column][i]:g}; it must be a whole number: correct "
                "it, or leave the row out"
            )
    names = np.array([str(label) for label in labels[chosen]])
    N, D, L, d, loss = (read.values[c][chosen] for c in ("N", "tokens", "n_layers", "d_model", "val_loss"))
    order = np.lexsort((loss, d, L, D, N, names))
    return Rows(names[order], N[order], D[order], L[order], d[order], loss[order], chosen[order], tuple(left_out), read)
