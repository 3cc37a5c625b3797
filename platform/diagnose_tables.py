"""What was diagnosed, as tables: Parquet that joins the store's trials, JSON, and a line a model for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthlaw.archs.diagnostics.finding import THRESHOLDS, Finding

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


class DiagnoseError(ValueError):
    """What is asked for cannot be diagnosed. One line: what, and what to do."""


@dataclass(frozen=True)
class Diagnosed:
    """One model and what was found; `identity` are the columns that every row of its tables begins with."""

    identity: Mapping[str, Any]
    findings: Mapping[str, Finding]
    loss: float  # mean over the same tokens, nats
    tokens: int
    seconds: float


def tables(found: Sequence[Diagnosed]) -> dict[str, pd.DataFrame]:
    """One long table a diagnostic, one row a cell that is defined; `curves` of shares by threshold, and `summary`.

    All begin with trial, topology, n_layers and d_model: `trial` joins the store's trial rows.
    """
    import numpy as np
    import pandas as pd

    parts: dict[str, list[pd.DataFrame]] = {"summary": [], "curves": []}

    def add(table: str, one: Diagnosed, columns: Mapping[str, Any]) -> None:
        frame = pd.DataFrame(dict(columns))
        for at, (name, value) in enumerate(one.identity.items()):
            frame.insert(at, name, value)
        parts.setdefault(table, []).append(frame)

    for one in found:
        add("summary", one, {"diagnostic": ["model"], "figure": ["loss"], "value": [one.loss]})
        for name, finding in one.findings.items():
            grid = np.meshgrid(*finding.axes.values(), indexing="ij")
            known = np.any([~np.isnan(v) for v in finding.values.values()], axis=0)
            axes = {axis: c[known] for axis, c in zip(finding.axes, grid, strict=True)}
            add(name, one, {**axes, **{column: v[known] for column, v in finding.values.items()}})
            figures = list(finding.summary)
            add("summary", one, {"diagnostic": name, "figure": figures, "value": [finding.summary[f] for f in figures]})
            if finding.curve is not None:
                add("curves", one, {"diagnostic": name, "threshold": THRESHOLDS, "share_late": finding.curve})
    return {name: pd.concat(frames, ignore_index=True) for name, frames in parts.items() if frames}


def write_tables(found: Sequence[Diagnosed], folder: Path) -> list[Path]:
    """Raises DiagnoseError if the disk refuses."""
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, frame in tables(found).items():
            paths.append(folder / f"{name}.parquet")
            frame.to_parquet(paths[-1], index=False)
    except OSError as error:
        raise DiagnoseError(f"cannot write the tables to {folder}: {error}") from error
    return paths


# The figures that one line a model shows: title, diagnostic, figure, format.
FIGURES = (
    ("angle", "angular", "mean_late", ".3f"),
    ("causal > 0.45", "causal", "share_late", ".0%"),
    ("permut. > 0.15", "permutation", "share_late", ".0%"),
    ("least pruning", "pruning", "least", ".4f"),
    ("lens within 0.1", "lens", "first_within_tenth", ".0%"),
    ("mean path", "paths", "mean_at_readout", ".3g"),
    ("rank", "rank", "whole_depth", ".2f"),
    ("dead", "dead_zone", "dead_blocks", ".0f"),
    ("CKA", "cka", "mean_late", ".3f"),
    ("RMS of J - 1", "jacobian", "mean_step_rms", ".3f"),
)


def summary_table(found: Sequence[Diagnosed]) -> Table:
    """One line a model, of what was asked for; a dash where a diagnostic does not apply."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    figures = [of for of in FIGURES if any(of[1] in one.findings for one in found)]
    for title in ("trial", "model"):
        table.add_column(title, no_wrap=True)
    for title in ("L", "d", "loss", *(title for title, *_ in figures)):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        i = one.identity
        cells = [str(i["trial"]), str(i["topology"]), str(i["n_layers"]), str(i["d_model"]), f"{one.loss:.4f}"]
        for _, name, figure, spec in figures:
            value = one.findings[name].summary[figure] if name in one.findings else None
            cells.append("-" if value is None or value != value else format(value, spec))
        table.add_row(*cells)
    return table


def as_dict(found: Sequence[Diagnosed]) -> list[dict[str, Any]]:
    """For JSON: identity, loss, tokens, seconds and every summary figure (null where undefined)."""
    return [
        {
            **one.identity,
            "loss": one.loss,
            "tokens": one.tokens,
            "seconds": round(one.seconds, 1),
            "summary": {
                name: {figure: None if value != value else value for figure, value in finding.summary.items()}
                for name, finding in one.findings.items()
            },
        }
        for one in found
    ]
