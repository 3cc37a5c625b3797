"""The best depth and width as a budget changes."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, legend, log_axis, of_topology, panel, widened
from depthlaw.scaling.units import KINDS, format_quantity

TITLE = "The optimum as a budget changes"
AXES = {"n_layers": ("L", "layers"), "d_model": ("d", "width d_model")}


def optimum_by_budget(m: Material) -> Drawing:
    caption = (
        "The depth L and the width d of least predicted loss against the limit of one budget, the others of the "
        "question held; one line a topology. Limits run over what the runs shown here use, and to the limit asked "
        "for, dotted, where that is more: a line beyond the runs is an extrapolation. "
    )
    if m.swept is None:
        return Drawing(TITLE, caption, lacks=m.no_sweep or f"there is no law: {m.no_law}")
    first = _first(m)
    if m.swept["L_low"].notna().any():
        caption += (
            f"The band is {first}'s: 95 % of the optima under the bootstrap draws of the law, whose form is taken as "
            "true. "
        )
    caption += "Shapes come in steps, so the lines do too; where two depths are as good, a line jumps between them."
    if m.no_sweep:
        caption += f" {m.no_sweep}."
    panels = []
    for budget, of in m.swept.groupby("budget", sort=False):
        for quantity, (short, words) in AXES.items():
            panels.append(_panel(m, str(budget), of, quantity, short, words, first))
    return Drawing(TITLE, caption, panels)


def _first(m: Material) -> str:
    """The topology that the band is drawn for: the answer's, or that of least loss anywhere."""
    assert m.swept is not None
    return m.answer.best.topology if m.answer else str(m.swept.loc[m.swept["loss"].idxmin(), "topology"])


def _panel(m: Material, budget: str, of: pd.DataFrame, quantity: str, short: str, words: str, first: str) -> Panel:
    unit = str(of["unit"].iloc[0])
    figure, ax = panel(f"Best {short} against {budget}", f"limit of {budget}", words)
    drawn: list[pd.Series] = []
    lines = list(of.groupby("topology"))
    for k, (topology, one) in enumerate(lines):
        style = of_topology(m.topologies, str(topology))
        # Many optima are the same: each line is thinner than those below it, so that all are seen.
        thin = k / max(1, len(lines) - 1)
        ax.plot(
            one["limit"],
            one[quantity],
            label=topology,
            linewidth=3.2 - 2.2 * thin,
            markersize=8.5 - 5.5 * thin,
            **style,
        )
        drawn.append(one[quantity])
        if topology == first:
            drawn += [one[f"{short}_low"], one[f"{short}_high"]]
            low, high = one[f"{short}_low"], one[f"{short}_high"]
            ax.fill_between(one["limit"], low, high, color=style["color"], alpha=0.16, linewidth=0)
    asked = float(of["asked"].iloc[0])
    if np.isfinite(asked):
        ax.axvline(asked, color="black", linewidth=1.0, linestyle=":", label="asked")
    log_axis(ax.xaxis, *widened(of["limit"], 1.1), unit=unit if unit in KINDS else "")
    log_axis(ax.yaxis, *widened(pd.concat(drawn), 1.15), whole=True)
    legend(figure, ax)
    best = of[of["topology"] == first].sort_values("limit")
    alt = f"Best {words} against the limit of {budget}."
    if not best.empty:
        low, high = best.iloc[0], best.iloc[-1]
        alt += (
            f" For {first} from {low[quantity]:g} at {format_quantity(low['limit'], unit)} to {high[quantity]:g} at "
            f"{format_quantity(high['limit'], unit)}."
        )
    return Panel("optimum-by-budget", alt, figure)
