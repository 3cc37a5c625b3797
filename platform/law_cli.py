"""`depthlaw fit`, `optimum`, `compare` and `design`: a law, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from depthlaw.platform import question
from depthlaw.platform.command import Json, note

LawFile = Annotated[Path | None, typer.Argument(help="A law, as `fit` writes it; not with --data.")]


def fit(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="STORE|TABLE", help="A store, or a .csv or .parquet of runs; not with --data."),
    ] = None,
    data: question.DataName = None,
    law: Annotated[
        str | None,
        typer.Option(
            help="shape, chinchilla, width_depth, width_depth_params, morph, iso_size or auto; default shape, and with "
            "--data the law that its answers come from."
        ),
    ] = None,
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
        Path | None,
        typer.Option(
            help="Where the law is written; default law.json in the store, or beside the table, or NAME.law.json here "
            "of a data set."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a law to a store's cells, each at its best learning rate, or to the rows of a table."""
    from depthlaw.platform.bundled import chosen
    from depthlaw.platform.query import fit as run
    from depthlaw.platform.show import law_lines, working
    from depthlaw.platform.show import out as show
    from depthlaw.platform.store import Store
    from depthlaw.platform.tables import is_table, no_columns, no_experiment, parse_columns, read_table
    from depthlaw.scaling.law_file import load_law
    from depthlaw.scaling.units import format_quantity

    own, columns = chosen(source, data, "a store or a table"), parse_columns(column or [])
    path = Path(str(source)) if own is None else own.runs
    if own is not None:
        no_columns(own.name, columns)
        note(own.note)
    kind = law or ("shape" if own is None else load_law(own.law).law)
    table = is_table(path)
    if table:
        no_experiment(path if own is None else own.name, experiment)
    if out is None:
        beside = path.with_suffix(".law.json") if table else path / "law.json"
        out = beside if own is None else Path(f"{own.name}.law.json")
    options = {"experiment": experiment, "pooling": pooling, "draws": draws, "delta": delta, "columns": columns}
    with working("fit") as progress:
        progress("reading")
        rows = read_table(path) if table else Store(path)
        fitted = run(rows, kind, progress=progress, **options)
        progress("writing")
        fitted.save(out)
    if as_json:
        print(json.dumps(fitted.to_dict()))
    else:
        show(law_lines(fitted))
        largest = format_quantity(fitted.ranges[""]["N"][1], "count")
        note(f'wrote {out}; next: depthlaw optimum {out} "{fitted.n_is}<={largest}"')


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
    from depthlaw.platform.query import installed, left_out
    from depthlaw.scaling.law_file import load_law
    from depthlaw.scaling.units import parse_quantity

    loaded = load_law(law)
    plan = next_cells(loaded, parse_quantity(compute, "FLOPs"), parse_quantity(target, "count"), cells)
    if unknown := installed(loaded)[1]:
        note(left_out(unknown))
    if out is not None:
        write_sweep(out, sweep_yaml(loaded, plan, out.stem))
    if as_json:
        print(json.dumps(plan.to_dict()))
    else:
        from depthlaw.platform.answers import next_cells_text

        print(next_cells_text(plan))
    if out is not None:
        note(f"wrote {out}; next: depthlaw sweep {out} --dry-run")


def _law(path: Path | None, data: str | None) -> Any:
    """The law of a file, or of a bundled data set, whose limits are said."""
    from depthlaw.platform.bundled import chosen
    from depthlaw.scaling.law_file import load_law

    own = chosen(path, data, "a law file, as `depthlaw fit` writes it")
    if own is not None:
        note(own.note)
    return load_law(str(path) if own is None else own.law)
