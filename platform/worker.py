"""What a Ray actor runs: a trial, or the trials of one trunk one after another, against the store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from depthlaw.platform.config_sections import Pruning
from depthlaw.platform.data_config import DataConfig
from depthlaw.platform.loggers import tensorboard
from depthlaw.platform.lr_search import SETTLED
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.pruning import cell_of, rung_steps
from depthlaw.platform.store import Store
from depthlaw.platform.trunk import Trunk, trunk_key

# A trial waits so long for a store that does not answer.
WAIT_S = 600.0


def trainable(
    config: dict[str, Any],
    *,
    runs: dict[str, Any],
    store_path: str,
    data_folder: str,
    data: DataConfig,
    pruning: Pruning | None,
    board: Any,
    loggers: list[str],
    keep: bool,
) -> None:
    """Trains the trials that `config["trial"]` names. The data is opened, or built where this node does not have it."""
    import torch
    from ray import tune

    from depthlaw.platform import checkpoint
    from depthlaw.platform.data_build import build
    from depthlaw.platform.gang import ray_gang

    specs, store = [TrialSpec.from_dict(raw) for raw in runs[config["trial"]]], Store(store_path, WAIT_S)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dataset = build(data, Path(data_folder))
    if dataset.fingerprint != specs[0].data_fingerprint:
        raise RuntimeError(f"data on this node is {dataset.fingerprint}, planned was {specs[0].data_fingerprint}")

    def train(spec: TrialSpec, trunk: Trunk | None) -> None:
        from depthlaw.platform.trial import run_trial

        folder = store.checkpoint_dir(spec.hash)
        with store.lease(spec.hash, waiting=partial(_waiting, spec)) as lease:
            # Another sweep on the same store may have settled it since this one was planned.
            status = store.statuses().get(spec.hash) if lease.attempt else None
            if status in SETTLED:
                checkpoint.delete(folder)
                tune.report({"trial": spec.hash, "step": spec.steps, "status": status})
                return
            with tensorboard(spec, store) if "tensorboard" in loggers else nullcontext(_unwatched) as watch:
                row = run_trial(
                    spec,
                    store,
                    dataset,
                    # The name under which other loggers look for the step.
                    report=lambda metrics: tune.report(
                        {"trial": spec.hash, "timesteps_total": metrics["step"], **metrics}
                    ),
                    judge=_judge(spec, pruning, board),
                    trunk=trunk,
                    watch=watch,
                    keep=keep,
                    lease=lease,
                    gang=partial(ray_gang, store=store_path, folder=data_folder, data=data),
                )
            if board is not None and row["status"] == "diverged":
                board.forget.remote(cell_of(spec), spec.lr)

    if trunk_key(specs[0]) == specs[0].hash:
        train(specs[0], None)
        return
    # Also for the last of a trunk: what the others left is its to take, and to clear away.
    folder = store.checkpoint_dir(trunk_key(specs[0]))
    with store.lease(trunk_key(specs[0]), waiting=partial(_waiting, specs[0])):
        for k, spec in enumerate(specs):
            train(spec, Trunk(folder, specs[k + 1 :]))
        checkpoint.delete(folder)


def _waiting(spec: TrialSpec, owner: str) -> None:
    from ray import tune

    tune.report({"trial": spec.hash, "waiting": owner})


def _unwatched(step: int, values: Mapping[str, float]) -> None:
    """Nobody looks on."""


def _judge(spec: TrialSpec, pruning: Pruning | None, board: Any) -> Any:
    """Asks the board at the rungs. A board that is lost prunes nobody."""
    if pruning is None:
        return lambda step, val_loss: None
    import ray

    rungs = rung_steps(pruning.at, spec.steps, spec.validation["times"])

    def judge(step: int, val_loss: float) -> str | None:
        if step not in rungs:
            return None
        try:
            reason: str | None = ray.get(board.verdict.remote(cell_of(spec), step, spec.lr, val_loss))
        except ray.exceptions.RayError:
            return None
        return reason

    return judge
