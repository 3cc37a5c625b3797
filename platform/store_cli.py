"""`depthlaw store`: looking after a store."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from depthlaw.platform.command import Json
from depthlaw.scaling.units import counted

store_app = typer.Typer(help="Look after a store: check, compact, export.", no_args_is_help=True)

StoreAddress = Annotated[str, typer.Argument(help="A store, as `sweep` makes it: a folder, or s3://bucket/prefix.")]


@store_app.command()
def check(store: StoreAddress, as_json: Json = False) -> None:
    """Read every part and say what is broken, doubled or left over. Exit code 1 if anything is."""
    import warnings

    from depthlaw.platform.store import Store
    from depthlaw.platform.store_check import check as run
    from depthlaw.platform.store_check import report, to_json

    opened = Store(store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all of it is in the report
        checked = run(opened)
    print(to_json(opened, checked) if as_json else report(checked))
    if checked.problems:
        sys.exit(1)


@store_app.command()
def compact(store: StoreAddress, as_json: Json = False) -> None:
    """Merge the files of all trials that have ended into a few. Safe beside running sweeps, and if it is killed."""
    from depthlaw.platform.store import Store
    from depthlaw.platform.store_compact import compact as run

    done = run(Store(store))
    if as_json:
        print(json.dumps(done.__dict__))
        return
    left = f"; {counted(done.left, 'trial')} without an outcome left alone" if done.left else ""
    print(f"{counted(done.files_before, 'file')} before, {done.files_after} now{left}")


@store_app.command()
def export(
    store: StoreAddress,
    file: Annotated[Path, typer.Argument(help="A .parquet or .csv file to write.")],
    what: Annotated[str, typer.Option(help="trials (one row each) or steps (every measurement).")] = "trials",
) -> None:
    """Write the trials, or all their measurements, as one table."""
    from depthlaw.platform.store import Store
    from depthlaw.platform.store_export import export as run

    print(f"{counted(run(Store(store), file, what), 'row')} in {file}")
