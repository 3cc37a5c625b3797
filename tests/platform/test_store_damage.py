"""Broken files, full disks, killed and crowding processes: nothing half-written, nothing lost, no query broken."""

import errno
import os
import random
import subprocess
import sys
import time
import warnings

import pytest

from depthlaw.platform import store_files
from depthlaw.platform.store import Store, StoreError
from depthlaw.platform.store_files import LocalFiles
from depthlaw.platform.store_parts import to_bytes, trial_table


def put(store, rows, attempt=0, sequence=0, experiment="e", topology="pre_ln", trial="t"):
    store.write_steps(experiment, topology, trial, attempt, sequence, rows)


def parts(store):
    return sorted((store.path / "steps").rglob("*.parquet"))


# Files that are no parts


def test_broken_and_foreign_files_are_left_out_with_a_warning_that_names_them(store, trial_row):
    import pyarrow as pa
    import pyarrow.parquet as pq

    put(store, [(1, "loss", 2.0)])
    store.write_trial(trial_row())
    folder = parts(store)[0].parent
    whole = parts(store)[0].read_bytes()
    (folder / "part-0-1.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "part-0-2.parquet").write_bytes(b"")
    (folder / "part-0-3.parquet").write_bytes(b"PAR1 not really PAR1")
    pq.write_table(pa.table({"x": [1]}), folder / "part-0-4.parquet")
    newer = pa.table({"x": [1]}).replace_schema_metadata({"schema_version": "2"})
    pq.write_table(newer, folder / "part-0-5.parquet")
    (folder / "part-0-6.parquet").write_bytes((store.path / "trials" / "t-0-finished.parquet").read_bytes())
    (folder / "part-0-7.parquet").mkdir()
    (folder / "notes.txt").write_text("mine")
    (store.path / "steps" / "backup").mkdir()
    (folder / ".0123.tmp").write_bytes(b"half")
    with pytest.warns(UserWarning, match="left out what cannot be read") as caught:
        assert store.steps()["value"].tolist() == [2.0]
    assert len(caught) == 1
    text = str(caught[0].message)
    for name in [*(f"part-0-{n}.parquet" for n in range(1, 8)), "notes.txt", "steps/backup"]:
        assert name in text
    assert "schema_version 2 is newer" in text
    assert ".tmp" not in text
    assert caught[0].filename == __file__
    assert store.unreadable == 9

    trials = store.path / "trials"
    whole = (trials / "t-0-finished.parquet").read_bytes()
    (trials / "u-0-finished.parquet").write_bytes(whole[:100])
    (trials / "v-0-finished.parquet").write_bytes(b"")
    (trials / "t-0-finished (1).parquet").write_bytes(whole)
    for query in (store.trials, store.attempts, store.cells, store.statuses):
        with pytest.warns(UserWarning, match=r"t-0-finished \(1\).parquet.*u-0-finished.parquet.*v-0-finished.parquet"):
            assert len(query()) == 1
    assert store.unreadable == 12


def test_no_cut_and_no_flipped_byte_crashes_a_query_or_changes_a_value(store):
    put(store, [(s, "loss", s * 0.5) for s in range(50)])
    good = store.steps()
    (path,) = parts(store)
    whole = path.read_bytes()
    rng = random.Random(2)
    damaged = [whole[:n] for n in range(0, len(whole), 23)]
    for _ in range(150):
        flipped = bytearray(whole)
        flipped[rng.randrange(4, len(whole) // 3)] ^= 1 << rng.randrange(8)  # in the data pages
        damaged.append(bytes(flipped))
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for data in damaged:
            path.write_bytes(data)
            frame = Store(store.path).steps()
            assert len(frame) == 0 or frame.equals(good)
            refused += len(frame) == 0
    assert refused > 0.8 * len(damaged)


def test_a_part_without_permission_is_left_out_with_a_warning(store, monkeypatch):
    def denied(self, key):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    put(store, [(1, "loss", 2.0)])
    monkeypatch.setattr(LocalFiles, "read", denied)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert len(store.steps()) == 0


# Disks


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_full_disk_gives_one_clear_error_and_leaves_nothing_behind(store, monkeypatch, failing, trial_row):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    put(store, [(1, "loss", 2.0)])
    store.write_trial(trial_row())
    before = sorted(store.path.rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(store_files.os, failing, full)
        with pytest.raises(StoreError, match=r"cannot write .*part-0-1\.parquet: No space left on device"):
            put(store, [(2, "loss", 2.0)], sequence=1)
        with pytest.raises(StoreError, match=r"cannot write .*t-1-failed\.parquet: No space left on device"):
            store.write_trial(trial_row("t", 1, "failed"))
    assert sorted(store.path.rglob("*")) == before
    put(store, [(2, "loss", 2.0)], sequence=1)
    assert len(store.steps()) == 2


def test_a_disk_that_takes_only_half_of_a_part_shows_none_of_it(store):
    code = """
import resource, sys
from depthlaw.platform.store import Store, StoreError
store = Store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    store.write_steps("e", "pre_ln", "t", 0, 0, [(s, "loss", s ** 0.5) for s in range(5000)])
except StoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, store.path], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "File too large" in done.stdout
    assert [p for p in store.path.rglob("*") if p.is_file()] == [store.path / "store.json"]


def test_a_name_too_long_for_the_disk_is_a_clear_error(store):
    with pytest.raises(StoreError, match="File name too long"):
        put(store, [(1, "loss", 2.0)], experiment="日" * 100)


# Processes

WRITER = """
import sys
from depthlaw.platform.store import Store
store, me, count = Store(sys.argv[1]), sys.argv[2], int(sys.argv[3])
attempt = store.next_attempt(me)
for sequence in range(count):
    rows = [(sequence * 50 + s, name, float(s)) for s in range(50) for name in ("loss", "grad_norm")]
    store.write_steps("e", "pre_ln", me, attempt, sequence, rows)
    print(attempt, sequence, flush=True)
"""


def start_writer(store, name, count):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, store.path, name, str(count)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.engine
@pytest.mark.slow
def test_a_writer_killed_at_a_random_moment_leaves_only_whole_parts_and_all_it_reported(store):
    rng = random.Random(3)
    for attempt in range(24):
        writer = start_writer(store, "t", 100_000)
        assert writer.stdout.readline()  # it is past its imports
        time.sleep(rng.random() * 0.05)
        writer.kill()
        reported = [line.split() for line in writer.stdout.read().splitlines()]
        writer.wait()
        names = {p.name for p in parts(store)}
        assert all(f"part-{a}-{s}.parquet" in names and int(a) == attempt for a, s in reported)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        frame = store.steps()
    assert store.unreadable == 0
    sizes = [sum(1 for p in parts(store) if p.name.startswith(f"part-{a}-")) for a in range(24)]
    assert min(sizes) >= 1
    assert len(frame) == 100 * max(sizes)  # every part has its 100 rows, each attempt repeats the same steps
    store.compact("t")
    assert store.steps().equals(frame)


@pytest.mark.engine
def test_eight_writers_at_once_lose_nothing(store):
    writers = [start_writer(store, f"t{n}", 20) for n in range(8)]
    while any(writer.poll() is None for writer in writers):
        seen = store.steps()
        assert len(seen) % 100 == 0  # a reader in between sees whole parts only
        time.sleep(0.05)
    for writer in writers:
        writer.stdout.close()
        assert writer.returncode == 0
    frame = store.steps()
    assert len(frame) == 8 * 20 * 100
    assert frame.groupby("trial").size().tolist() == [2000] * 8
    assert store.unreadable == 0


@pytest.mark.engine
@pytest.mark.slow
def test_five_thousand_trials_are_read_in_seconds(store, trial_row):
    folder = store.path / "trials"
    folder.mkdir()
    for n in range(5000):
        (folder / f"t{n}-0-finished.parquet").write_bytes(to_bytes(trial_table(trial_row(f"t{n}"))))
    start = time.perf_counter()
    assert len(store.attempts()) == 5000
    rows = time.perf_counter() - start
    start = time.perf_counter()
    assert len(store.statuses()) == 5000
    names = time.perf_counter() - start
    assert rows < 20  # about 2.5 s on two quiet cores
    assert names < 5  # about 0.2 s
