"""The options of a question about the optimum, shared by the commands that ask one. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from depthlaw.platform.bundled import DATA

if TYPE_CHECKING:
    from depthlaw.scaling.hardware import Workload

DataName = Annotated[
    str | None, typer.Option("--data", help=f"A data set that comes with depthlaw instead: {', '.join(DATA)}.")
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        help="Where the table has what a fit reads, NAME=COLUMN, or NAME=@CONSTANT; may be repeated. NAME is "
        "topology, tokens, n_layers, d_model, val_loss, run (rows of one training run) and for N backbone_params, "
        "or params with embedding_rows (x d_model, subtracted), or params alone.",
    ),
]
Tokens = Annotated[str | None, typer.Option(help="Training tokens, such as 8B.")]
TokensPerParam = Annotated[
    float | None, typer.Option(help="Training tokens for each parameter, embedding and head included; default 20.")
]
Context = Annotated[str, typer.Option(help="Tokens in the KV cache, such as 32k.")]
Batch = Annotated[int, typer.Option(help="Sequences decoded at once.")]
WeightBytes = Annotated[float, typer.Option(help="Bytes of a weight at inference.")]
CacheBytes = Annotated[float, typer.Option(help="Bytes of an element of the KV cache.")]
TensorParallel = Annotated[int, typer.Option(help="Devices that share the model at inference.")]
HardwareName = Annotated[str, typer.Option(help="a100, h100, h200, cpu, or a hardware file.")]
SeqLen = Annotated[
    int | None, typer.Option(help="Tokens of a training sequence, for train_flops; default that of the law.")
]
Mfu = Annotated[float, typer.Option(help="Share of a device's peak reached in training, for device_hours.")]
Topologies = Annotated[list[str] | None, typer.Option(help="Only this topology; may be repeated.")]
Layers = Annotated[
    str | None, typer.Option(help="Depths to consider, smallest:largest; default 2:128 (1:128 if fitted).")
]
Widest = Annotated[int | None, typer.Option(help="Largest width to consider; default that of the shape rule.")]
Rule = Annotated[str | None, typer.Option(help="Rule of the shapes; default that of the law.")]
Vocabulary = Annotated[int | None, typer.Option(min=1, max=2**32, help="Default that of the law.")]


def workload(context: str, batch: int, weight_bytes: float, cache_bytes: float, tensor_parallel: int) -> Workload:
    from depthlaw.scaling.hardware import Workload
    from depthlaw.scaling.units import parse_context

    return Workload(parse_context(context), batch, weight_bytes, cache_bytes, tensor_parallel)


def count(text: str | None) -> float | None:
    from depthlaw.scaling.units import parse_quantity

    return None if text is None else parse_quantity(text, "count")


def layer_range(text: str | None) -> tuple[int, int] | None:
    from depthlaw.scaling.optimum import OptimumError

    if text is None:
        return None
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError as error:
        raise OptimumError(f"layers is {text!r}; write smallest:largest, such as 2:128") from error
