"""How every panel of a report looks. Figure objects only, so nothing of matplotlib's global state is left behind."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from depthlaw.platform.palette import COLOURS, MARKERS, STYLES
from depthlaw.scaling.units import format_quantity

WIDTH, HEIGHT = 4.2, 2.9  # inches, without the legend; a page shows about 96 pixels an inch
LEFT, RIGHT, BOTTOM, TOP = 0.72, 0.24, 0.5, 0.34
LEGEND_LINE = 0.152
LONGEST = 40  # characters of a title or a label
APART = 0.13  # least distance of two ticks, as a share of the axis
RC = {
    "svg.fonttype": "path",  # looks the same on every machine
    "svg.hashsalt": "depthlaw",  # the same bytes every time
    "text.parse_math": False,  # a name with two dollars in it is a name
    "text.usetex": False,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
}


@dataclass(frozen=True)
class Panel:
    """One picture. name: that of its file. alt: what it shows, for who cannot see it."""

    name: str
    alt: str
    figure: Figure


@dataclass(frozen=True)
class Drawing:
    """One figure of the report. caption: what one sees, the units, what the band is, and its limit.

    lacks: why there are no panels, with what to do. table: (columns, rows) below the panels, if any.
    """

    title: str
    caption: str
    panels: list[Panel] = field(default_factory=list)
    lacks: str = ""
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None


@contextmanager
def styled() -> Iterator[None]:
    """The look of a report, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # such a character is a box; the page has it right
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def panel(title: str, x: str, y: str) -> tuple[Figure, Any]:
    """A figure with one pair of axes. Draw, then call `legend`, which gives the figure its height."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_title(shorten(title), loc="left", fontweight="bold", y=1.0)  # a fixed place spares a layout
    ax.set_xlabel(plain(x))
    ax.set_ylabel(textwrap.fill(plain(y), 36))
    legend(figure, ax, 1)
    return figure, ax


def legend(figure: Figure, ax: Any, columns: int = 2) -> None:
    """Below the axes, where it cannot cover data; each label once."""
    handles, labels = ax.get_legend_handles_labels()
    entries = {label: handle for handle, label in zip(handles, labels, strict=True)}
    if any(len(label) > 22 for label in entries):
        columns = 1
    lines = -(-len(entries) // columns)
    below = BOTTOM + (LEGEND_LINE * lines + 0.08 if lines else 0.0)
    height = HEIGHT - BOTTOM + below
    figure.set_size_inches(WIDTH, height)
    ax.set_position((LEFT / WIDTH, below / height, (WIDTH - LEFT - RIGHT) / WIDTH, (height - below - TOP) / height))
    if entries:
        names = [shorten(label) for label in entries]
        # At the left edge of the axes, in inches whatever the height.
        figure.legend(
            entries.values(), names, loc="lower left", bbox_to_anchor=(0.3 / WIDTH, 0.0), ncols=columns,
            borderaxespad=0.2, columnspacing=1.2, labelspacing=0.25, handletextpad=0.5,
        )  # fmt: skip


def shorten(text: str, longest: int = LONGEST) -> str:
    text = plain(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def at_size(topology: str, N: float) -> str:
    """The title of a panel of one topology and size."""
    return f"{shorten(topology, 24)}, N about {format_quantity(N, 'count')}"


def plain(text: str) -> str:
    """Without control characters, which neither XML nor HTML may hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def of_topology(topologies: Sequence[str], label: str) -> dict[str, Any]:
    """Colour, marker and line of a topology: by its place among all of the report, so the same in every figure."""
    k = list(topologies).index(label)
    return {
        "color": COLOURS[k % len(COLOURS)],
        "marker": MARKERS[k % len(MARKERS)],
        "linestyle": STYLES[k % len(STYLES)],
        "markeredgecolor": "black",
        "markeredgewidth": 0.4,
    }


def in_order(k: int, count: int) -> dict[str, Any]:
    """The same of the k-th of `count` ordered values (amounts of training, compute): dark to light, 3:1 at least."""
    shade = matplotlib.colormaps["viridis"](0.55 * (k / (count - 1) if count > 1 else 0.0))
    return {
        "color": shade,
        "marker": MARKERS[k % len(MARKERS)],
        "linestyle": STYLES[k % len(STYLES)],
        "markeredgecolor": "black",
        "markeredgewidth": 0.4,
    }


def log_axis(axis: Axis, low: float, high: float, unit: str = "", whole: bool = False) -> None:
    """Logarithmic, from low to high, with a few ticks written out, of whole numbers only if `whole`.

    unit: a kind of `format_quantity`, or "" for plain numbers. Ticks of bytes go by powers of two.
    """
    from matplotlib.axis import XAxis

    ax = axis.axes
    (ax.set_xscale if isinstance(axis, XAxis) else ax.set_yscale)("log")
    (ax.set_xlim if isinstance(axis, XAxis) else ax.set_ylim)(low, high)
    at = [v for v in ticks(low, high, 2 if unit == "bytes" else 10) if not whole or v == round(v)]
    share = np.log(high / low) * APART
    kept: list[float] = []
    for v in at:
        if not kept or np.log(v / kept[-1]) >= share:
            kept.append(v)
    axis.set_major_locator(FixedLocator(kept))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: format_quantity(v, unit) if unit else f"{v:.4g}"))


def ticks(low: float, high: float, base: int = 10) -> list[float]:
    """Round numbers of [low, high]: of the coarsest steps that give four, or of equal differences in a narrow range.

    Base 2 gives powers of two, five at most, and halves or quarters of the way between where they are fewer than three.
    """
    if base == 2:
        powers = 2.0 ** np.arange(np.floor(np.log2(low)), np.floor(np.log2(high)) + 1)
        for parts in (1, 2, 4):  # of each doubling, where there are too few of them
            at = [
                float(p * (1 + k / parts)) for p in powers for k in range(parts) if low <= p * (1 + k / parts) <= high
            ]
            if len(at) >= 3:
                break
        return at[:: max(1, -(-len(at) // 5))]
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
    found: list[float] = []
    for mantissas in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6)):
        found = [m * 10.0**e for e in range(first, last + 1) for m in mantissas if low <= m * 10.0**e <= high]
        if len(found) >= 4:
            return found[:: -(-len(found) // 7)]
    step = 10.0 ** np.floor(np.log10((high - low) / 3))
    step *= max(k for k in (1, 2, 5) if k * step <= (high - low) / 2.5)
    return [float(v) for v in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]


def widened(values: Any, factor: float = 1.08) -> tuple[float, float]:
    """(low, high) of the finite positive values, a little beyond them on a logarithmic axis."""
    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known) & (known > 0)]
    return float(known.min()) / factor, float(known.max()) * factor
