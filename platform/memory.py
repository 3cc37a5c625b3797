"""Out of memory: the same global batch with fewer sequences at once, until it fits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from depthlaw.platform.plan import TrialSpec


class DoesNotFitError(RuntimeError):
    """Not even one sequence at once fits."""


def within_memory(spec: TrialSpec, attempt: Callable[[TrialSpec, str | None], Any]) -> Any:
    """What `attempt(spec, note)` returns, tried with half the sequences a rank holds at once whenever memory runs out.

    `note` says that this happened, None at first. Raises DoesNotFitError when one sequence does not fit.
    """
    asked = spec.micro_batch_seqs
    while True:
        note = None
        if spec.micro_batch_seqs < asked:
            note = f"out of memory with {asked} sequences at once on a rank, done with {spec.micro_batch_seqs}"
        try:
            return attempt(spec, note)
        except torch.OutOfMemoryError as error:
            problem = " ".join(str(error).split())[:300]
        # Here and not in the handler: the error's traceback holds the model.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        fewer = [n for n in range(1, spec.micro_batch_seqs // 2 + 1) if spec.rank_seqs % n == 0]
        if not fewer:
            raise DoesNotFitError(f"one sequence at once on a rank: {problem}")
        spec = replace(spec, micro_batch_seqs=fewer[-1])
