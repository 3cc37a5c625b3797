"""`depthlaw store check` and `export`: every kind of damage is named, and a sound store has none."""

import csv
import json
import math
import os
import time
import warnings

import pytest

from depthlaw.platform import store_compact
from depthlaw.platform.store import StoreError
from depthlaw.platform.store_check import check
from depthlaw.platform.store_compact import compact
from depthlaw.platform.store_export import export


@pytest.fixture
def sound(store, trial_row):
    """Two trials that ended, one that was interrupted and is planned, one that failed twice before it finished."""
    for trial in ("a", "b"):
        store.write_steps("e", "pre_ln", trial, 0, 0, [(1, "loss", 2.5), (2, "loss", math.nan)])
        store.write_trial(trial_row(trial))
    store.write_steps("e", "pre_ln", "planned", 0, 0, [(1, "loss", 2.0)])
    store.write_plan("e", [{"trial": "a"}, {"trial": "planned"}])
    store.write_trial(trial_row("c", 0, "failed"))
    store.write_trial(trial_row("c", 1))
    return store


def problems(store):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(check(store).problems)


def one(store):
    (problem,) = problems(store).items()
    return problem


def test_a_sound_store_has_no_problem_and_every_row_is_counted(sound):
    checked = check(sound)
    assert (checked.parts, checked.step_rows, checked.trials, checked.problems) == (7, 5, 3, [])
    compact(sound)
    checked = check(sound)
    assert (checked.parts, checked.step_rows, checked.trials, checked.problems) == (3, 5, 3, [])


def test_a_running_sweep_is_no_problem(sound):
    with sound.lease("new") as lease:
        sound.write_steps("e", "pre_ln", "new", lease.attempt, 0, [(1, "loss", 2.0)])
        (sound.path / "steps" / ".0123.tmp").write_bytes(b"being written now")
        assert problems(sound) == {}


def part(store, trial):
    return next((store.path / "steps").rglob(f"trial={trial}/*.parquet"))


def test_truncated_empty_and_foreign_files_are_named_with_the_reason(sound):
    data = part(sound, "a").read_bytes()
    part(sound, "a").write_bytes(data[:-9])
    (sound.path / "trials" / "b-0-finished.parquet").write_bytes(b"")
    (sound.path / "trials" / "notes.txt").write_text("x")
    found = {path.split("/")[-1]: reason.split(":")[0] for path, reason in problems(sound).items()}
    assert found == {
        "part-0-0.parquet": "not a whole Parquet file", "b-0-finished.parquet": "empty file",
        "notes.txt": "not a part of a store",
    }  # fmt: skip


def test_steps_that_belong_to_no_trial_are_named(sound):
    sound.write_steps("e", "pre_ln", "orphan", 0, 0, [(1, "loss", 2.0)])
    path, reason = one(sound)
    assert path == "steps/experiment=e/topology=pre_ln/trial=orphan"
    assert "no row and is in no plan" in reason


def test_rows_that_are_there_twice_are_named_with_what_removes_them(sound, monkeypatch):
    kept = {path: path.read_bytes() for path in sound.path.rglob("*.parquet")}
    compact(sound)
    for path, data in kept.items():  # as a compaction leaves it that was killed before it deleted anything
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    found = problems(sound)
    assert len(found) == 6  # two parts of steps, four rows; that of `planned` was not merged
    assert all("depthlaw store compact" in reason for reason in found.values())
    compact(sound)
    assert problems(sound) == {}


def test_a_measurement_committed_twice_in_one_part_to_other_values_is_named(sound):
    sound.write_steps("e", "pre_ln", "planned", 0, 1, [(5, "loss", 2.0), (5, "loss", 3.0), (6, "loss", 3.0)])
    assert one(sound)[1] == "1 measurements are in it twice, such as loss of step 5"


def test_a_row_under_another_trials_name_and_two_losses_of_one_trial_are_named(sound, trial_row):
    trials = sound.path / "trials"
    os.rename(trials / "a-0-finished.parquet", trials / "z-0-finished.parquet")
    assert one(sound) == ("trials/z-0-finished.parquet", "its row is of trial a, attempt 0, finished")
    os.rename(trials / "z-0-finished.parquet", trials / "a-0-finished.parquet")
    sound.write_trial(trial_row("a", 1, val_loss=3.5))
    assert one(sound) == ("trials", "a finished more than once, at different losses: 3 and 3.5")


def test_what_killed_writers_and_ended_trials_left_is_named(sound):
    temporary = sound.path / "trials" / ".0123456789abcdef.tmp"
    temporary.write_bytes(b"half")
    old = time.time() - 3600
    os.utime(temporary, (old, old))
    (sound.path / "checkpoints" / "a").mkdir(parents=True)
    (sound.path / "checkpoints" / "planned").mkdir()  # to be resumed
    found = problems(sound)
    assert set(found) == {"trials/.0123456789abcdef.tmp", "checkpoints/a"}


def test_a_plan_that_is_none_is_named(sound):
    (sound.path / "plans" / "e.json").write_text("{")
    assert set(problems(sound)) == {"plans/e.json", "steps/experiment=e/topology=pre_ln/trial=planned"}


# ---- the command


def test_check_is_code_0_for_a_sound_store_and_1_with_a_line_for_each_problem(sound, run):
    code, out, _ = run("store", "check", sound.path)
    assert (code, out) == (0, "7 parts, 5 step rows, 3 trials: no problems\n")
    part(sound, "a").write_bytes(b"")
    code, out, err = run("store", "check", sound.path)
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        "steps/experiment=e/topology=pre_ln/trial=a/part-0-0.parquet: empty file",
        "6 parts, 3 step rows, 3 trials: 1 problem",
    ]
    code, out, _ = run("store", "check", sound.path, "--json")
    assert (code, json.loads(out)["problems"][0]["reason"]) == (1, "empty file")


def test_compact_says_what_it_did(sound, run):
    code, out, _ = run("store", "compact", sound.path)
    assert (code, out) == (0, "7 files before, 3 now; 1 trial without an outcome left alone\n")
    assert json.loads(run("store", "compact", sound.path, "--json")[1]) == {
        "files_before": 3, "files_after": 3, "left": 1
    }  # fmt: skip


def test_a_store_that_is_not_there_is_code_2_for_each_command(tmp_path, run):
    for words in (["check"], ["compact"], ["export"]):
        more = ["x.csv"] if words == ["export"] else []
        code, out, err = run("store", *words, tmp_path / "none", *more)
        assert (code, out, err.count("\n")) == (2, "", 1)


# ---- export


@pytest.mark.parametrize("what", ["trials", "steps"])
def test_an_exported_table_is_the_one_that_python_gets(sound, tmp_path, run, what):
    import pandas as pd

    code, out, _ = run("store", "export", sound.path, tmp_path / "t.parquet", "--what", what)
    expected = getattr(sound, what)()
    assert (code, out) == (0, f"{len(expected)} rows in {tmp_path / 't.parquet'}\n")
    assert pd.read_parquet(tmp_path / "t.parquet").equals(expected)
    export(sound, tmp_path / "t.csv", what)
    with open(tmp_path / "t.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == expected["trial"].tolist()
    if what == "steps":
        assert [float(row["value"] or "nan") for row in rows][:1] == [2.5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "t.csv", "t.parquet"]


def test_what_cannot_be_exported_is_one_line(sound, tmp_path):
    for target, what, words in (
        ("t.xlsx", "trials", "must end in .parquet or .csv"),
        ("t.csv", "cells", "what is 'cells'; it must be one of trials, steps"),
        ("none/t.csv", "trials", "cannot write .*none/t.csv: "),
    ):
        with pytest.raises(StoreError, match=words):
            export(sound, tmp_path / target, what)


def test_merged_files_can_be_as_large_as_memory_allows_and_no_larger(sound, monkeypatch):
    monkeypatch.setattr(store_compact, "ROWS", 2)
    compact(sound)
    assert len([path for path in (sound.path / "merged").iterdir() if path.name.startswith("steps")]) == 2
    assert problems(sound) == {}
