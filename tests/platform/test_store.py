"""The store's promises: nothing half-written, nothing lost or counted twice, nothing that breaks a query."""

import errno
import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from datetime import UTC, datetime

import numpy as np
import pytest

from depthlaw.platform import store_files
from depthlaw.platform.store import STATUSES, TRIAL_COLUMNS, Store, StoreError
from depthlaw.platform.store_files import LocalFiles, decode, encode
from depthlaw.platform.store_parts import to_bytes, trial_table

WEIRD = [
    "hc(streams=2)",
    "a/b\\c",
    "..",
    ".hidden",
    "100%",
    "%2F",
    "a=b",
    "trial=x-1",
    "naïve 日本",
    "x\ny",
    " ",
    "2024",
]


def trial_row(trial="t", attempt=0, status="finished", **changes):
    row = {
        "trial": trial,
        "attempt": attempt,
        "recipe_hash": "r",
        "experiment": "e",
        "topology": "pre_ln",
        "n_layers": 4,
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 2,
        "d_ff": 176,
        "vocab_size": 1024,
        "seq_len": 128,
        "lr": 1e-3,
        "tokens": 1_000_000,
        "seed": 0,
        "status": status,
        "val_loss": 3.0 if status == "finished" else None,
    }
    return row | changes


@pytest.fixture
def store(tmp_path):
    return Store.create(tmp_path / "store")


def put(store, rows, attempt=0, sequence=0, experiment="e", topology="pre_ln", trial="t"):
    store.write_steps(experiment, topology, trial, attempt, sequence, rows)


def parts(store):
    return sorted((store.path / "steps").rglob("*.parquet"))


def view(frame):
    return {(r.trial, r.step, r.name_): r.value for r in frame.rename(columns={"name": "name_"}).itertuples()}


# Opening


def test_a_missing_store_says_the_path_and_the_command_that_makes_one(tmp_path):
    with pytest.raises(StoreError, match=r"no store at .*nowhere: `depthlaw sweep"):
        Store(tmp_path / "nowhere")


def test_a_file_is_not_a_store(tmp_path):
    (tmp_path / "f").write_text("x")
    for opener in (Store, Store.create):
        with pytest.raises(StoreError, match="is a file, and a store is a folder"):
            opener(tmp_path / "f")


def test_a_folder_without_the_marker_or_with_a_foreign_one_is_not_a_store(tmp_path):
    with pytest.raises(StoreError, match=r"not a store, for it has no store\.json"):
        Store(tmp_path)
    for text in ("", "[]", "{}", '{"schema_version": "1"}', "\x00"):
        (tmp_path / "store.json").write_text(text)
        for opener in (Store, Store.create):
            with pytest.raises(StoreError, match="no schema_version"):
                opener(tmp_path)


def test_a_newer_store_is_refused_and_left_alone(tmp_path):
    (tmp_path / "store.json").write_text('{"schema_version": 99}')
    for opener in (Store, Store.create):
        with pytest.raises(StoreError, match=r"schema_version 99 .* upgrade depthlaw"):
            opener(tmp_path)
    assert (tmp_path / "store.json").read_text() == '{"schema_version": 99}'


def test_an_address_is_refused_instead_of_becoming_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="s3://bucket/runs is an address"):
        Store.create("s3://bucket/runs")
    assert not list(tmp_path.iterdir())


def test_create_twice_keeps_what_is_there(store):
    put(store, [(1, "loss", 2.0)])
    assert len(Store.create(store.path).steps()) == 1


def test_a_relative_path_survives_a_change_of_folder_and_a_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store.create("runs")
    put(store, [(1, "loss", 2.0)])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(pickle.loads(pickle.dumps(store)).steps()) == 1


def test_an_empty_store_answers_every_query_with_the_usual_columns(store):
    full = Store.create(store.path.parent / "full")
    put(full, [(1, "loss", 2.0)])
    full.write_trial(trial_row())
    for query in ("attempts", "trials", "steps", "cells"):
        empty, filled = getattr(store, query)(), getattr(full, query)()
        assert list(empty.columns) == list(filled.columns)
        assert len(empty) == 0
    assert store.statuses() == {}
    assert store.next_attempt("t") == 0
    assert store.compact("t") == 0


def test_importing_the_store_loads_neither_pyarrow_nor_pandas():
    code = "import sys, depthlaw.platform.store; print([m for m in ('pyarrow', 'pandas', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Rows


def test_nan_and_infinities_are_data_and_come_back(store):
    put(store, [(0, "a", math.nan), (0, "b", math.inf), (0, "c", -math.inf), (2**40, "d", 5e-324)])
    a, b, c, d = store.steps()["value"]
    assert math.isnan(a)
    assert (b, c, d) == (math.inf, -math.inf, 5e-324)


@pytest.mark.parametrize("label", WEIRD)
def test_any_experiment_topology_trial_and_metric_name_comes_back(store, label):
    put(store, [(1, label, 2.0)], experiment=label, topology=label, trial=label)
    store.write_trial(trial_row(trial=label, experiment=label, topology=label))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps = store.steps(trial=label, experiment=label, topology=label, names=label)
        assert steps[["experiment", "topology", "trial", "name"]].to_numpy().tolist() == [[label] * 4]
        assert store.steps().equals(steps)
        assert store.trials()[["experiment", "topology", "trial"]].to_numpy().tolist() == [[label] * 3]
        assert store.statuses() == {label: "finished"}
    assert store.next_attempt(label) == 1
    assert store.checkpoint_dir(label).parent == store.path / "checkpoints"
    outside = [p.name for p in store.path.parent.iterdir()]
    assert outside == ["store"]


def test_encoding_never_maps_two_names_to_one():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choice("a.%/=2E-_é\\") for _ in range(rng.randint(1, 6)))
        assert decode(encode(text)) == text
        assert "/" not in encode(text)
        assert not encode(text).startswith(".")


@pytest.mark.parametrize("bad", ["", None, 3, "\udcff"])
def test_a_name_that_cannot_be_a_path_is_refused(store, bad):
    with pytest.raises(StoreError, match="experiment is"):
        put(store, [(1, "loss", 2.0)], experiment=bad)


def test_pyarrow_reads_the_folders_as_a_hive_layout(store):
    import pyarrow.dataset as ds

    put(store, [(1, "loss", 2.0)], experiment="my run", topology="hc(streams=2)")
    (row,) = ds.dataset(store.path / "steps", partitioning="hive").to_table().to_pylist()
    assert (row["experiment"], row["topology"], row["trial"], row["value"]) == ("my run", "hc(streams=2)", "t", 2.0)


def test_every_part_states_its_schema_version(store):
    import pyarrow.parquet as pq

    put(store, [(1, "loss", 2.0)])
    put(store, [(2, "loss", 2.0)], sequence=1)
    store.write_trial(trial_row())
    for _ in range(2):
        found = list(store.path.rglob("*.parquet"))
        assert all(pq.read_schema(p).metadata[b"schema_version"] == b"1" for p in found)
        assert store.compact("t") in (0, 1)


@pytest.mark.parametrize(
    "row",
    [
        (1.5, "loss", 2.0),
        (1, "loss", "x"),
        (1, "loss", "2.0"),
        (1, "loss", None),
        (1, "", 2.0),
        (1, 2, 3),
        (1, "loss"),
        7,
        (2**70, "l", 1),
    ],
)
def test_a_bad_step_row_is_refused_and_nothing_is_written(store, row):
    with pytest.raises(StoreError, match="step row"):
        put(store, [(0, "loss", 1.0), row])
    assert parts(store) == []


def test_no_rows_make_no_part(store):
    put(store, iter(()))
    assert parts(store) == []


@pytest.mark.parametrize("bad", [-1, 1.0, "0", True, 2**31])
def test_attempt_and_sequence_are_whole_numbers_from_zero(store, bad):
    with pytest.raises(StoreError, match="whole number from 0"):
        put(store, [(1, "loss", 2.0)], attempt=bad)
    with pytest.raises(StoreError, match="whole number from 0"):
        put(store, [(1, "loss", 2.0)], sequence=bad)


def test_the_same_part_may_be_written_again_but_not_another_in_its_place(store):
    put(store, [(1, "loss", 2.0)])
    put(store, [(1, "loss", 2.0)])
    with pytest.raises(StoreError, match="running twice"):
        put(store, [(1, "loss", 9.0)])
    assert store.steps()["value"].tolist() == [2.0]


# Trial rows


def test_a_trial_row_comes_back_whole(store):
    now = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    row = trial_row(
        tokens_done=7, tokens_per_param=20.0, batch_tokens=8, steps=9, steps_done=9, backbone_params=10**11,
        embedding_params=11, params=10**11 + 11, train_flops=6 * 10**22, wall_s=1.5, train_s=1.25,
        peak_memory_bytes=2**40, reason="", bits_per_byte=1.0, last_val_loss=3.0, val_tokens=4096,
        data_fingerprint="d", code_commit="g", numerics_version="1", epochs=1.0, device="cpu", versions="{}",
        spec=json.dumps({"a": 1}), started_at=now, ended_at=now,
    )  # fmt: skip
    assert set(row) == set(TRIAL_COLUMNS)
    store.write_trial(row)
    (back,) = store.trials().to_dict("records")
    assert back == row


def test_numbers_of_numpy_fit_a_trial_row_and_step_rows(store):
    store.write_trial(
        trial_row(val_loss=np.float32(0.5), n_layers=np.int32(7), lr=np.float64(0.25), tokens=np.int64(9))
    )
    put(store, [(np.int64(3), "loss", np.float32(0.5))])
    (row,) = store.trials().to_dict("records")
    assert (row["val_loss"], row["n_layers"], row["lr"], row["tokens"]) == (0.5, 7, 0.25, 9)
    assert store.steps()[["step", "value"]].to_numpy().tolist() == [[3, 0.5]]


def test_columns_that_are_left_out_are_null_and_keep_their_type(store):
    store.write_trial(trial_row())
    before = store.trials().dtypes
    assert store.trials()["steps_done"].isna().all()
    store.write_trial(trial_row("u", steps_done=5))
    assert store.trials().dtypes.equals(before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": 1, "hostname": "h"}, "unknown trial columns colour, hostname"),
        ({"status": "done"}, "status is 'done'; it must be one of finished, diverged"),
        ({"lr": None, "seed": None}, "needs lr, seed"),
        ({"lr": "fast"}, "trial column lr is 'fast'; it must be a number"),
        ({"n_layers": 1.5}, "trial column n_layers is 1.5; it must be a whole number"),
        ({"device": 3}, "trial column device is 3; it must be text"),
        ({"started_at": datetime(2026, 1, 1)}, "it must be a datetime with a time zone"),
        ({"val_loss": None}, "val_loss is None for a finished trial"),
        ({"val_loss": math.nan}, "val_loss is nan for a finished trial"),
        ({"status": "diverged", "val_loss": 3.0}, "use last_val_loss"),
        ({"attempt": -1}, "attempt is -1"),
        ({"lr": "1e-3"}, "trial column lr is '1e-3'; it must be a number"),
        ({"seed": True}, "trial column seed is True; it must be a whole number"),
        ({"tokens": 2**63}, "trial column tokens is"),
        ({"spec": {"a": 1}}, "trial column spec is {'a': 1}; it must be text"),
        ({"trial": ""}, "trial is ''"),
    ],
)
def test_a_trial_row_that_does_not_fit_is_refused_by_name(store, changes, message):
    with pytest.raises(StoreError, match=message):
        store.write_trial(trial_row() | changes)
    assert len(store.attempts()) == 0


def test_the_last_attempt_stands_for_a_trial_but_never_hides_a_finished_one(store):
    for attempt, status in enumerate(["failed", "finished", "stopped"]):
        store.write_trial(trial_row("a", attempt, status))
    for attempt, status in enumerate(["failed", "diverged"]):
        store.write_trial(trial_row("b", attempt, status))
    for attempt in range(11):  # 10 comes after 9
        store.write_trial(trial_row("c", attempt, "finished", val_loss=float(attempt)))
    trials = store.trials().set_index("trial")
    assert trials["status"].to_dict() == {"a": "finished", "b": "diverged", "c": "finished"} == store.statuses()
    assert trials["attempt"].to_dict() == {"a": 1, "b": 1, "c": 10}
    assert len(store.attempts()) == 16


def test_statuses_and_trials_agree_on_random_histories(store):
    rng = random.Random(1)
    for _ in range(150):
        store.write_trial(trial_row(f"t{rng.randrange(20)}", rng.randrange(4), rng.choice(STATUSES)))
    assert store.statuses() == store.trials().set_index("trial")["status"].to_dict()


def test_one_attempt_run_by_two_sweeps_keeps_the_finished_row(store):
    store.write_trial(trial_row("a", 0, "finished"))
    store.write_trial(trial_row("a", 0, "stopped"))
    assert store.statuses() == {"a": "finished"}
    assert len(store.attempts()) == 2


def test_the_next_attempt_counts_attempts_that_left_only_steps_or_only_a_row_or_a_broken_part(store):
    assert store.next_attempt("t") == 0
    put(store, [(1, "loss", 2.0)])
    assert store.next_attempt("t") == 1
    put(store, [(1, "loss", 2.0)], attempt=9, experiment="other")
    put(store, [(1, "loss", 2.0)], attempt=10)
    assert store.next_attempt("t") == 11
    store.compact("t")
    assert store.next_attempt("t") == 11
    store.write_trial(trial_row("t", 12, "failed"))
    (store.path / "trials" / "t-14-oom.parquet").write_bytes(b"")
    assert store.next_attempt("t") == 15
    assert store.next_attempt("t-14") == 0


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


class KilledError(Exception):
    pass


@pytest.mark.parametrize("crash", range(12))
def test_compaction_killed_at_any_call_loses_and_repeats_nothing(store, monkeypatch, crash):
    history_to_compact(store)
    before = store.steps()
    calls = 0

    def dying(real):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls > crash:
                raise KilledError
            return real(*args, **options)

        return call

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


# Files that are no parts


def test_broken_and_foreign_files_are_left_out_with_a_warning_that_names_them(store):
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
def test_a_full_disk_gives_one_clear_error_and_leaves_nothing_behind(store, monkeypatch, failing):
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


def test_five_thousand_trials_are_read_in_seconds(store):
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
