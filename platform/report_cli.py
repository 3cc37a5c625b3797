"""`depthlaw report`: what a store, a table or a bundled data set says, on one page."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from depthlaw.platform import question
from depthlaw.scaling.units import counted


def report(
    out: Annotated[Path, typer.Option(metavar="DIR|FILE.html", help="Folder of the report, or the page itself.")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="STORE|TABLE",
            help="A store, a folder or s3://bucket/prefix, or a .csv or .parquet of runs; not with --data.",
        ),
    ] = None,
    data: question.DataName = None,
    law: Annotated[
        Path | None,
        typer.Option(
            help="A law, as `fit` writes it; default: that of --data, else one is chosen and fitted, a minute or so."
        ),
    ] = None,
    column: question.Columns = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help='Such as "params<=400M"; may be repeated. Default: the largest size trained.'),
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="Only this experiment of the store.")] = None,
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
) -> None:
    """Write what a store or a table says as one HTML file that needs nothing else, and its figures as SVG beside it.

    The answer first, then the fits, held-out errors, trade-offs, what broke, and what all of it rests on.
    """
    from depthlaw.platform.bundled import chosen
    from depthlaw.platform.report import report as run
    from depthlaw.platform.store import Store
    from depthlaw.platform.tables import is_table, no_columns, no_experiment, parse_columns, read_table
    from depthlaw.scaling.law_file import load_law

    own, columns = chosen(source, data, "a store or a table"), parse_columns(column or [])
    path = Path(str(source)) if own is None else own.runs
    if is_table(path):
        no_experiment(path if own is None else own.name, experiment)
    if own is not None or not is_table(path):
        no_columns(str(source or data), columns)
    began = time.monotonic()

    def note(text: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {text}", file=sys.stderr, flush=True)

    if own is not None:
        print(own.note, file=sys.stderr, flush=True)
    written = run(
        own or (read_table(path) if is_table(path) else Store(str(source))),
        None if law is None else load_law(law),
        out,
        budgets=budget or [],
        experiment=experiment,
        progress=note,
        columns=columns,
        name=path.name,
        topologies=topology,
        tokens=question.count(tokens),
        tokens_per_param=tokens_per_param,
        seq_len=seq_len,
        mfu=mfu,
        workload=question.workload(context, batch, weight_bytes, cache_bytes, tensor_parallel),
        hardware=hardware,
        layers=question.layer_range(layers),
        rule=shape_rule,
        widest=widest,
        vocab_size=vocab_size,
    )
    print(f"{written.page} and {counted(len(written.figures), 'figure')} in {written.page.stem}_figures")
