"""What Ray would let out of this machine, and does not. Private names of Ray's: tests look at sockets and logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_loopback() -> Iterator[None]:
    """Every process of a Ray that is started inside listens on 127.0.0.1 or ::1.

    Otherwise Ray takes the address by which other machines reach this one and listens on every interface, also when it
    is told an address of the loopback. This is the switch by which it keeps to it on macOS and Windows.
    """
    from ray._private import ray_constants

    # The environment's variable of this meaning is read when ray is imported, which may be long past.
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def keep_credentials_out() -> None:
    """Tune hands the driver's AWS keys to each trial as part of its runtime environment, which Ray writes to its logs.

    A local Ray's processes inherit them anyway; the nodes of a cluster must have credentials of their own.
    """
    from ray.tune.execution import class_cache

    kept = {name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")}
    class_cache.ENV_VARS_TO_PROPAGATE = kept
