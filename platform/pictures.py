"""Pictures of depth diagnostics: heat maps and curves, the models of one call side by side on one scale.

Colours are those of cividis and of `palette`, which people who are colour-blind can tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.archs.diagnostics.finding import THRESHOLDS, Finding
from depthlaw.archs.diagnostics.permutation import PERMUTATION_THRESHOLD
from depthlaw.archs.diagnostics.skips import CAUSAL_THRESHOLD
from depthlaw.platform.palette import COLOURS, STYLES

if TYPE_CHECKING:
    from depthlaw.platform.diagnose_tables import Diagnosed

# What a heat map or a line shows of each finding, and in which unit.
SHOWN = {
    "angular": ("distance", "angular distance"),
    "causal": ("score", "causal score"),
    "pruning": ("loss_increase", "loss with the block skipped less the loss, nats"),
    "permutation": ("score", "permutation score"),
    "lens": ("cross_entropy", "cross-entropy of the logit lens, nats"),
    "early_exit": ("cross_entropy", "cross-entropy when leaving at a confidence, nats"),
    "paths": ("weight", "residual-path weight"),
    "rank": ("effective_rank", "effective rank of the residual product"),
    "streams": ("cosine", "mean cosine between streams"),
    "dead_zone": ("running_weight", "weight of the running sum"),
    "cka": ("cka", "linear CKA"),
    "repetition": ("loss_increase", "loss with the block run twice less the loss, nats"),
    "recomputation": ("change", "change of a block run on an earlier state"),
    "jacobian": ("step_rms", "RMS singular value of J - 1"),
}
CURVES = {"causal": CAUSAL_THRESHOLD, "permutation": PERMUTATION_THRESHOLD}
COLUMNS = 4


def draw(found: Sequence[Diagnosed], folder: Path) -> list[Path]:
    """One PNG a diagnostic, and one of each curve over thresholds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    paths = []
    for name in SHOWN:
        pairs = [(_title(one), one.findings[name]) for one in found if name in one.findings]
        if pairs:
            flat = len(pairs[0][1].axes) == 1
            figure = _lines(plt, name, pairs) if flat else _maps(plt, name, pairs)
            paths.append(_save(plt, figure, folder / f"{name}.png"))
        if pairs and name in CURVES:
            paths.append(_save(plt, _curves(plt, name, pairs), folder / f"{name}_curve.png"))
    return paths


def _title(one: Diagnosed) -> str:
    i = one.identity
    return f"{i['topology']} {i['n_layers']} x {i['d_model']}, loss {one.loss:.3f}"


def _maps(plt: Any, name: str, pairs: Sequence[tuple[str, Finding]]) -> Any:
    value, label = SHOWN[name]
    columns = min(COLUMNS, len(pairs))
    rows = -(-len(pairs) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.9 * rows), squeeze=False, layout="constrained")
    # One scale, whose ends a few extreme cells do not set.
    everything = np.concatenate([f.values[value].ravel() for _, f in pairs])
    # Some are undefined for every block of a shallow model, and then there is no scale to find.
    low, high = np.nanquantile(everything, [0.01, 0.99]) if np.isfinite(everything).any() else (0.0, 1.0)
    for ax in axes.flat[len(pairs) :]:
        ax.set_axis_off()
    image = None
    for ax, (title, finding) in zip(axes.flat, pairs, strict=False):
        (down, y), (across, x) = finding.axes.items()
        image = ax.imshow(
            finding.values[value],
            origin="lower",
            aspect="auto",
            cmap="cividis",
            vmin=low,
            vmax=high,
            interpolation="nearest",
            extent=(x[0] - 0.5, x[-1] + 0.5, y[0] - 0.5, y[-1] + 0.5),
        )
        ax.set_title(title, fontsize=9)
        ax.set_xlabel(across.replace("_", " "))
        ax.set_ylabel(down.replace("_", " "))
        for axis in (ax.xaxis, ax.yaxis):
            axis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axes, label=label, extend="both", shrink=0.9)
    return figure


def _lines(plt: Any, name: str, pairs: Sequence[tuple[str, Finding]]) -> Any:
    value, label = SHOWN[name]
    figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for k, (title, finding) in enumerate(pairs):
        (along, x), *_ = finding.axes.items()
        ax.plot(x, finding.values[value], label=title, marker="o", markersize=3, **_style(k))
        ax.set_xlabel(along.replace("_", " "))
    ax.set_ylabel(label)
    ax.legend(fontsize=8)
    return figure


def _curves(plt: Any, name: str, pairs: Sequence[tuple[str, Finding]]) -> Any:
    figure, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for k, (title, finding) in enumerate(pairs):
        ax.plot(THRESHOLDS, finding.curve, label=title, **_style(k))
    ax.axvline(CURVES[name], color="0.6", linewidth=1, linestyle=":")
    ax.set_xlabel(f"threshold (dotted: {CURVES[name]}, picked by the benchmark's authors)")
    ax.set_ylabel(f"share of late pairs above it, {SHOWN[name][1]}")
    ax.legend(fontsize=8)
    return figure


def _style(k: int) -> dict[str, str]:
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": STYLES[k // len(COLOURS) % len(STYLES)]}


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
