"""Ray that only this machine can reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@contextmanager
def only_loopback() -> Iterator[None]:
    """Every process of a Ray that is started inside listens on 127.0.0.1 or ::1.

    Otherwise Ray takes the address by which other machines reach this one and listens on every interface, also when it
    is told an address of the loopback. This is the switch by which it keeps to it on macOS and Windows.
    """
    from ray._private import ray_constants  # a private name, read once at import: a test looks at the sockets

    before = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(VARIABLE)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[VARIABLE] = False, "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[0]
        if before[1] is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before[1]
