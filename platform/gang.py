"""The other ranks of a trial: Ray actors in the trial's own placement group, one a bundle, ended with the trial."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from depthlaw.platform.data_config import DataConfig
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.ranks import Ranks, bind_to, joined, meeting_point

# How long rank 0, broken off in a collective, waits to hear from Ray which rank was lost.
NEWS_S = 5.0


class RankError(RuntimeError):
    """A rank failed or was lost, and the attempt with it. One line."""


class _Others:
    """The actors of ranks 1 .. world - 1 and what became of them."""

    def __init__(self, actors: list[Any], results: list[Any]) -> None:
        self.actors, self.results = actors, results
        self.failure: Exception | None = None
        self.known = threading.Event()  # that one failed
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        """Ends all ranks when one fails: rank 0 would wait in a collective for what never comes."""
        import ray

        pending = dict(zip(self.results, range(1, len(self.results) + 1), strict=True))
        while pending and not self.over.is_set():
            done, _ = ray.wait(list(pending), num_returns=1, timeout=0.2)
            for result in done:
                rank = pending.pop(result)
                try:
                    ray.get(result)
                except Exception as error:
                    if not self.over.is_set():
                        self.failure = _told(error, rank, len(self.results) + 1)
                        self.known.set()
                        self.end()
                    return

    def lost(self) -> None:
        """Called by rank 0 when it fails: was it because of another rank? Ends them before it leaves the group."""
        self.known.wait(NEWS_S)
        self.end()

    def end(self) -> None:
        import ray

        self.over.set()
        for actor in self.actors:
            with suppress(Exception):  # dead already
                ray.kill(actor)
        if torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
            # gloo fails when a peer's socket closes; NCCL may wait for its timeout. A private name.
            torch.distributed.distributed_c10d._abort_process_group()


def _told(error: Exception, rank: int, world: int) -> Exception:
    """The error of another rank as this one raises it: out of memory stays what it is."""
    from ray.exceptions import RayActorError, RayTaskError

    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    if isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(f"rank {rank} of {world}: {error}")
    if isinstance(error, RayActorError):
        return RankError(f"rank {rank} of {world}: its process died: killed, or out of memory")
    return RankError(f"rank {rank} of {world}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")


def _actor_class() -> Any:
    import ray

    @ray.remote(max_restarts=0, max_task_retries=0)
    class Rank:
        """One process beside the trial's own."""

        def train(
            self, spec: TrialSpec, rank: int, address: str, port: int, store: str, folder: str, data: DataConfig
        ) -> None:
            from depthlaw.platform.data_build import build
            from depthlaw.platform.store import Store
            from depthlaw.platform.trial import run_rank

            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            bind_to(ray.util.get_node_ip_address())
            ranks = Ranks(rank, spec.ranks, joined(address, port))
            run_rank(spec, Store(store), build(data, Path(folder)), ranks)

    return Rank


@contextmanager
def ray_gang(spec: TrialSpec, store: str, folder: str, data: DataConfig) -> Iterator[Ranks]:
    """The gang of a trial whose actor, which is rank 0, runs in a placement group of `spec.ranks` bundles.

    Everything listens on the address that Ray gives the node: loopback in a cluster that `sweep` starts itself.
    Raises RankError when another rank failed, or torch.OutOfMemoryError when it had no memory.
    """
    if spec.ranks == 1:
        yield Ranks()
        return
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    address = ray.util.get_node_ip_address()
    bind_to(address)
    meeting, port = meeting_point(address)
    kind, actors = _actor_class(), []
    for rank in range(1, spec.ranks):
        bundle = group.bundle_specs[rank]
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": place}
        actors.append(kind.options(**options).remote())
    results = [
        actor.train.remote(spec, rank, address, port, store, folder, data) for rank, actor in enumerate(actors, start=1)
    ]
    others = _Others(actors, results)
    try:
        yield Ranks(0, spec.ranks, meeting, others.lost)
        if others.failure is None:
            ray.get(results)  # they leave the group after the last step; killed before, they could not
    except Exception as error:
        if others.failure is None:
            raise
        raise others.failure from error
    finally:
        others.end()
