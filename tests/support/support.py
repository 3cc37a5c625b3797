"""What tests of several files need, as functions: processes, kills, runs on a line, laws, tables that people read."""

import itertools
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import psutil


def family(pid):
    """Processes below one, the deepest included; none if it is gone."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def titled(processes, *titles):
    """Those of them that run under such a title: Ray gives each process one that says what it runs."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith(titles):
                found.append(process)
    return found


def wait_for(condition, seconds=300.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise TimeoutError


class KilledError(Exception):
    pass


def killed_after(calls):
    """Wraps functions so that, of all calls of them together, so many are carried out and each later one is a kill."""
    made = itertools.count()

    def dying(real):
        def call(*args, **options):
            if next(made) >= calls:
                raise KilledError
            return real(*args, **options)

        return call

    return dying


def line_frame(runs=12, rows_a_run=1, seed=0):
    """Runs on the line ln loss = 1 - 0.1 n with a scatter of 5 %, each with as many rows, for laws of one size term."""
    rng = np.random.default_rng(seed)
    N = np.geomspace(1e6, 1e8, runs)
    loss = np.exp(1.0 - 0.1 * np.log(N / 1e7) + 0.05 * rng.standard_normal(runs))
    return {
        "topology": ["pre_ln"] * runs * rows_a_run,
        "backbone_params": np.repeat(N, rows_a_run),
        "tokens": np.tile(1e8 * np.arange(1.0, 1.0 + rows_a_run), runs),
        "n_layers": np.full(runs * rows_a_run, 4),
        "d_model": np.full(runs * rows_a_run, 64),
        "val_loss": np.repeat(loss, rows_a_run),
        "run": np.repeat([f"run {i}" for i in range(runs)], rows_a_run),
    }


def row_of(text, *cells):
    """The one line of a table that begins with these cells, as its words."""
    found = [line.split() for line in text.splitlines() if line.split()[: len(cells)] == [str(c) for c in cells]]
    assert len(found) == 1, text
    return found[0]


def partly_installed(law):
    """A law of hc and pre_ln in which pre_ln has the name of a topology that no package has, resnet."""
    labels = {"pre_ln": "resnet", "hc": "hc"}
    return replace(
        law,
        topologies=("hc", "resnet"),
        names=tuple(name.replace("pre_ln", "resnet") for name in law.names),
        ranges={labels.get(name, name): span for name, span in law.ranges.items()},
    )
