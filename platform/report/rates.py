"""Loss against learning rate, for the cells where more than one was tried."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, at_size, in_order, legend, log_axis, panel, widened
from depthlaw.platform.store_cells import CELL
from depthlaw.scaling.units import format_quantity

TITLE = "Learning rates"
BROKEN = {"diverged": "x", "pruned": "|"}
APART = 0.045  # of the height of a panel, between two marks of rates that broke


def learning_rates(m: Material) -> Drawing:
    caption = (
        "Validation loss (nats a token) against learning rate, one panel a topology and size, one line a cell: a "
        "shape, layers x width, and the tokens it was trained on. Each point is a finished trial; a line goes through "
        "the means over seeds, and is only there to guide the eye. A cross above is a rate that diverged, a bar one "
        "that was pruned, in the colour of its cell: they bound the best rate but have no loss. "
    )
    if m.table is not None:
        return Drawing(TITLE, caption, lacks="a table does not have the learning rates that were tried")
    several = m.cells[m.cells["n_lrs"] > 1]
    one = len(m.cells) - len(several)
    caption += f"{one} of {len(m.cells)} cells ran at one rate only and are not shown. "
    if "vertex_lr" in m.cells:
        caption += "A star is the vertex of the parabola through the rates around the best, where they bracket it. "
    caption += "A best rate at the end of those tried may lie beyond it, so its loss is an upper bound."
    if several.empty:
        return Drawing(TITLE, caption, lacks="no cell was run at more than one learning rate")
    xlim = widened(m.trials["lr"], 1.25)
    by_cell = m.trials.groupby(CELL)
    panels = []
    for (_, topology), of in several.groupby(["size", "topology"]):
        figure, ax = panel(at_size(str(topology), of["N_size"].iloc[0]), "learning rate", "loss, nats a token")
        of, broken = of.sort_values(["tokens", "n_layers"]), []
        for k, cell in enumerate(of.itertuples()):
            words = f"{cell.n_layers} x {cell.d_model}, {format_quantity(cell.tokens, 'count')}"
            style = in_order(k, len(of))
            ax.plot([], [], label=words, **style)
            trials = by_cell.get_group(tuple(getattr(cell, name) for name in CELL))
            _line(ax, trials, style)
            ended = zip(trials["lr"], trials["status"], strict=True)
            broken += [(lr, status, style["color"]) for lr, status in ended if status in BROKEN]
            vertex = getattr(cell, "vertex_lr", np.nan)
            if np.isfinite(vertex):
                ax.plot(vertex, cell.vertex_loss, "*", color=style["color"], markersize=11, markeredgecolor="black")
        log_axis(ax.xaxis, *xlim)
        _broken(ax, broken)
        legend(figure, ax)
        panels.append(Panel("learning-rates", _alt(str(topology), of), figure))
    return Drawing(TITLE, caption, panels)


def _line(ax, trials: pd.DataFrame, style: dict) -> None:
    done = trials[trials["status"] == "finished"]
    mean = done.groupby("lr")["val_loss"].mean()
    ax.plot(done["lr"], done["val_loss"], **{**style, "linestyle": "none"})
    ax.plot(mean.index, mean, color=style["color"], linestyle=style["linestyle"], linewidth=1.1)


def _broken(ax, broken: list[tuple[float, str, object]]) -> None:
    """Marks above the losses, those at one rate below each other, in the colours of their cells."""
    at_rate: dict[float, int] = {}
    marks = []
    for rate, status, color in broken:
        at_rate[rate] = at_rate.get(rate, 0) + 1
        marks.append((rate, 1.0 - APART * at_rate[rate], status, color))
    low, high = ax.get_ylim()
    room = APART * (max(at_rate.values(), default=0) + 1)
    ax.set_ylim(low, low + (high - low) / (1.0 - min(room, 0.6)))
    for rate, height, status, color in marks:
        ax.plot(
            rate, height, BROKEN[status], transform=ax.get_xaxis_transform(), color=color, markersize=6,
            markeredgewidth=1.6,
        )  # fmt: skip
    for status in dict.fromkeys(status for _, status, _ in broken):
        ax.plot([], [], BROKEN[status], color="black", markeredgewidth=1.6, label=status)


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
