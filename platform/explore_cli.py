"""`depthlaw explore`: the optimum on a page of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from depthlaw.platform import question
from depthlaw.platform.command import note


def explore(
    law: Annotated[Path | None, typer.Argument(help="A law, as `fit` writes it; not with --data.")] = None,
    data: question.DataName = None,
    hardware: Annotated[
        list[str] | None, typer.Option(help="Also offer this hardware file; may be repeated. The presets are there.")
    ] = None,
    layers: question.Layers = None,
    widest: question.Widest = None,
    shape_rule: question.Rule = None,
    vocab_size: question.Vocabulary = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than the default lets other machines ask.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any that is free.")] = 8642,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Move budgets, load and hardware on a page in the browser and see the optimum change. Ends with Ctrl-C."""
    from depthlaw.platform.bundled import chosen
    from depthlaw.platform.explore.serve import LOOPBACK, serve
    from depthlaw.platform.explore.source import Source

    chosen(law, data, "a law file, as `depthlaw fit` writes it")
    source = Source(
        None if law is None else str(law),
        data,
        tuple(hardware or ()),
        question.layer_range(layers),
        widest,
        shape_rule,
        vocab_size,
    )
    source.check()
    if host not in LOOPBACK:
        note(f"note: whoever reaches {host} can ask this law; there is no password")
    serve(source, host, port, browser, lambda address: print(f"{address}  (Ctrl-C ends it)", flush=True))
