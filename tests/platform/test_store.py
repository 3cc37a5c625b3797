"""The store's promises: opening one, what rows it takes, and what comes back."""

import json
import math
import pickle
import random
import subprocess
import sys
import warnings
from datetime import UTC, datetime

import numpy as np
import pytest

from depthlaw.platform.store import STATUSES, TRIAL_COLUMNS, Store, StoreError
from depthlaw.platform.store_files import decode, encode

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


def put(store, rows, attempt=0, sequence=0, experiment="e", topology="pre_ln", trial="t"):
    store.write_steps(experiment, topology, trial, attempt, sequence, rows)


def parts(store):
    return sorted((store.path / "steps").rglob("*.parquet"))


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
    with pytest.raises(StoreError, match="gs://bucket/runs is not the address of a bucket: write s3://bucket/prefix"):
        Store.create("gs://bucket/runs")
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


def test_an_empty_store_answers_every_query_with_the_usual_columns(store, trial_row):
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
def test_any_experiment_topology_trial_and_metric_name_comes_back(store, label, trial_row):
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


def test_every_part_states_its_schema_version(store, trial_row):
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


def test_a_trial_row_comes_back_whole(store, trial_row):
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


def test_numbers_of_numpy_fit_a_trial_row_and_step_rows(store, trial_row):
    store.write_trial(
        trial_row(val_loss=np.float32(0.5), n_layers=np.int32(7), lr=np.float64(0.25), tokens=np.int64(9))
    )
    put(store, [(np.int64(3), "loss", np.float32(0.5))])
    (row,) = store.trials().to_dict("records")
    assert (row["val_loss"], row["n_layers"], row["lr"], row["tokens"]) == (0.5, 7, 0.25, 9)
    assert store.steps()[["step", "value"]].to_numpy().tolist() == [[3, 0.5]]


def test_columns_that_are_left_out_are_null_and_keep_their_type(store, trial_row):
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
def test_a_trial_row_that_does_not_fit_is_refused_by_name(store, changes, message, trial_row):
    with pytest.raises(StoreError, match=message):
        store.write_trial(trial_row() | changes)
    assert len(store.attempts()) == 0


def test_the_last_attempt_stands_for_a_trial_but_never_hides_a_finished_one(store, trial_row):
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


def test_statuses_and_trials_agree_on_random_histories(store, trial_row):
    rng = random.Random(1)
    for _ in range(150):
        store.write_trial(trial_row(f"t{rng.randrange(20)}", rng.randrange(4), rng.choice(STATUSES)))
    assert store.statuses() == store.trials().set_index("trial")["status"].to_dict()


def test_one_attempt_run_by_two_sweeps_keeps_the_finished_row(store, trial_row):
    store.write_trial(trial_row("a", 0, "finished"))
    store.write_trial(trial_row("a", 0, "stopped"))
    assert store.statuses() == {"a": "finished"}
    assert len(store.attempts()) == 2


def test_the_next_attempt_counts_attempts_that_left_only_steps_or_only_a_row_or_a_broken_part(store, trial_row):
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
