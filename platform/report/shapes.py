"""Loss against shape: the cells at their best learning rate, and the law with its interval."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, at_size, in_order, legend, log_axis, panel, widened
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.rolling import groups
from depthlaw.scaling.units import counted, format_quantity

POINTS = 40  # of a curve
QUANTITIES = ("N", "tokens", "n_layers", "d_model")


def loss_by_shape(m: Material) -> Drawing:
    caption = (
        "Validation loss (nats a token) against d/L, the width divided by the number of layers: to the left deep and "
        "narrow, to the right wide and shallow. One panel a topology and size; within a size all have the same axis. "
    )
    if m.table is not None:
        caption += "Each point is a row of the table, one colour and marker for each amount of training D. "
    else:
        caption += (
            "Each point is a cell at the best learning rate that was run, one colour and marker for each amount of "
            "training D. A cross at the top is a shape where every learning rate diverged, a bar one where all that "
            "were left were pruned: they have no loss. "
        )
    if m.cells.empty:
        return Drawing(
            "Loss against shape", caption, lacks=m.no_law if m.table is not None else "no cell has an outcome yet"
        )
    if m.law is not None:
        caption += (
            "The line is the law at the N and D of the cells, interpolated between them, and is not drawn beyond them; "
            "the band is where it expects 95 % of new runs, with its form taken as true; where it leaves the panel it "
            "is cut."
        )
    else:
        caption += "There is no law, so the points are joined by nothing."
    cells = m.cells.assign(ratio=m.cells["d_model"] / m.cells["n_layers"])
    xlim = widened(cells["ratio"], 1.2)
    panels = []
    for size in m.sizes:
        of_size = cells[cells["size"] == size].reset_index(drop=True)
        of_size["group"] = groups(of_size["tokens"].to_numpy(float))
        ylim = _ylim(of_size["val_loss"])
        for topology, of in of_size.groupby("topology"):
            figure, ax = panel(at_size(str(topology), of["N_size"].iloc[0]), "d / L", "loss, nats a token")
            amounts = sorted(set(of_size["group"]))
            for k, group in enumerate(amounts):
                mine = of[of["group"] == group].sort_values("ratio")
                if mine.empty:
                    continue
                words = f"D {format_quantity(_middle(of_size.loc[of_size['group'] == group, 'tokens']), 'count')}"
                curve = m.law is not None and topology in m.law.topologies
                style = in_order(k, len(amounts)) | ({} if curve else {"linestyle": "none"})
                ax.plot([], [], label=words, **style)
                _series(ax, mine, words, style)
                if m.law is not None and curve:
                    _curve(ax, m.law, str(topology), mine, style)
            log_axis(ax.xaxis, *xlim)
            ax.set_ylim(*ylim)
            legend(figure, ax)
            panels.append(Panel("loss-by-shape", _alt(str(topology), of, m.parameters), figure))
    return Drawing("Loss against shape", caption, panels)


def _middle(values: pd.Series) -> float:
    return float(np.exp(np.log(values.astype(float)).mean()))


def _ylim(losses: pd.Series) -> tuple[float, float]:
    known = losses.dropna()
    if known.empty:
        return 0.0, 1.0
    room = max(float(np.ptp(known)), 0.02 * float(known.max()))
    return float(known.min()) - 0.12 * room, float(known.max()) + 0.2 * room


def _series(ax, cells: pd.DataFrame, words: str, style: dict) -> None:
    done, broken = cells[cells["val_loss"].notna()], cells[cells["val_loss"].isna()]
    if not done.empty:
        ax.plot(done["ratio"], done["val_loss"], **{**style, "linestyle": "none"})
    at_top = ax.get_xaxis_transform()
    for marker, of, why in (
        ("x", broken[broken["n_diverged"] > 0], "diverged"),
        ("|", broken[(broken["n_diverged"] == 0) & (broken["n_pruned"] > 0)], "pruned"),
    ):
        if not of.empty:
            ax.plot(
                of["ratio"], np.full(len(of), 0.96), marker, transform=at_top, color=style["color"], markersize=8,
                markeredgewidth=1.8, label=f"{words}: {why}",
            )  # fmt: skip


def _curve(ax, law: FittedLaw, topology: str, cells: pd.DataFrame, style: dict) -> None:
    """Between the smallest and the largest d/L, ln N, ln D, ln L and ln d run in straight lines from cell to cell."""
    cells = cells.assign(N=cells[law.n_is].astype(float)).drop_duplicates("ratio")
    if len(cells) < 2 or cells["N"].isna().any():
        return
    x = np.geomspace(cells["ratio"].min(), cells["ratio"].max(), POINTS)
    at = [np.exp(np.interp(np.log(x), np.log(cells["ratio"]), np.log(cells[q].astype(float)))) for q in QUANTITIES]
    low, high = law.interval(topology, *at)
    ax.plot(x, law.predict(topology, *at), color=style["color"], linestyle=style["linestyle"])
    ax.fill_between(x, low, high, color=style["color"], alpha=0.16, linewidth=0)


def _alt(topology: str, cells: pd.DataFrame, parameters: str) -> str:
    words = f"Loss against d/L for {topology} at {format_quantity(cells['N_size'].iloc[0], 'count')} {parameters}"
    done = cells[cells["val_loss"].notna()]
    if done.empty:
        return f"{words}: no cell finished."
    best = done.loc[done["val_loss"].idxmin()]
    return (
        f"{words}: {counted(len(done), 'finished cell')}, losses {done['val_loss'].min():.4f} to "
        f"{done['val_loss'].max():.4f}; the least at {counted(int(best['n_layers']), 'layer')} of width "
        f"{int(best['d_model'])}, d/L {best['ratio']:.3g}."
    )
