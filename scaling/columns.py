"""Which columns of a table a fit reads, and what its N counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from depthlaw.scaling.laws import Array, LawError

if TYPE_CHECKING:
    import pandas as pd

UNITS = {
    "val_loss": "nats per token",
    "backbone_params": "parameters without embedding and head",
    "params": "parameters, embedding and head included",
    "embedding_rows": "rows of width d_model in embedding and head together",
    "tokens": "training tokens",
    "n_layers": "blocks (two sublayers each)",
    "d_model": "width",
}
NEEDED = ("topology", "tokens", "n_layers", "d_model", "val_loss")
SIZES = ("backbone_params", "params", "embedding_rows")
BACKBONE = (
    "N is backbone_params: all parameters but embedding and head, the topology's own included; D is training tokens"
)


@dataclass(frozen=True)
class Columns:
    """The columns of a fit, each (rows,): topology, N, tokens, n_layers, d_model, val_loss; and what N counts.

    run: which training run each row comes from, for resampling by run; None where the table does not say.
    n_is: which count of a model a question about the law must give it as N. counting: the same in words.
    """

    values: dict[str, Array]
    run: Array | None
    n_is: Literal["backbone_params", "params"]
    counting: str


def read_columns(frame: pd.DataFrame | Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Columns:
    """The columns that a fit reads, by their own name or by the one that `columns` gives.

    columns: {"tokens": "TOK"} reads tokens from the column TOK; {"topology": "@pre_ln"} is a constant. N is
    `backbone_params`, or else `params` less `embedding_rows` x d_model where that is given (the vocabulary if embedding
    and head are tied, twice it if not), or else all of `params`. `run` is read where it is there.
    Raises LawError naming the columns that exist.
    """
    columns = dict(columns or {})
    known = (*NEEDED, *SIZES, "run")
    for name in columns:
        if name not in known:
            raise LawError(f"columns name {name!r}, which a fit does not read; it reads {', '.join(known)}")
    have = [str(c) for c in frame]
    source = {name: columns.get(name, name) for name in known}
    there = {name: at.startswith("@") or at in have for name, at in source.items()}
    # A size that the caller names comes before one that happens to be there.
    size = next((s for s in SIZES[:2] if s in columns), next((s for s in SIZES[:2] if there[s]), SIZES[0]))
    missing = [source[name] for name in (*NEEDED, size, *columns) if not there[name]]
    if missing:
        raise LawError(
            f"the table has no column {', '.join(dict.fromkeys(missing))}; it has {_some(have)}. A fit reads "
            f"{', '.join(NEEDED)} and backbone_params or params: say where they are, such as tokens=COLUMN, or "
            "topology=@pre_ln for a constant"
        )
    if size == "backbone_params" and {"params", "embedding_rows"} & {*columns}:
        raise LawError(
            f"N is given as {source[size]}, and {', '.join(c for c in columns if c in SIZES[1:])} besides: give "
            "backbone_params, or params with embedding_rows to subtract, not both"
        )
    if all(source[name].startswith("@") for name in (*NEEDED, size)):
        raise LawError("every column of the fit is a constant: name at least one column of the table")
    length = len(frame[next(source[name] for name in (*NEEDED, size) if source[name] in have)])
    read = {name: _column(frame, name, source[name], length) for name in (*NEEDED, size)}
    run = np.asarray(frame[source["run"]], dtype=object) if source["run"] in have else None
    N, at = read.pop(size), "" if source[size] == size else f" (column {source[size]})"
    if size == "backbone_params":
        return Columns({**read, "N": N}, run, "backbone_params", BACKBONE.replace("params:", f"params{at}:"))
    if not there["embedding_rows"]:
        words = f"N is params{at}: all parameters, embedding and head included; D is training tokens"
        return Columns({**read, "N": N}, run, "params", words)
    rows = _column(frame, "embedding_rows", source["embedding_rows"], length)
    less = source["embedding_rows"].lstrip("@")
    words = f"N is params{at} less {less} x d_model of embedding and head; D is training tokens"
    return Columns({**read, "N": N - rows * read["d_model"]}, run, "backbone_params", words)


def _column(frame: pd.DataFrame | Mapping[str, Any], name: str, source: str, length: int) -> Array:
    """One column, (length,): text for topology and float64 for the others."""
    of: Any = np.full(length, source[1:], dtype=object) if source.startswith("@") else frame[source]
    if name == "topology":
        return np.asarray(of, dtype=object)
    try:
        return np.asarray(of, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise LawError(f"column {source} must hold numbers ({name}: {UNITS[name]}): {error}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:30]) + (f" and {len(names) - 30} more" if len(names) > 30 else "") if names else "none"
