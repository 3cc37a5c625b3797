"""The row that a store keeps of one attempt at a trial: what was run, by which code, and how it ended."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from depthlaw.platform.plan import NUMERICS_VERSION, TrialSpec

COMMIT = "DEPTHLAW_COMMIT"


def trial_row(spec: TrialSpec, attempt: int, status: str, reason: str | None, **measured: Any) -> dict[str, Any]:
    """The row of one attempt; what was not measured stays null."""
    costs = spec.costs
    return {
        "trial": spec.hash,
        "attempt": attempt,
        "recipe_hash": spec.recipe_hash,
        "experiment": spec.experiment,
        "topology": spec.topology,
        **spec.shape.__dict__,
        "seq_len": spec.seq_len,
        "lr": spec.lr,
        "tokens": spec.tokens,
        "tokens_per_param": spec.tokens / costs.params,
        "seed": spec.seed,
        "batch_tokens": spec.batch_tokens,
        "steps": spec.steps,
        "backbone_params": int(costs.backbone_params),
        "embedding_params": int(spec.shape.embedding_params),
        "params": int(costs.params),
        "train_flops": float(spec.train_flops),
        "status": status,
        "reason": reason,
        "data_fingerprint": spec.data_fingerprint,
        "code_commit": code_commit(),
        "numerics_version": str(NUMERICS_VERSION),
        "versions": json.dumps(_versions()),
        "spec": json.dumps(spec.to_dict()),
        "ended_at": datetime.now(UTC),
        **measured,
    }


def peak_memory_bytes() -> int:
    """Of the device; on a CPU the high-water mark of the process, which earlier trials in it may have set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * (1 if sys.platform == "darwin" else 1024)


@cache
def _versions() -> dict[str, str]:
    import depthlaw

    found = {name: version(name) for name in ("torch", "deepspeed", "ray", "numpy")}
    return {"python": sys.version.split()[0], "depthlaw": depthlaw.__version__, **found}


@cache
def code_commit() -> str | None:
    """The commit that the code runs from, `+` behind it where the checkout differs; None outside a checkout.

    A sweep tells the nodes to which it ships the code.
    """
    if COMMIT in os.environ:
        return os.environ[COMMIT] or None
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
