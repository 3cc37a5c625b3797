"""What tests of several files need, as functions: processes, kills, tables that people read."""

import itertools
import time
from contextlib import suppress

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


def row_of(text, *cells):
    """The one line of a table that begins with these cells, as its words."""
    found = [line.split() for line in text.splitlines() if line.split()[: len(cells)] == [str(c) for c in cells]]
    assert len(found) == 1, text
    return found[0]
