"""The Ray cluster of a sweep: checked, started or joined, and left, with its trouble told in one line."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from depthlaw.platform.config import ConfigError, SweepConfig
from depthlaw.platform.ray_guard import keep_credentials_out, only_loopback


class SweepError(RuntimeError):
    """A sweep that ran but did not complete."""


def check_resources(config: SweepConfig) -> None:
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


def check_nodes(per_rank: dict[str, int], ranks: int, on_one_node: bool) -> None:
    """The same for the nodes of a cluster that is up. Raises ConfigError."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = [
        int(min(node.get(name.upper(), 0) // n for name, n in per_rank.items() if n))  # cpu is never 0
        for node in nodes
    ]
    found = max(room) if on_one_node else sum(room)
    if found < ranks:
        largest = ", ".join(f"{int(max(node.get(name.upper(), 0) for node in nodes))} {name}s" for name in per_rank)
        place = "all on one node, as its store is in a bucket" if on_one_node else "each on one node"
        raise ConfigError(
            f"a trial needs {ranks} times {per_rank['cpu']} cpus and {per_rank['gpu']} gpus, {place}, and "
            f"the cluster has them {found} times (the most on one node: {largest}): change ranks_per_trial, "
            "cpus_per_rank or gpus_per_rank, or add nodes"
        )


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def cluster(address: str) -> Iterator[None]:
    """Ray for the length of a sweep: started here and shut down, or joined and left."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import tune

    keep_credentials_out()
    # What Ray prints and logs about a lost worker or a failed trial, the watcher says in a line.
    ray._private.worker._worker_logs_enabled = False  # a private name: a test fails when it goes
    for name in ("ray", "ray.tune", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if address == "local":
        options |= {"include_dashboard": False, "num_cpus": _cpus()}
    else:
        _check_reachable(address)
        options |= {"runtime_env": _shipped()}
    try:
        with warnings.catch_warnings(), only_loopback() if address == "local" else nullcontext():
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


def _shipped() -> dict[str, Any]:
    """What the nodes of a cluster get: this very code, so that they need its dependencies but not depthlaw itself."""
    import depthlaw
    from depthlaw.platform.trial_row import COMMIT, code_commit

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
