"""Loss against size at equal training compute."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, in_order, legend, log_axis, panel, widened
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.units import format_quantity

TITLE = "Equal training compute"
LEVELS = 4
WITHIN = 1.25  # a cell belongs to a level if its FLOPs are this factor off at most
POINTS = 60


def iso_flop(m: Material) -> Drawing:
    caption = (
        "Loss (nats a token) against size N where every model of a line is trained with the same FLOPs: to the left "
        "small models that see many tokens, to the right large ones that see few. Points are cells whose FLOPs are "
        f"within a factor {WITHIN} of the line's, so they lie a little beside it, at the shapes that were trained. "
    )
    if m.law is not None:
        caption += (
            "Lines are the law at the best d/L of each N, or at the end of the trained d/L nearest to it, with D = C / "
            "FLOPs a token (of the cells trained here, by a straight line in ln N); the band is where it expects 95 % "
            "of new runs, with its form taken as true. Lines end where N or D leaves what was trained; a ring is the "
            "least of a line, where that is not at its end."
        )
    else:
        caption += "Without a law there are no lines, and two sizes at one shape each say little about a third."
    cells = m.cells[m.cells["train_flops"].gt(0) & m.cells["val_loss"].notna()]
    if cells.empty:
        return Drawing(
            TITLE, caption, lacks=m.no_law if m.table is not None else "no finished cell has its training FLOPs"
        )
    if len(m.sizes) == 1:
        lacks = f"every run is of one size, {m.span()}, so there are no two sizes to compare at one compute"
        return Drawing(TITLE, caption, lacks=lacks)
    if m.table is not None:
        caption += " A table does not have FLOPs: they are taken as 6 N D, which leaves attention out."
    levels = _levels(cells)
    counted = m.counted if m.law is None else m.law.n_is
    xlim = widened(cells[counted], 1.15)
    panels = []
    for topology, of in cells.groupby("topology"):
        figure, ax = panel(str(topology), f"N, {counted.replace('_', ' ')}", "loss, nats a token")
        for k, level in enumerate(levels):
            style, words = in_order(k, len(levels)), format_quantity(float(level), "FLOPs")
            curve = m.law is not None and topology in m.law.topologies
            ax.plot([], [], label=words, **(style if curve else {**style, "linestyle": "none"}))
            if m.law is not None and curve:
                _curve(ax, m.law, str(topology), of, float(level), style)
            near = of[np.abs(np.log(of["train_flops"] / level)) <= np.log(WITHIN)]
            if not near.empty:
                ax.plot(near[counted], near["val_loss"], **{**style, "linestyle": "none"})
        log_axis(ax.xaxis, *xlim, unit="count")
        legend(figure, ax)
        alt = f"Loss against size for {topology} at {len(levels)} equal amounts of training compute."
        panels.append(Panel("equal-compute", alt, figure))
    return Drawing(TITLE, caption, panels)


def _levels(cells: pd.DataFrame) -> np.ndarray:
    """FLOPs, rising: those of the cell beside which most sizes lie, then of what is left further away, and so on."""
    flops, size = np.log(cells["train_flops"].to_numpy(float)), cells["size"].to_numpy()
    left, found = np.ones(len(cells), dtype=bool), []
    while left.any() and len(found) < LEVELS:
        near = np.abs(flops[:, None] - flops[None, :]) <= np.log(WITHIN)
        count = [
            (len(set(size[n])), int(n.sum()), -f) if ok else (0, 0, -f)
            for n, ok, f in zip(near, left, flops, strict=True)
        ]
        i = max(range(len(count)), key=lambda k: count[k])
        found.append(float(np.exp(np.median(flops[near[i]]))))
        left &= np.abs(flops - flops[i]) > 2 * np.log(WITHIN)
    return np.sort(found)


def _curve(ax, law: FittedLaw, topology: str, cells: pd.DataFrame, level: float, style: dict) -> None:
    ranges = law.ranges[topology]
    N = np.geomspace(*ranges["N"], POINTS)
    counted, each = cells[law.n_is].to_numpy(float), (cells["train_flops"] / cells["tokens"]).to_numpy(float)
    line = np.polyfit(np.log(counted), np.log(each), 1 if len(set(counted)) > 1 else 0)
    D = level / np.exp(np.polyval(line, np.log(N)))
    within = (ranges["D"][0] <= D) & (ranges["D"][1] >= D)
    if within.sum() < 2:
        return
    N, D = N[within], D[within]
    best = law.best_ratio(topology, N)
    middle = np.sqrt(ranges["R"][0] * ranges["R"][1])
    R = np.clip(np.full(N.size, middle) if best is None else best, *ranges["R"])
    # N is proportional to L d^2 = R^2 L^3; the factor is that of the cells.
    factor = np.exp(np.mean(np.log(counted) - np.log(cells["n_layers"] * cells["d_model"] ** 2.0)))
    L = (N / factor / R**2) ** (1 / 3)
    loss, (low, high) = law.predict(topology, N, D, L, R * L), law.interval(topology, N, D, L, R * L)
    ax.plot(N, loss, color=style["color"], linestyle=style["linestyle"])
    ax.fill_between(N, low, high, color=style["color"], alpha=0.12, linewidth=0)
    i = int(loss.argmin())
    if 0 < i < N.size - 1:
        ax.plot(N[i], loss[i], "o", markersize=9, markerfacecolor="none", markeredgecolor=style["color"])
