"""Predicted against observed loss, for sizes that the prediction had not seen."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, legend, log_axis, of_topology, panel, widened
from depthlaw.scaling.units import format_quantity

TITLE = "Predicted against held-out loss"


def held_out(m: Material) -> Drawing:
    caption = (
        "Rolling origin: the law is fitted on the sizes below each size, and predicts it. Each point is a cell of a "
        "size that its law had not seen. Left, observed against predicted loss (nats a token), on the diagonal where "
        "they agree; right, the error in percent of the loss against N. Bars are 95 % ranges as the law expected them, "
        "widened by the inflation that this error calls for. The next size up is tested, and nothing beyond it."
    )
    if m.held_out is None:
        return Drawing(TITLE, caption, lacks=f"there is no law to test: {m.no_law}")
    if len(m.sizes) == 1:
        lacks = f"every run is of one size, {m.span()}, so nothing here says how far off the law is at the next"
        return Drawing(TITLE, caption, lacks=lacks)
    if m.held_out.empty:
        lacks = "no size could be held out: that takes three, the smaller ones a factor 3 apart, and enough runs"
        return Drawing(TITLE, caption, lacks=lacks)
    frame = m.held_out
    panels = [_against(m, frame), _errors(m, frame)]
    return Drawing(TITLE, caption, panels, table=_table(frame))


def _against(m: Material, frame: pd.DataFrame) -> Panel:
    figure, ax = panel("Observed against predicted", "predicted loss, nats a token", "observed loss, nats a token")
    for topology, of in frame.groupby("topology"):
        style = {**of_topology(m.topologies, str(topology)), "linestyle": "none"}
        bars = [of["predicted"] - of["lower"], of["upper"] - of["predicted"]]
        ax.errorbar(of["predicted"], of["observed"], xerr=bars, elinewidth=0.8, ecolor="0.6", label=topology, **style)
    ends = widened(frame[["predicted", "observed"]], 1.02)
    ax.plot(ends, ends, color="black", linewidth=0.9, linestyle=":", label="equal")
    ax.set_xlim(*widened(frame[["predicted", "observed", "lower", "upper"]], 1.02))
    ax.set_ylim(*ends)
    legend(figure, ax)
    return Panel("held-out", f"Observed against predicted loss of {len(frame)} held-out cells.", figure)


def _errors(m: Material, frame: pd.DataFrame) -> Panel:
    figure, ax = panel("Error", "N of the held-out cell", "observed less predicted, %")
    for topology, of in frame.groupby("topology"):
        style = {**of_topology(m.topologies, str(topology)), "linestyle": "none"}
        error = 100 * (of["observed"] / of["predicted"] - 1)
        bars = [100 * (1 - of["lower"] / of["predicted"]), 100 * (of["upper"] / of["predicted"] - 1)]
        ax.errorbar(of["N"], error, yerr=bars, elinewidth=0.8, ecolor="0.6", label=topology, **style)
    ax.axhline(0.0, color="black", linewidth=0.9, linestyle=":")
    log_axis(ax.xaxis, *widened(frame["N"], 1.05), unit="count")
    legend(figure, ax)
    worst = 100 * float(np.abs(frame["observed"] / frame["predicted"] - 1).max())
    return Panel("held-out", f"Error of the held-out predictions against size, {worst:.2g} % at most.", figure)


def _table(frame: pd.DataFrame):
    rows = []
    for (size, topology), of in frame.groupby(["size", "topology"]):
        error = np.log(of["observed"] / of["predicted"])
        inside = (of["observed"] >= of["lower"]) & (of["observed"] <= of["upper"])
        sizes = [format_quantity(size, "count"), str(len(of))]
        errors = [f"{100 * error.abs().mean():.2g} %", f"{100 * error.mean():+.2g} %"]
        rows.append([topology, *sizes, *errors, f"{int(inside.sum())} of {len(of)}"])
    return ["topology", "N held out", "cells", "mean absolute error", "mean error", "within the 95 % range"], rows
