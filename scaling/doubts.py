"""What to doubt about a design that a law proposes, in plain words."""

from __future__ import annotations

import numpy as np

from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import law as find_law
from depthlaw.scaling.table import Table
from depthlaw.scaling.units import format_quantity

CHECKED = 8.0  # times the largest N: how far the coverage of intervals was simulated
FARTHER = {"N": "run larger sizes first, `depthlaw design` says which", "D": "train some runs on more tokens first"}
EDGE = 0.05  # this close to an end of the fitted range of ln R, as a fraction of it, counts as its edge


def doubts(law: FittedLaw, table: Table, i: int) -> list[str]:
    """Where design i lies outside the fit or at the edge of what was tried, and what the law cannot tell."""
    t = table.design[i]
    topology, own = table.labels[t], table.design == t
    fitted = law.ranges[topology]
    flags = []
    counted = "backbone parameters" if law.n_is == "backbone_params" else "all parameters"
    for name, what, value in (("N", f"N ({counted})", table.N[i]), ("D", "D (tokens)", table.D[i])):
        far = _outside(f"{what} {value:.3g}", float(value), *fitted[name], name)
        if value > CHECKED * fitted[name][1]:
            far[0] += f", and intervals were checked to {CHECKED:g}x: {FARTHER[name]}"
        flags += far
    ratio, (low, high) = float(table.d[i] / table.L[i]), fitted["R"]
    outside = _outside(f"R = d/L {ratio:.3g}", ratio, low, high, "R")
    flags += outside
    margin = EDGE * np.log(high / low)
    if not outside and min(np.log(ratio / low), np.log(high / ratio)) <= margin:
        flags.append(f"R = d/L {ratio:.3g} is at the edge of the fitted range {low:.3g} to {high:.3g}")
    for name, values in (("n_layers", table.L), ("d_model", table.d)):
        least, most = values[own].min(), values[own].max()
        if values[i] in (least, most) and least < most:
            side = "smallest" if values[i] == least else "largest"
            if values[i] == 1:
                flags.append(f"{name} 1 is the smallest there is: under these budgets the law sees no gain in more")
            else:
                flags.append(f"{name} {values[i]} is the {side} that was tried: a wider range may hold a better design")
    if law.best_ratio(topology, float(table.N[i])) is None:
        flags.append(f"law {law.law!r} does not see shape: all designs of one N and D are the same to it")
    vocabulary, loss = law.context.get("vocab_size"), float(np.exp(table.log_loss[i]))
    if vocabulary and loss > np.log(vocabulary):
        guessing = f"ln {vocabulary} = {np.log(vocabulary):.3g}, that of guessing"
        flags.append(f"loss {loss:.4g} is above {guessing}: this far from the runs the law says nothing")
    kind = find_law(law.law)
    if kind.one_size:
        flags.append(f"only {sought(law)} are considered, the one size that this law holds for")
    return flags + ([kind.remark] if kind.remark else []) + law.doubts_about(topology)


def sought(law: FittedLaw) -> str:
    """Which sizes a law of one size is asked about, in words."""
    least, most = law.ranges[""]["N"]
    return f"designs of {format_quantity(least, 'count')} to {format_quantity(most, 'count')} {law.n_is}"


def _outside(shown: str, value: float, low: float, high: float, name: str) -> list[str]:
    if value > high:
        return [f"{shown} is {value / high:.3g}x above the largest {name} fitted ({high:.3g})"]
    if value < low:
        return [f"{shown} is {low / value:.3g}x below the smallest {name} fitted ({low:.3g})"]
    return []
