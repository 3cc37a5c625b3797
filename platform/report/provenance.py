"""The data, the code and the law behind a report, and what it is worth."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from depthlaw import __version__
from depthlaw.platform.report.material import Material, span
from depthlaw.platform.report.style import Drawing
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.units import format_quantity

if TYPE_CHECKING:
    import pandas as pd

DATA = "Data and versions"
SMALL = 1e8  # parameters below which a model is small


def data(m: Material) -> Drawing:
    if m.table is not None:
        return _of_table(m, m.table)
    caption = "What the trials say of themselves. Losses on one corpus do not compare with losses on another. "
    if m.trials.empty:
        return Drawing(DATA, caption, lacks="no trial has an outcome yet")
    specs = [json.loads(text) for text in m.trials["spec"].dropna()]
    versions: dict[str, set[str]] = {}
    for text in m.trials["versions"].dropna().unique():
        for name, version in json.loads(text).items():
            versions.setdefault(name, set()).add(version)
    rows = [
        ["store", m.source],
        *_bundled(m),
        ["experiments", _list(m.experiments)],
        ["corpus", _list({str(spec.get("data")) for spec in specs if spec.get("data")})],
        ["corpus fingerprint", _list(m.trials["data_fingerprint"].dropna())],
        *_build(set(m.trials["data_fingerprint"].dropna())),
        ["vocabulary", _list(m.trials["vocab_size"])],
        ["training sequence", f"{_list(m.trials['seq_len'])} tokens"],
        ["batch", f"{_list(m.trials['batch_tokens'].dropna().astype(int))} tokens a step"],
        ["training tokens of a trial", span(m.trials["tokens"])],
        ["training tokens of all", format_quantity(float(m.trials["tokens_done"].fillna(0).sum()), "count")],
        ["backbone parameters", span(m.trials["backbone_params"].dropna())],
        ["seeds", _list(m.trials["seed"])],
        ["device", _list(m.trials["device"].dropna())],
        ["code commit", _list(m.trials["code_commit"].dropna())],
        ["numerics version", _list(m.trials["numerics_version"].dropna())],
        *([name, _list(found)] for name, found in sorted(versions.items())),
    ]
    return Drawing(DATA, caption, table=(["what", "value"], [r for r in rows if r[1]]))


def _of_table(m: Material, columns: Mapping[str, str]) -> Drawing:
    caption = (
        "What the table says of its runs; it does not have the corpus, the code or the versions that they were trained "
        "with. The rows hash is SHA-256 over the rows fitted, whatever their order in the file: a law with the same "
        "one rests on the same rows. "
    )
    if m.rows is None:
        return Drawing(DATA, caption, lacks=m.no_law)
    others = "all others by their own names" if columns else "by their own names"
    rows = [
        ["file", m.source],
        *_bundled(m),
        ["rows", f"{len(m.rows.N)} fitted, {len(m.rows.left_out)} left out"],
        ["rows hash", m.rows.digest()],
        ["columns", "".join(f"{name}={at}, " for name, at in columns.items()) + others],
        ["N counts", m.rows.columns.counting],
        [m.parameters, span(m.cells[m.counted])],
        ["training tokens of a run", span(m.cells["tokens"])],
    ]
    return Drawing(DATA, caption, table=(["what", "value"], rows))


def _bundled(m: Material) -> list[list[str]]:
    if m.bundled is None:
        return []
    return [["data set", f"{m.bundled.name}, which comes with depthlaw {__version__}"], ["source", m.bundled.source]]


def _build(fingerprints: set[str]) -> list[list[str]]:
    """The texts that the corpus was made of, if its build is on this machine."""
    from depthlaw.platform.data_config import data_root
    from depthlaw.platform.dataset import INDEX

    for path in sorted(data_root().glob(f"*/{INDEX}")):
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if index.get("fingerprint") not in fingerprints:
            continue
        splits = {name: format_quantity(s["tokens"], "count") for name, s in index.get("splits", {}).items()}
        sources = [" ".join(str(s[k]) for k in ("name", "version") if k in s) for s in index.get("sources", [])]
        return [
            ["corpus sources", ", ".join(sources)],
            ["corpus tokens", ", ".join(f"{name} {count}" for name, count in splits.items())],
        ]
    return []


def law_lines(law: FittedLaw) -> list[list[str]]:
    shared = ", ".join(f"{k} {v:.4g}" for k, v in law.shared.items())
    ranges = law.ranges[""]
    rows = [
        ["law", f"{law.law}, terms {law.pooling}; status {law.status}"],
        ["chosen because", str(law.choice["why"]) if law.choice else "it was asked for"],
        [
            "fitted on",
            f"{len(law.rows_used)} cells; " + ", ".join(f"{k} {a:.4g} to {b:.4g}" for k, (a, b) in ranges.items()),
        ],
        ["N counts", law.counting],
        ["scatter", f"{100 * law.log_rms:.2g} % of the loss"],
        [
            "intervals",
            "none held out, not widened"
            if not law.held_out
            else f"widened {law.inflation:.3g} times for the error on held-out sizes"
            if law.inflation > 1
            else "not widened: held-out sizes were predicted as well as expected",
        ],
        ["shared parameters", shared],
    ]
    for label in law.topologies:
        own = {k: v for k, v in law.parameters(label).items() if k not in law.shared}
        rows.append([f"parameters of {label}", ", ".join(f"{k} {v:.4g}" for k, v in own.items())])
    for name, (low, high) in law.profiles.items():
        rows.append([f"95 % range of {name}", f"{low:.3g} to {high:.3g}"])
    return [r for r in rows if r[1]]


def law(m: Material) -> Drawing:
    caption = (
        "The law behind every curve, with its parameters and what they were fitted on. A 95 % range that ends at 0 or "
        "inf is one that the data do not bound. "
    )
    if m.law is None:
        return Drawing("The law", caption, lacks=m.no_law)
    return Drawing("The law", caption, table=(["what", "value"], law_lines(m.law)))


def doubts(m: Material) -> list[str]:
    """What the data cannot tell, what was left out, and what all of it is worth, in words."""
    words = list(m.remarks)
    if m.law is not None:
        words += [*m.law.doubts(), *m.law.notes]
        words += [f"Row left out ({x.topology or 'no topology'}): {x.reason}" for x in m.law.left_out]
    if m.table is not None:
        return [*words, *_of_runs(m), *_worth(m, m.cells)]
    broken = m.cells[m.cells["val_loss"].isna()]
    if len(broken):
        words.append(f"{len(broken)} cells have no finished trial, so they are censored: the law does not know them")
    edge = int((m.cells["lr_at_edge"] == True).sum())  # noqa: E712  None means not known
    if edge:
        words.append(f"The best learning rate is at the edge of those tried in {edge} of {len(m.cells)} cells")
    if m.at_rate_of_base_shape:
        words.append(
            f"The learning rate was searched at the base shape of its topology only in {m.at_rate_of_base_shape} of "
            f"{len(m.cells)} cells"
        )
    one = int((m.cells["n_lrs"] == 1).sum()) - m.at_rate_of_base_shape
    if one:
        words.append(f"One learning rate only was tried in {one} of {len(m.cells)} cells")
    if len(m.cells) and int(m.cells["seeds"].max()) < 2:
        words.append("One seed a cell: the noise between seeds is not measured, only the scatter about the law")
    words += [f"A file of the store could not be read and is left out: {k} ({why})" for k, why in m.unreadable.items()]
    return [*words, *_worth(m, m.trials)]


def _of_runs(m: Material) -> list[str]:
    """What a table leaves open."""
    if m.rows is None:
        return []
    words = ["A table does not say which learning rates were tried: each loss is taken as that of a good one"]
    if not m.cells.duplicated([m.counted, "topology", "tokens", "n_layers", "d_model"]).any():
        words.append("One run a shape: the noise between seeds is not measured, only the scatter about the law")
    return words


def _worth(m: Material, frame: pd.DataFrame) -> list[str]:
    if m.counted not in frame:
        return []
    known = frame[m.counted].dropna()
    if known.empty:
        return []
    words = f"These are models of {span(known)} {m.parameters} on {span(frame['tokens'])} tokens"
    if float(known.max()) < SMALL:
        words += (
            ". What holds for them need not hold at 400M: below a width of about 64 width itself is the limit, and a "
            "small model of technical text or code is not one of web text"
        )
    return [words]


def _list(values: Iterable[Any]) -> str:
    return ", ".join(str(v) for v in sorted(set(values)))
