"""Loss against learning rate, for the cells where more than one was tried."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, in_order, legend, log_axis, panel, widened
from depthlaw.platform.store_cells import CELL
from depthlaw.scaling.units import format_quantity

TITLE = "Learning rates"


def learning_rates(m: Material) -> Drawing:
    caption = (
        "Validation loss (nats a token) against learning rate, one panel a topology and size, one line a cell: a "
        "shape, layers x width, and the tokens it was trained on. Each point is a finished trial; a line goes through "
        "the means over seeds, and is only there to guide the eye. A cross at the top is a rate that diverged, a bar "
        "one that was pruned: they bound the best rate but have no loss. "
    )
    several = m.cells[m.cells["n_lrs"] > 1]
    one = len(m.cells) - len(several)
    caption += f"{one} of {len(m.cells)} cells ran at one rate only and are not shown. "
    if "vertex_lr" in m.cells:
        caption += "A star is the vertex of the parabola through the rates around the best, where they bracket it. "
    caption += "A best rate at the end of those tried may lie beyond it, so its loss is an upper bound."
    if several.empty:
        return Drawing(TITLE, caption, lacks="no cell was run at more than one learning rate")
    xlim = widened(m.trials["lr"], 1.25)
    panels = []
    for (_, topology), of in several.groupby(["size", "topology"]):
        title = f"{topology}, N about {format_quantity(of['N_size'].iloc[0], 'count')}"
        figure, ax = panel(title, "learning rate", "loss, nats a token")
        of = of.sort_values(["tokens", "n_layers"])
        for k, cell in enumerate(of.itertuples()):
            words = f"{cell.n_layers} x {cell.d_model}, {format_quantity(cell.tokens, 'count')}"
            _line(ax, _trials_of(m.trials, cell), words, in_order(k, len(of)), getattr(cell, "vertex_lr", np.nan), cell)
        log_axis(ax.xaxis, *xlim)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.12 * (high - low))
        legend(figure, ax)
        panels.append(Panel("learning-rates", _alt(str(topology), of), figure))
    return Drawing(TITLE, caption, panels)


def _trials_of(trials: pd.DataFrame, cell) -> pd.DataFrame:
    own = np.ones(len(trials), dtype=bool)
    for name in CELL:
        own &= (trials[name] == getattr(cell, name)).to_numpy()
    return trials[own]


def _line(ax, trials: pd.DataFrame, words: str, style: dict, vertex: float, cell) -> None:
    done = trials[trials["status"] == "finished"]
    mean = done.groupby("lr")["val_loss"].mean()
    ax.plot(done["lr"], done["val_loss"], label=words, **{**style, "linestyle": "none"})
    ax.plot(mean.index, mean, color=style["color"], linestyle=style["linestyle"], linewidth=1.1)
    if np.isfinite(vertex):
        ax.plot(vertex, cell.vertex_loss, "*", color=style["color"], markersize=11, markeredgecolor="black")
    for status, marker in (("diverged", "x"), ("pruned", "|")):
        rates = trials.loc[trials["status"] == status, "lr"].unique()
        if len(rates):
            ax.plot(
                rates, np.full(len(rates), 0.96), marker, transform=ax.get_xaxis_transform(), color=style["color"],
                markersize=8, markeredgewidth=1.8, label=f"{words}: {status}",
            )  # fmt: skip


def _alt(topology: str, cells: pd.DataFrame) -> str:
    best = [
        f"{c.n_layers} x {c.d_model} on {format_quantity(c.tokens, 'count')} tokens best at {c.lr:g}"
        for c in cells.itertuples()
        if c.lr == c.lr
    ]
    words = (
        f"Loss against learning rate for {topology} at {format_quantity(cells['N_size'].iloc[0], 'count')} parameters"
    )
    return f"{words}: {'; '.join(best) or 'no trial finished'}."
