"""Running a plan: Ray Tune over the trials that the store does not have, each in a reused actor."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthlaw.platform.config import ConfigError, SweepConfig
from depthlaw.platform.data_config import DataConfig, DataError, data_root
from depthlaw.platform.own_folder import own_folder, remove_abandoned
from depthlaw.platform.plan import SETTLED, TrialSpec, missing, plan
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.watcher import Tell, describe, watcher

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
    routine: bool = False  # one of many like it, which may go unseen


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

    if address == "local":
        _check_resources(config)
    folder = (data_folder or data_root()).absolute()
    dataset = build(config.data, folder, progress=lambda text: listener(Progress(0, 0, 0, 0, text)))
    trials = plan(config, dataset.fingerprint)
    _check_text(trials, dataset, config)
    store.write_plan(config.name, [spec.plan_row() for spec in trials])
    todo = missing(trials, store.statuses())
    # Longest first: the short ones then fill the gaps at the end.
    todo.sort(key=lambda spec: spec.train_flops, reverse=True)
    problems: dict[str, str] = {}
    if todo:
        problems = _run(todo, config, store, folder, address, concurrent, _counting(listener, trials, todo))
    failed = missing(trials, store.statuses())
    if failed:
        first = failed[0]
        raise SweepError(
            f"{len(failed)} of {len(trials)} trials have no result (first: {describe(first)}: "
            f"{problems.get(first.hash, 'not run')}); run the same command again to go on"
        )
    return trials


def _check_text(trials: list[TrialSpec], dataset: Dataset, config: SweepConfig) -> None:
    """There is a window to validate on, and text is never repeated silently. Raises DataError."""
    dataset.n_windows("validation", config.seq_len)
    allowed = config.max_epochs
    largest = max(trials, key=lambda spec: spec.tokens)
    epochs = dataset.epochs(largest.tokens, largest.seq_len)
    if epochs > allowed:
        raise DataError(
            f"the corpus has {dataset.n_tokens('train'):,} training tokens, and {describe(largest)} would make "
            f"{epochs:.3g} epochs where max_epochs allows {allowed:g}: use more text, fewer tokens per parameter, "
            "or a larger max_epochs"
        )


def _check_resources(config: SweepConfig) -> None:
    """A trial that this machine can never hold would wait for ever. Raises ConfigError."""
    cpus, ranks = _cpus(), config.ranks_per_trial
    if config.cpus_per_rank * ranks > cpus:
        times = f" x ranks_per_trial {ranks}" if ranks > 1 else ""
        raise ConfigError(
            f"cpus_per_rank is {config.cpus_per_rank}{times} and this machine has {cpus}: ask for at most {cpus}, or "
            "give the --address of a Ray cluster that has more"
        )
    if config.gpus_per_rank:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"gpus_per_rank is {config.gpus_per_rank} and this machine has no GPU that torch can use: set it to "
                "0, or give the --address of a Ray cluster that has GPUs"
            )


def _check_nodes(per_rank: dict[str, int], ranks: int) -> None:
    """The same for the nodes of a cluster that is up. Raises ConfigError."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(
        int(min(node.get(name.upper(), 0) // n for name, n in per_rank.items() if n))  # cpu is never 0
        for node in nodes
    )
    if room < ranks:
        largest = ", ".join(f"{int(max(node.get(name.upper(), 0) for node in nodes))} {name}s" for name in per_rank)
        raise ConfigError(
            f"a trial needs {ranks} times {per_rank['cpu']} cpus and {per_rank['gpu']} gpus, each on one node, and "
            f"the cluster has them {room} times (the most on one node: {largest}): change ranks_per_trial, "
            "cpus_per_rank or gpus_per_rank, or add nodes"
        )


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _counting(listener: Listener, trials: list[TrialSpec], todo: list[TrialSpec]) -> Tell:
    """Turns single events into the running totals that a listener sees."""
    total = float(sum(spec.train_flops for spec in trials))
    left = {spec.hash: spec.train_flops for spec in todo}

    def tell(ended: TrialSpec | None, message: str, *, routine: bool = False) -> None:
        if ended is not None:
            left.pop(ended.hash, None)
        done, flops_done = len(trials) - len(left), total - sum(left.values())
        listener(Progress(done, len(trials), flops_done, total, message, routine))

    return tell


def _run(
    todo: list[TrialSpec],
    config: SweepConfig,
    store: Store,
    folder: Path,
    address: str,
    concurrent: int | None,
    tell: Tell,
) -> dict[str, str]:
    """Runs the trials; returns why those that failed for good did, by hash."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # the project's store is the record
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"  # its tables go to stdout at any verbosity
    # Tune's own handler waits for every trial's next report; the store needs no such grace.
    os.environ["TUNE_DISABLE_SIGINT_HANDLER"] = "1"
    from ray import tune

    # Tune's own files serve only the run: what matters is in the store, so they go when it ends.
    problems: dict[str, str] = {}
    tell(None, f"{len(todo)} trials to run; starting Ray")
    with _cluster(address), _scratch(store) as scratch:
        per_rank = {"cpu": config.cpus_per_rank, "gpu": config.gpus_per_rank}
        _check_nodes(per_rank, config.ranks_per_trial)
        bundle = {name.upper(): n for name, n in per_rank.items() if n}
        # Tune copies the whole grid for each trial, so the grid is of hashes: 2000 whole specs would take minutes.
        specs = {spec.hash: spec for spec in todo}
        fixed = tune.with_parameters(
            _trainable,
            specs={trial: spec.to_dict() for trial, spec in specs.items()},
            store_path=str(store.path),
            data_folder=str(folder),
            data=config.data,
        )
        tuner = tune.Tuner(
            tune.with_resources(fixed, tune.PlacementGroupFactory([bundle] * config.ranks_per_trial)),
            param_space={"trial": tune.grid_search(list(specs))},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=concurrent),
            run_config=tune.RunConfig(
                name=scratch.name,
                storage_path=str(scratch.parent),
                failure_config=tune.FailureConfig(max_failures=RESTARTS),
                callbacks=[watcher(specs, store, tell, problems)],
                verbose=0,
            ),
        )
        with suppress(EOFError):  # a full disk cut short the file in which Ray keeps a trial's error
            tuner.fit()
    return problems


@contextmanager
def _scratch(store: Store) -> Iterator[Path]:
    root = store.path / "ray"
    try:
        root.mkdir(exist_ok=True)
        remove_abandoned(root)
    except OSError as error:
        raise StoreError(f"cannot write {root}: {error.strerror}") from error
    try:
        with own_folder(root) as folder:
            yield folder
    finally:
        with suppress(OSError):  # another sweep's is in it
            root.rmdir()


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """Ray for the length of a sweep: started here and shut down, or joined and left."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import tune

    # What Ray prints and logs about a lost worker or a failed trial, the watcher says in a line.
    over_networks = ray._private.ray_constants.ENABLE_RAY_CLUSTER
    ray._private.worker._worker_logs_enabled = False  # a private name: a test fails when it goes
    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": _cpus()}
        # On loopback, all of it: for this machine only. Also a private name with a test; the environment's variable
        # of this meaning is read when ray is imported, which may be long past.
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
    else:
        _check_reachable(address)
        options |= {"runtime_env": _shipped()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=address, **options)
    except Exception as error:  # Ray raises plain Exception too
        hint = "; RAY_TMPDIR names the folder it works in" if address == "local" else ""
        raise SweepError(f"Ray cannot start with address {address}: {_in_one_line(error)}{hint}") from error
    try:
        yield
    except (ray.exceptions.RayError, tune.TuneError, OSError) as error:
        *_, last = str(error).strip().splitlines() or [type(error).__name__]  # below another process's traceback
        raise SweepError(f"Ray failed: {last[:300]}; run the same command again to go on") from error
    finally:
        ray.shutdown()
        ray._private.ray_constants.ENABLE_RAY_CLUSTER = over_networks


def _shipped() -> dict[str, Any]:
    """What the nodes of a cluster get: this very code, so that they need its dependencies but not depthlaw itself."""
    import depthlaw
    from depthlaw.platform.trial import COMMIT, code_commit

    (package,) = depthlaw.__path__  # its links to the rooms are followed
    env_vars = {COMMIT: code_commit() or ""}
    return {"py_modules": [package], "excludes": ["**/__pycache__"], "env_vars": env_vars}


def _check_reachable(address: str) -> None:
    """Ray would try for minutes. Raises SweepError."""
    host, _, port = address.split("://")[-1].rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise SweepError(f"nothing answers at the Ray address {address} ({error}): is the cluster up?") from error


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _trainable(
    config: dict[str, Any], *, specs: dict[str, Any], store_path: str, data_folder: str, data: DataConfig
) -> None:
    """What an actor runs for one trial. The data is opened, or built where this node does not have it yet."""
    import torch
    from ray import tune

    from depthlaw.platform import checkpoint
    from depthlaw.platform.data_build import build
    from depthlaw.platform.gang import ray_gang
    from depthlaw.platform.trial import run_trial

    spec, store = TrialSpec.from_dict(specs[config["trial"]]), Store(store_path)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dataset = build(data, Path(data_folder))
    if dataset.fingerprint != spec.data_fingerprint:
        raise RuntimeError(f"data on this node is {dataset.fingerprint}, planned was {spec.data_fingerprint}")
    folder = store.checkpoint_dir(spec.hash)
    with checkpoint.held(folder, waiting=lambda: tune.report({"waiting": True})):
        # Another sweep on the same store may have settled it since this one was planned.
        status = store.statuses().get(spec.hash) if store.next_attempt(spec.hash) else None
        if status in SETTLED:
            checkpoint.delete(folder)
            tune.report({"step": spec.steps, "status": status})
        else:
            gang = partial(ray_gang, store=store_path, folder=data_folder, data=data)
            run_trial(spec, store, dataset, report=tune.report, gang=gang)
