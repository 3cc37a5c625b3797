"""Running a plan: Ray Tune over the trials that the store does not have, each in a reused actor."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthlaw.platform.config import SweepConfig
from depthlaw.platform.data_config import DataConfig, DataError, data_root
from depthlaw.platform.plan import TrialSpec, missing, plan
from depthlaw.platform.store import Store

if TYPE_CHECKING:
    from depthlaw.platform.dataset import Dataset

# A lost worker is started again this often, from its trial's last checkpoint.
RESTARTS = 3


class SweepError(RuntimeError):
    """A sweep that ran but did not complete."""


@dataclass(frozen=True)
class Progress:
    """What a running sweep tells its caller after each event."""

    done: int
    planned: int
    flops_done: float
    flops_planned: float
    message: str
    ended: bool = False


Listener = Callable[[Progress], None]


def sweep(
    config: SweepConfig,
    store: Store,
    *,
    data_folder: Path | None = None,
    address: str = "local",
    concurrent: int | None = None,
    listener: Listener = lambda progress: None,
) -> list[TrialSpec]:
    """Trains every planned trial that has no settled row in the store; returns the planned trials.

    `address` is "local" for a cluster of its own on this machine, or "auto" or an address for a running one.
    `concurrent` bounds the trials that run at once; by default the cluster's resources do. Calling it again resumes:
    nothing that is settled runs again, and a trial that was interrupted goes on from its checkpoint.
    Raises SweepError when a trial failed for good.
    """
    from depthlaw.platform.data_build import build

    folder = data_folder or data_root()
    dataset = build(config.data, folder, progress=lambda text: listener(Progress(0, 0, 0, 0, text)))
    trials = plan(config, dataset.fingerprint)
    _check_epochs(trials, dataset, config.max_epochs)
    store.write_plan(config.name, [spec.plan_row() for spec in trials])
    todo = missing(trials, store.statuses())
    # Longest first: the short ones then fill the gaps at the end.
    todo.sort(key=lambda spec: spec.train_flops, reverse=True)
    if todo:
        _run(todo, config, store, folder, address, concurrent, _counting(listener, trials, todo))
    failed = missing(trials, store.statuses())
    if failed:
        raise SweepError(
            f"{len(failed)} of {len(trials)} trials have no result (first: {failed[0].topology} "
            f"{failed[0].n_layers} x {failed[0].d_model}); run the same command again to go on"
        )
    return trials


def _check_epochs(trials: list[TrialSpec], dataset: Dataset, allowed: float) -> None:
    """Text is never repeated silently. Raises DataError."""
    largest = max(trials, key=lambda spec: spec.tokens)
    epochs = dataset.epochs(largest.tokens, largest.seq_len)
    if epochs > allowed:
        raise DataError(
            f"the corpus has {dataset.n_tokens('train'):,} training tokens, and {describe(largest)} would make "
            f"{epochs:.3g} epochs where max_epochs allows {allowed:g}: use more text, fewer tokens per parameter, "
            "or a larger max_epochs"
        )


def _counting(
    listener: Listener, trials: list[TrialSpec], todo: list[TrialSpec]
) -> Callable[[TrialSpec | None, str], None]:
    """Turns single events into the running totals that a listener sees."""
    total = float(sum(spec.train_flops for spec in trials))
    left = {spec.hash: spec.train_flops for spec in todo}

    def tell(ended: TrialSpec | None, message: str) -> None:
        if ended is not None:
            left.pop(ended.hash, None)
        listener(
            Progress(
                len(trials) - len(left), len(trials), total - sum(left.values()), total, message, ended is not None
            )
        )

    return tell


def _run(
    todo: list[TrialSpec],
    config: SweepConfig,
    store: Store,
    folder: Path,
    address: str,
    concurrent: int | None,
    tell: Callable[[TrialSpec | None, str], None],
) -> None:
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the project's store is the record
    from ray import tune

    # Tune's own files serve only the run: what matters is in the store, so they go when it ends.
    scratch = store.path / "ray" / f"{os.getpid()}-{time.time_ns()}"
    with _cluster(address), _removed(scratch):
        per_trial = {"cpu": config.cpus_per_trial, "gpu": config.gpus_per_trial}
        fixed = tune.with_parameters(_trainable, store_path=str(store.path), data_folder=str(folder), data=config.data)
        tuner = tune.Tuner(
            tune.with_resources(fixed, per_trial),
            param_space={"spec": tune.grid_search([spec.to_dict() for spec in todo])},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=concurrent),
            run_config=tune.RunConfig(
                name=scratch.name,
                storage_path=str(scratch.parent),
                failure_config=tune.FailureConfig(max_failures=RESTARTS),
                callbacks=[_watcher(store, tell)],
                verbose=0,
            ),
        )
        tuner.fit()


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.parent.exists() and not any(folder.parent.iterdir()):
            folder.parent.rmdir()


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Ray for the length of a sweep: started here and shut down, or joined and left."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": len(os.sched_getaffinity(0))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address=address, **options)
    try:
        yield
    finally:
        ray.shutdown()


def _trainable(config: dict[str, Any], *, store_path: str, data_folder: str, data: DataConfig) -> None:
    """What an actor runs for one trial. The data is opened, or built where this node does not have it yet."""
    import torch
    from ray import tune

    from depthlaw.platform.data_build import build
    from depthlaw.platform.trial import run_trial

    spec = TrialSpec.from_dict(config["spec"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dataset = build(data, Path(data_folder))
    if dataset.fingerprint != spec.data_fingerprint:
        raise RuntimeError(f"data on this node is {dataset.fingerprint}, planned was {spec.data_fingerprint}")
    run_trial(spec, Store(store_path), dataset, report=tune.report)


def describe(spec: TrialSpec) -> str:
    """A trial in a few words, for people."""
    return f"{spec.topology} {spec.n_layers} x {spec.d_model}, {spec.tokens / 1e6:.3g}M tokens, lr {spec.lr:g}"


def _last_line(error: Any) -> str:
    """What a worker's error says, without the traceback that comes before it."""
    lines = [line.strip() for line in str(error or "the worker was lost").splitlines() if line.strip()]
    return lines[-1][:500]


def _watcher(store: Store, tell: Callable[[TrialSpec | None, str], None]) -> Any:
    from ray.tune import Callback

    class Watcher(Callback):
        """Follows the trials from the driver; stores `failed` for those whose worker died too often."""

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            spec = TrialSpec.from_dict(trial.config["spec"])
            if "val_loss" in result:
                tell(None, f"{describe(spec)}: step {result['step']}, val_loss {result['val_loss']:.4f}")
            elif "status" in result:
                tell(spec, f"{describe(spec)}: {result['status']}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            from depthlaw.platform.trial import trial_row

            spec = TrialSpec.from_dict(trial.config["spec"])
            reason = _last_line(trial.get_error())
            store.write_trial(trial_row(spec, store.next_attempt(spec.hash), "failed", reason))
            tell(spec, f"{describe(spec)}: failed")

    return Watcher()
