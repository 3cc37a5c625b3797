"""What `depthlaw diagnose` found in the models whose weights were kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthlaw.platform.report.material import Material
from depthlaw.platform.report.style import Drawing, Panel, legend, of_topology, panel, shorten

if TYPE_CHECKING:
    import pandas as pd

    from depthlaw.platform.store import Store

TITLE = "What the layers do"
# Table: the coordinate, the value, and its words. What has two coordinates is left to the pictures of `diagnose`.
LINES = {
    "pruning": ("skipped", "loss_increase", "loss with the block skipped less the loss, nats"),
    "repetition": ("block", "loss_increase", "loss with the block run twice less the loss, nats"),
    "lens": ("depth", "cross_entropy", "cross-entropy of the logit lens, nats"),
    "jacobian": ("block", "step_rms", "RMS singular value of J - 1"),
    "streams": ("depth", "cosine", "mean cosine between streams"),
}
CURVES = {"causal": "share of late pairs above it, causal score", "permutation": "the same of the permutation score"}


def read_tables(store: Store, trials: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The tables of every diagnosed trial of the report, by name, each with the trial's `size` and `val_loss`."""
    import pandas as pd

    parts: dict[str, list[pd.DataFrame]] = {}
    for path in sorted((store.local_folder / "diagnostics").glob("*/*.parquet")):
        try:
            frame = pd.read_parquet(path)
            if "trial" not in frame:
                raise ValueError("it has no column trial")
            parts.setdefault(path.stem, []).append(frame)
        except (OSError, ValueError) as error:
            store.unreadable_parts[str(path.relative_to(store.local_folder))] = f"not a table: {error}"
    known = trials[["trial", "size", "val_loss"]]
    joined = {name: pd.concat(found, ignore_index=True).merge(known, on="trial") for name, found in parts.items()}
    return {name: frame for name, frame in joined.items() if not frame.empty}


def diagnostics(m: Material) -> Drawing:
    caption = (
        "Depth diagnostics on text that the models were not trained on, at the trained weights. One line a topology, "
        "each at its best diagnosed trial of the largest size. There are no bands: one model each, so a difference "
        "between two lines may be the seed's. A skipped or repeated block leaves the training distribution. The table "
        "has every diagnosed trial; maps over two depths are among the pictures of `depthlaw diagnose`. "
    )
    if m.table is not None:
        return Drawing(TITLE, caption, lacks="a table has no trained models to look into")
    if "summary" not in m.diagnostics:
        lacks = "the store has no diagnostics: set keep_checkpoints and diagnostics in the sweep"
        return Drawing(TITLE, caption, lacks=lacks)
    best = _best(m.diagnostics["summary"])
    panels = []
    for name, (x, y, words) in LINES.items():
        if name in m.diagnostics:
            panels += _lines(m, name, m.diagnostics[name], best, x, y, words)
    for name, words in CURVES.items():
        curves = m.diagnostics.get("curves")
        if curves is not None:
            panels += _lines(m, name, curves[curves["diagnostic"] == name], best, "threshold", "share_late", words)
    return Drawing(TITLE, caption, panels, table=_table(m.diagnostics["summary"]))


def _best(summary: pd.DataFrame) -> dict[str, str]:
    """{topology: the trial that its line is of}."""
    each = summary.drop_duplicates("trial").sort_values(["size", "val_loss"], ascending=[False, True])
    return dict(each.drop_duplicates("topology")[["topology", "trial"]].sort_values("topology").itertuples(index=False))


def _lines(
    m: Material, name: str, frame: pd.DataFrame, best: dict[str, str], x: str, y: str, words: str
) -> list[Panel]:
    figure, ax = panel(name, x.replace("_", " "), words)
    for topology, trial in best.items():
        of = frame[frame["trial"] == trial].sort_values(x)
        if not of.empty:
            label = f"{shorten(topology, 28)} {of['n_layers'].iloc[0]} x {of['d_model'].iloc[0]}"
            ax.plot(of[x], of[y], label=label, markevery=-(-len(of) // 12), **of_topology(m.topologies, topology))
    if not ax.lines:
        return []
    legend(figure, ax)
    return [Panel("diagnostics", f"Diagnostic {name}: {words}, against {x} for {', '.join(best)}.", figure)]


def _table(summary: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """One row a trial, one column each figure that any of them has."""
    figures = summary[["diagnostic", "figure"]].drop_duplicates().itertuples(index=False)
    wanted = [(d, f) for d, f in figures if d != "model"]
    rows = []
    for _, of in summary.sort_values(["topology", "size", "val_loss"]).groupby("trial", sort=False):
        value = {(r.diagnostic, r.figure): r.value for r in of.itertuples()}
        first = of.iloc[0]
        shown = [value.get(key, float("nan")) for key in wanted]
        rows.append(
            [str(first["topology"]), str(first["n_layers"]), str(first["d_model"]), f"{first['val_loss']:.4f}",
             *("-" if v != v else f"{v:.3g}" for v in shown), str(first["trial"])]
        )  # fmt: skip
    titles = [f"{d}: {f.replace('_', ' ')}" for d, f in wanted]
    return ["topology", "layers", "width", "loss", *titles, "trial"], rows
