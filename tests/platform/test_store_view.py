"""The reading view, and the compaction of a trial: each measurement once, and the one that counts."""

import math
import os
import random
import warnings

import pytest

from depthlaw.platform import store_files
from depthlaw.platform.store_files import LocalFiles
from support import KilledError, killed_after


def put(store, rows, attempt=0, sequence=0, experiment="e", topology="pre_ln", trial="t"):
    store.write_steps(experiment, topology, trial, attempt, sequence, rows)


def parts(store):
    return sorted((store.path / "steps").rglob("*.parquet"))


def view(frame):
    return {(r.trial, r.step, r.name_): r.value for r in frame.rename(columns={"name": "name_"}).itertuples()}


# The reading view


def random_history(store, rng, compact_sometimes):
    """Writes parts in a random but causal order and keeps what the view must show in a dictionary."""
    expected, owner = {}, {}
    for trial in ("a", "b", "c"):
        for attempt in range(rng.randint(1, 4)):
            for sequence in range(rng.choice([1, 3, 12])):  # by name part-0-10 comes before part-0-2
                experiment = "e1" if attempt < 2 else "e2"
                rows = [
                    (rng.randrange(30), rng.choice(["loss", "grad_norm", "λ"]), rng.random())
                    for _ in range(rng.randint(1, 25))
                ]
                put(store, rows, attempt, sequence, experiment, "hc(streams=2)", trial)
                for step, name, value in rows:
                    expected[trial, step, name] = value
                    owner[trial, step, name] = experiment
                if compact_sometimes and rng.random() < 0.3:
                    store.compact(trial)
    return expected, owner


@pytest.mark.parametrize("compact_sometimes", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_view_is_the_dictionary_of_last_writes(store, seed, compact_sometimes):
    expected, owner = random_history(store, random.Random(seed), compact_sometimes)
    frame = store.steps()
    assert len(frame) == len(expected)
    assert view(frame) == expected
    keys = list(zip(frame["trial"], frame["step"], frame["name"], strict=True))
    assert keys == sorted(keys)
    for wanted in ({"trial": "b"}, {"experiment": "e1"}, {"experiment": "e2", "names": ["loss", "λ"]}, {"names": "λ"}):
        kept = {
            key: value
            for key, value in expected.items()
            if wanted.get("trial", key[0]) == key[0]
            and wanted.get("experiment", owner[key]) == owner[key]
            and key[2] in wanted.get("names", key[2])
        }
        assert view(store.steps(**wanted)) == kept
    assert len(store.steps(topology="pre_ln")) == len(store.steps(trial="none")) == len(store.steps(names=[])) == 0


# Compaction


def history_to_compact(store):
    put(store, [(s, "loss", 100.0 + s) for s in range(20)], 0, 0)
    put(store, [(s, "loss", 200.0 + s) for s in range(15, 30)], 0, 1)
    put(store, [(s, "loss", 300.0 + s) for s in range(10, 25)], 1, 0)
    put(store, [(24, "loss", -1.0), (24, "loss", math.inf)], 1, 1)
    put(store, [(s, "loss", 400.0 + s) for s in range(5)], 2, 0, experiment="other")
    put(store, [(5, "loss", 405.0)], 2, 1, experiment="other")


@pytest.mark.parametrize("crash", range(12))
def test_compaction_killed_at_any_call_loses_and_repeats_nothing(store, monkeypatch, crash):
    history_to_compact(store)
    before = store.steps()
    dying = killed_after(crash)
    with monkeypatch.context() as patch:
        patch.setattr(store_files.os, "fsync", dying(os.fsync))
        patch.setattr(store_files.os, "replace", dying(os.replace))
        patch.setattr(LocalFiles, "delete", dying(LocalFiles.delete))
        try:
            store.compact("t")
            finished = True
        except KilledError:
            finished = False
    assert finished == (crash >= 10)
    assert store.steps().equals(before)
    put(store, [(0, "loss", -7.0)], 3, 0)  # a later attempt still wins over whatever state was left
    store.compact("t")
    after = store.steps()
    assert len(parts(store)) == 2
    assert after["value"].tolist()[0] == -7.0
    assert after.iloc[1:].equals(before.iloc[1:])


def test_compaction_keeps_what_earlier_attempts_measured(store):
    import pyarrow.parquet as pq

    history_to_compact(store)
    store.compact("t")
    merged = [row for p in parts(store) for row in pq.ParquetFile(p).read().to_pylist()]
    by_attempt = {a: {r["step"]: r["value"] for r in merged if r["attempt"] == a} for a in (0, 1, 2)}
    assert by_attempt[0] == {s: (100.0 if s < 15 else 200.0) + s for s in range(30)}
    assert by_attempt[1] == {s: 300.0 + s for s in range(10, 24)} | {24: math.inf}
    assert by_attempt[2] == {s: 400.0 + s for s in range(6)}
    assert len(merged) == 30 + 15 + 6


@pytest.mark.parametrize("kept", range(16))
def test_old_parts_that_reappear_beside_the_merged_one_count_once(store, kept):
    history_to_compact(store)
    before = store.steps()
    old = {p: p.read_bytes() for p in parts(store) if "experiment=e" in str(p)}
    assert store.compact("t") == 4
    for bit, (path, data) in enumerate(sorted(old.items())):
        if kept >> bit & 1 and not path.exists():
            path.write_bytes(data)
    assert store.steps().equals(before)
    assert store.next_attempt("t") == 3


def test_compaction_leaves_an_unreadable_part_where_it_is(store):
    history_to_compact(store)
    broken = next(p for p in parts(store) if p.name == "part-0-1.parquet")
    broken.write_bytes(broken.read_bytes()[:50])
    with pytest.warns(UserWarning, match=r"part-0-1\.parquet"):
        before = store.steps()
    with pytest.warns(UserWarning, match=r"part-0-1\.parquet"):
        assert store.compact("t") == 3
    assert broken.exists()
    with pytest.warns(UserWarning, match=r"part-0-1\.parquet"):
        assert store.steps().equals(before)


def test_a_reader_sees_every_row_while_parts_are_merged_under_it(store, monkeypatch):
    history_to_compact(store)
    before = store.steps()
    real, done = LocalFiles.read, []

    def read(self, key):
        data = real(self, key)
        if not done and key.endswith("part-0-0.parquet"):
            done.append(key)
            # The listing was made before: it lacks the part that everything is merged into.
            put(store, [(99, "loss", 1.0)], 1, 2)
            store.compact("t")
        return data

    monkeypatch.setattr(LocalFiles, "read", read)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = store.steps()
    assert done
    assert seen[seen["step"] != 99].equals(before)
