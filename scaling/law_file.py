"""Law files: the JSON that `FittedLaw.save` writes, read back and checked before anything rests on it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from depthlaw.scaling.fitted import FORMAT, FittedLaw
from depthlaw.scaling.laws import LawError, law
from depthlaw.scaling.rows import LeftOut


def load_law(path: str | Path) -> FittedLaw:
    """A law written by `save`. Raises LawError if the file is not one."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise LawError(f"cannot read the law file {path}: {error.strerror}; write one with `depthlaw fit`") from error
    except ValueError as error:
        raise LawError(f"{path} is not JSON ({error}); write a law file with `depthlaw fit`") from error
    return law_from_dict(data, str(path))


def _check_draws(fitted: FittedLaw, where: str) -> None:
    size = len(fitted.names) * 8
    try:
        good = len(base64.b64decode(fitted.draws_base64, validate=True)) % size == 0
    except ValueError:
        good = False
    if not good:
        raise LawError(f"{where} has draws that are not whole rows of {len(fitted.names)} numbers: fit again")


def _check_numbers(fitted: FittedLaw, where: str) -> None:
    """Raises LawError naming a field that no fit can have written."""
    for name in ("N0", "D0", "L0", "d0", "log_rms", "inflation", "theta", "residuals", "covariance"):
        try:
            good = np.isfinite(np.asarray(getattr(fitted, name), dtype=float)).all()
        except (TypeError, ValueError):
            good = False
        if not good:
            raise LawError(f"{where} has a {name} that is not made of finite numbers: fit again")
    dicts = dict.fromkeys(("unidentified", "context", "ranges", "units", "choice"), dict)
    for name, kind in {**dicts, **dict.fromkeys(("law", "pooling", "status", "n_is", "draws_base64"), str)}.items():
        if not isinstance(getattr(fitted, name), kind):
            raise LawError(f"{where} has {name} {getattr(fitted, name)!r}: fit again")
    texts = (*fitted.topologies, *fitted.names, *fitted.notes, *fitted.at_bound)
    if len(fitted.theta) != len(fitted.names) or not all(isinstance(text, str) for text in texts):
        raise LawError(f"{where} has names that do not belong to its theta: fit again")


def _try_out(fitted: FittedLaw, where: str) -> None:
    """Raises LawError for a law that cannot answer: better at reading than in the middle of a question."""
    try:
        for topology in fitted.topologies:
            fitted.interval(topology, fitted.N0, fitted.D0, fitted.L0, fitted.d0)
            fitted.doubts_about(topology)
            float(fitted.ranges[topology]["N"][1])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, LawError):
            raise
        raise LawError(f"{where} is not a law that a fit wrote ({error}): fit again") from error


def law_from_dict(data: Mapping[str, Any], where: str = "the given mapping") -> FittedLaw:
    """The inverse of `FittedLaw.to_dict`. Raises LawError for another format or missing fields."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise LawError(f"{where} has law format {found!r}; this version reads format {FORMAT}: fit again")
    values = {k: v for k, v in data.items() if k != "format"}
    try:
        values["left_out"] = tuple(LeftOut(**row) for row in values["left_out"])
        values["covariance"] = tuple(tuple(row) for row in values["covariance"])
        values["ranges"] = {t: {k: tuple(v) for k, v in of.items()} for t, of in values["ranges"].items()}
        profiles = values.get("profiles", {}).items()
        values["profiles"] = {k: tuple(np.inf if v is None else v for v in ends) for k, ends in profiles}
        values["held_out"] = tuple(values.get("held_out", ()))
        for name in ("topologies", "names", "theta", "at_bound", "notes", "residuals", "rows_used"):
            values[name] = tuple(values[name])
        fitted = FittedLaw(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise LawError(f"{where} is not a complete law file ({error}): fit again") from error
    _check_numbers(fitted, where)
    _check_draws(fitted, where)
    law(fitted.law)  # a law from a plug-in that is not installed is an error here, not at the first prediction
    _try_out(fitted, where)
    return fitted
