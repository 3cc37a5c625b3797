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

from depthlaw.platform.command import Json, note
from depthlaw.platform.explore_cli import explore
from depthlaw.platform.inside_cli import diagnose, evaluate
from depthlaw.platform.law_cli import compare, design, fit, optimum
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
    out(data_lines(build(loaded.data, folder or data_root(), progress=note), loaded.seq_len))


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
        note(f"store: {store.path}; next: depthlaw fit {folder} --out law.json")


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


for one in (fit, optimum, report, explore, compare, design):
    app.command()(one)


@app.command()
def measure(
    out: Annotated[Path, typer.Option(help="Hardware file to write, a .json that `optimum --hardware` takes.")],
    topology: Annotated[list[str] | None, typer.Option(help="Only this topology; may be repeated.")] = None,
    layers: Annotated[str | None, typer.Option(help="Depths, such as 2,6,12,24.")] = None,
    widths: Annotated[str | None, typer.Option(help="Widths, such as 64,128,320.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of a prompt and in the cache, such as 64,256.")] = None,
    shape_rule: Annotated[str | None, typer.Option(help="Rule of the shapes; small on a CPU, head64 on CUDA.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default cuda where there is one.")] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 300.0,
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
        progress=note,
    )
    found.hardware.save(out)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        print(report(found))
        note(f'wrote {out}; next: depthlaw optimum law.json "tpot<=5ms" --hardware {out}')


app.command()(diagnose)
app.command()(evaluate)


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


def _numbers(name: str, text: str | None) -> list[int] | None:
    from depthlaw.scaling.units import UnitError, parse_context

    try:
        return None if text is None else [parse_context(part) for part in text.split(",")]
    except UnitError as error:
        raise UnitError(f"{name} is {text!r}; write whole numbers, such as 64,256") from error


# Commands that find again what they had done; any other begins anew.
RESUMED = {"sweep", "demo", "data"}
# Exit codes of the project's own errors; any other of its ValueErrors is a user's mistake, code 2.
CODES = {"FitRefusedError": 1, "Infeasible": 1, "SweepError": 3}


def main(arguments: list[str] | None = None) -> Any:
    """Runs a command. The project's own errors become one line on stderr and an exit code; any other is a defect."""
    try:
        return app(arguments)
    except SystemExit as ended:
        if ended.code == 130:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not keep Ray's processes from ending
            words = sys.argv[1:] if arguments is None else arguments
            again = "; run the same command again to go on" if RESUMED & set(words[:1]) else ""
            print(f"stopped by Ctrl-C{again}", file=sys.stderr)
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
