"""Running rounds of trials with Ray Tune, each trial in a reused actor."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from depthlaw.platform.cluster import check_nodes, cluster
from depthlaw.platform.config import SweepConfig
from depthlaw.platform.loggers import callbacks, run_name
from depthlaw.platform.own_folder import own_folder, remove_abandoned
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.pruning import Rungs, middle_out, stored_losses
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.trunk import families
from depthlaw.platform.watcher import Tell, watcher
from depthlaw.platform.worker import trainable
from depthlaw.scaling.units import counted

# A lost worker is started again this often, from its trial's last checkpoint.
RESTARTS = 3
# What Ray raises at the end of a round where a full disk cut short the file in which it keeps a trial's error. Why the
# trial failed is in `problems` by then.
CUT_SHORT = (EOFError, pickle.UnpicklingError)

# Takes the trials to run, all that are wanted, and who is told; returns why those that failed for good did, by hash.
Run = Callable[[list[TrialSpec], list[TrialSpec], Tell], dict[str, str]]


@contextmanager
def running(config: SweepConfig, store: Store, folder: Path, address: str, concurrent: int | None) -> Iterator[Run]:
    """A cluster for as long as a sweep lasts, and the function that runs one round on it."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the project's store is the record
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # its tables go to stdout at any verbosity
    # Tune's own handler waits for every trial's next report; the store needs no such grace.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    # Nor is its record of all trials read again, of which the next snapshot takes seconds where they are a thousand.
    os.environ.setdefault("TUNE_GLOBAL_CHECKPOINT_S", "1e9")
    per_rank = {"cpu": config.cpus_per_rank, "gpu": config.gpus_per_rank}
    bundle = {name.upper(): n for name, n in per_rank.items() if n}
    # Of a store in a bucket, checkpoints are in a folder of the machine: its ranks must share one.
    on_one_node = not isinstance(store.path, Path)
    # Tune's own files serve only the run: what matters is in the store, so they go when it ends.
    with cluster(address), _scratch(store) as scratch:
        check_nodes(per_rank, config.ranks_per_trial, on_one_node)

        def run(todo: list[TrialSpec], trials: list[TrialSpec], tell: Tell) -> dict[str, str]:
            from ray import tune

            places = tune.PlacementGroupFactory(
                [bundle] * config.ranks_per_trial, strategy="STRICT_PACK" if on_one_node else "PACK"
            )
            problems: dict[str, str] = {}
            runs = {family[0].hash: family for family in families(middle_out(todo))}
            tell(None, f"{counted(len(todo), 'trial')} to run")
            # Tune copies the whole grid for each trial, so the grid is of hashes: 2000 whole specs would take minutes.
            fixed = tune.with_parameters(
                trainable,
                runs={trial: [spec.to_dict() for spec in family] for trial, family in runs.items()},
                store_path=str(store.path),
                data_folder=str(folder),
                data=config.data,
                pruning=config.pruning,
                board=_board(config, store, trials),
                loggers=config.loggers,
                keep=config.keep_checkpoints != "none",
            )
            tuner = tune.Tuner(
                tune.with_resources(fixed, places),
                param_space={"trial": tune.grid_search(list(runs))},
                tune_config=tune.TuneConfig(
                    reuse_actors=True,
                    max_concurrent_trials=concurrent,
                    trial_name_creator=lambda trial: run_name(runs[trial.config["trial"]][0]),
                ),
                run_config=tune.RunConfig(
                    name=f"round{len(list(scratch.glob('round*')))}",
                    storage_path=str(scratch),
                    failure_config=tune.FailureConfig(max_failures=RESTARTS),
                    callbacks=[watcher(runs, store, tell, problems), *callbacks(config.loggers, runs, store)],
                    verbose=0,
                ),
            )
            with suppress(*CUT_SHORT):
                tuner.fit()
            return problems

        yield run


def _board(config: SweepConfig, store: Store, trials: list[TrialSpec]) -> Any:
    """The actor that says which trials of this round are pruned, told what the store knows; None without pruning."""
    if config.pruning is None:
        return None
    import ray

    board = ray.remote(num_cpus=0)(Rungs).remote(config.pruning.keep)
    ray.get([board.seen.remote(*known) for known in stored_losses(store, trials)])
    return board


@contextmanager
def _scratch(store: Store) -> Iterator[Path]:
    root = store.local_folder / "ray"
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_abandoned(root)
    except OSError as error:
        raise StoreError(f"cannot write {root}: {error.strerror}") from error
    try:
        with own_folder(root) as folder:
            yield folder
    finally:
        with suppress(OSError):  # another sweep's is in it
            root.rmdir()
