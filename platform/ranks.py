"""The processes that train one trial together, as one of them sees them: its number, and what all agree on."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True)
class Ranks:
    """One of `world` processes. `store` is where they meet; rank 0 holds it, the others are its clients.

    `lost` is called when this process fails while the others may wait for it: rank 0 ends them there.
    """

    rank: int = 0
    world: int = 1
    store: Any = field(default_factory=distributed.HashStore)
    lost: Callable[[], None] = lambda: None

    @property
    def first(self) -> bool:
        """The one that reports and writes rows."""
        return self.rank == 0

    def agreed(self, value: Any) -> Any:
        """What rank 0 gives: a decision that all follow."""
        if self.world == 1:
            return value
        said = [value]
        distributed.broadcast_object_list(said, src=0)
        return said[0]

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over ranks in float64; NaN on any of them is NaN on all."""
        values = values.double()
        if self.world > 1:
            distributed.all_reduce(values)
        return values

    def barrier(self) -> None:
        if self.world > 1:
            distributed.barrier()


@contextmanager
def alone(spec: Any) -> Iterator[Ranks]:
    """The gang of a trial that one process trains."""
    yield Ranks()


def meeting_point(address: str) -> tuple[Any, int]:
    """A store that listens on `address` only, and its port: taken before anyone else can, so there is no race."""
    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    # By itself the store would listen on every interface. It owns the descriptor from here on.
    store = distributed.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def joined(address: str, port: int) -> Any:
    """The same store for the other ranks."""
    return distributed.TCPStore(address, port, is_master=False)


def bind_to(address: str) -> None:
    """Makes gloo and NCCL listen on the interface of this address: loopback where the cluster is on loopback."""
    name = _interface(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def _interface(address: str) -> str | None:
    import psutil

    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return str(name)
    return None
