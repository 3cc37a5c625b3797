"""`depthlaw diagnose`: depth diagnostics of checkpoints and kept trials, as tables that join the store's."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from depthlaw.archs.diagnostics import DIAGNOSTICS
from depthlaw.archs.diagnostics.run import batched
from depthlaw.archs.diagnostics.run import diagnose as run
from depthlaw.platform.data_build import open_built
from depthlaw.platform.data_config import DataConfig, data_root
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.diagnose_tables import Diagnosed, DiagnoseError, write_tables
from depthlaw.platform.export import Checkpoint, kept, load, weights_path
from depthlaw.platform.store import Store
from depthlaw.platform.store_files import encode

Progress = Callable[[str], None]
SEQUENCES, LENGTH = 64, 256
EVERY_S = 2.0


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
    largest, known = int(rows.max()), checkpoint.model.shape.vocab_size
    if largest >= known:
        raise DiagnoseError(f"{path} gives token {largest} and the model knows {known}: it belongs to another model")
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
    return Diagnosed(checkpoint.identity, findings, loss, inputs.numel(), time.monotonic() - began)


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
