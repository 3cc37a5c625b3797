"""`depthlaw diagnose`: depth diagnostics of checkpoints and kept trials, as tables that join the store's."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from depthlaw.archs.diagnostics import DIAGNOSTICS
from depthlaw.archs.diagnostics.finding import THRESHOLDS, Finding
from depthlaw.archs.diagnostics.run import batched
from depthlaw.archs.diagnostics.run import diagnose as run
from depthlaw.platform.data_build import open_built
from depthlaw.platform.data_config import DataConfig, data_root
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.export import Checkpoint, kept, load, weights_path
from depthlaw.platform.store import Store
from depthlaw.platform.store_files import encode

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

Progress = Callable[[str], None]
SEQUENCES, LENGTH = 64, 256
EVERY_S = 2.0


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


def find_checkpoint(given: str, store: Store | None) -> Path:
    """The file of a trial kept in the store, or the path itself. Raises DiagnoseError."""
    if Path(given).exists():
        return Path(given)
    if store is None:
        raise DiagnoseError(f"{given}: no such file or folder; for a trial's id give its store too, with --storage")
    path = weights_path(store, given)
    if not path.exists():
        some = ", ".join(sorted(kept(store, store.statuses()))[:5]) or "none; set keep_checkpoints in the sweep"
        raise DiagnoseError(f"store {store.path} has no weights of {given!r}; it has those of: {some}")
    return path


def names_of(given: Sequence[str] | None) -> list[str]:
    """All by default. Raises DiagnoseError for an unknown one."""
    for name in given or ():
        if name not in DIAGNOSTICS:
            raise DiagnoseError(f"unknown diagnostic {name!r}; choose from {', '.join(DIAGNOSTICS)}")
    return list(given or DIAGNOSTICS)


def windows(
    checkpoint: Checkpoint, sequences: int, length: int | None, text: Path | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (N, T) of text that the model was not trained on, by its own tokenizer. Raises DiagnoseError.

    A trial has its validation split; a checkpoint from elsewhere needs a text file, and a tokenizer.json beside it.
    """
    about = checkpoint.about
    if text is not None:
        return _of_text(checkpoint, sequences, length or LENGTH, text)
    if "spec" not in about:
        raise DiagnoseError(f"{checkpoint.name} names no data: give a text file with --text")
    dataset = open_built(DataConfig.parse(about["data"]["config"]), data_root())
    if dataset is None:
        raise DiagnoseError(
            f"the data of {checkpoint.name} is not under {data_root()}: set DEPTHLAW_DATA to where it is, or build it "
            "again with `depthlaw data build CONFIG`"
        )
    return of_dataset(checkpoint, dataset, sequences, length)


def of_dataset(
    checkpoint: Checkpoint, dataset: Dataset, sequences: int = SEQUENCES, length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of the validation split, by default as long as the model was trained on, 256 at most."""
    if dataset.fingerprint != checkpoint.about["data"]["fingerprint"]:
        raise DiagnoseError(f"{checkpoint.name} was trained on other data than the build at {dataset.path}")
    length = length or min(LENGTH, checkpoint.about["spec"]["seq_len"])
    inputs, targets = dataset.validation_windows(length, sequences)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _of_text(checkpoint: Checkpoint, sequences: int, length: int, text: Path) -> tuple[torch.Tensor, torch.Tensor]:
    from depthlaw.platform.vocabulary import load_tokenizer

    folder = Path(checkpoint.name)
    path = folder / "tokenizer.json"
    if not path.exists():
        raise DiagnoseError(f"{path}: no such file; --text needs the tokenizer of the checkpoint beside it")
    try:
        ids = load_tokenizer(path).encode(text.read_text(encoding="utf-8")).ids
    except (OSError, UnicodeDecodeError) as error:
        raise DiagnoseError(f"{text}: cannot be read ({error})") from error
    count = min(sequences, (len(ids) - 1) // length)
    if count < 1:
        raise DiagnoseError(f"{text} has {len(ids)} tokens, too few for one sequence of {length}: give more text")
    rows = torch.tensor(ids[: count * length + 1])
    return rows[:-1].view(count, length), rows[1:].view(count, length)


def diagnose(
    checkpoint: Checkpoint,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    names: Collection[str],
    progress: Progress = lambda text: None,
) -> Diagnosed:
    """Runs the diagnostics, on the GPU if there is one."""
    model = checkpoint.model
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    began = told = time.monotonic()

    def tell(what: str, done: float) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= EVERY_S:
            told = now
            progress(f"{checkpoint.name}: {what} {done:.0%}, {now - began:.0f} s")

    batches = batched(inputs.to(device), targets.to(device))
    with torch.no_grad():
        loss = sum(float(model(i, t)) * i.numel() for i, t in batches) / inputs.numel()
    findings = run(model, batches, names, tell)
    shape = checkpoint.about["shape"]
    identity = {
        "trial": checkpoint.name,
        "topology": checkpoint.about["topology"],
        "n_layers": shape["n_layers"],
        "d_model": shape["d_model"],
    }
    return Diagnosed(identity, findings, loss, inputs.numel(), time.monotonic() - began)


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
    """One line a model; a dash where a diagnostic was not asked for or does not apply."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", no_wrap=True)
    for title in ("L", "d", "loss", *(title for title, *_ in FIGURES)):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        i = one.identity
        cells = [str(i["topology"]), str(i["n_layers"]), str(i["d_model"]), f"{one.loss:.4f}"]
        for _, name, figure, spec in FIGURES:
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


def kept_trials(
    store: Store, trials: Sequence[str], names: Sequence[str], dataset: Dataset, progress: Progress
) -> list[Path]:
    """Diagnoses those trials whose weights the store has, each into STORE/diagnostics/TRIAL/, unless that was done."""
    folders = []
    for trial in kept(store, trials):
        folder = store.local_folder / "diagnostics" / encode(trial, "trial")
        folders.append(folder)
        asked = folder / "asked.txt"  # written last
        if asked.exists() and set(names) <= set(asked.read_text().split()):
            continue
        checkpoint = load(weights_path(store, trial))
        inputs, targets = of_dataset(checkpoint, dataset)
        write_tables([diagnose(checkpoint, inputs, targets, names, progress)], folder)
        asked.write_text("\n".join(names) + "\n")
    return folders
