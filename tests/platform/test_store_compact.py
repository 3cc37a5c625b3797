"""A whole store in few files: the same answers, whenever it is killed and whoever reads or writes meanwhile."""

import contextlib
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings

import pytest

from depthlaw.platform import store_compact
from depthlaw.platform.store import Store
from depthlaw.platform.store_check import check
from depthlaw.platform.store_compact import compact
from depthlaw.platform.store_files import LocalFiles
from support import KilledError, killed_after


def fill(store, trial_row, trials=12, seed=0):
    """Trials of two experiments, of several attempts and parts each; some are taken up by the other experiment."""
    rng = random.Random(seed)
    for n in range(trials):
        attempts = rng.randint(1, 3)
        for attempt in range(attempts):
            experiment = f"e{(n + (attempt == 2)) % 2}"
            for sequence in range(rng.choice([1, 2, 12])):
                rows = [(rng.randrange(30), rng.choice(["loss", "lr"]), rng.random()) for _ in range(20)]
                store.write_steps(experiment, "hc(streams=2)", f"t{n}", attempt, sequence, rows)
            last = attempt == attempts - 1
            status = "finished" if last else "failed"
            store.write_trial(trial_row(f"t{n}", attempt, status, experiment=experiment, topology="hc(streams=2)"))


def answers(store):
    queries = [store.steps(), store.steps(experiment="e1"), store.steps(trial="t3", names="loss"), store.attempts()]
    return [*queries, store.trials(), store.statuses(), [store.next_attempt(f"t{n}") for n in range(14)]]


def same(a, b):
    return all(x.equals(y) if hasattr(x, "equals") else x == y for x, y in zip(a, b, strict=True))


def files(store):
    return sorted(p.relative_to(store.path).as_posix() for p in store.path.rglob("*") if p.suffix == ".parquet")


def test_a_compacted_store_answers_every_question_as_before_and_has_two_files(store, trial_row):
    fill(store, trial_row)
    before, count = answers(store), len(files(store))
    done = compact(store)
    assert (done.files_before, done.files_after, done.left) == (count, 2, 0)
    assert [name.split("-")[0] for name in files(store)] == ["merged/steps", "merged/trials"]
    assert same(answers(store), before)
    assert check(store).problems == []
    assert list((store.path / "steps").rglob("trial=*")) == []
    again = compact(store)  # and nothing more to do
    assert (again.files_before, again.files_after) == (2, 2)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_written_after_a_compaction_is_merged_by_the_next_and_wins(store, trial_row, seed, monkeypatch):
    monkeypatch.setattr(store_compact, "ROWS", random.Random(seed).choice([50, 400, 10**6]))  # many files, or one
    plain = Store.create(store.path.parent / "plain")
    for each in (store, plain):
        fill(each, trial_row, trials=5, seed=seed)
    for k in range(3):
        compact(store)
        assert same(answers(store), answers(plain))
        for each in (store, plain):
            rewrite(each, trial_row, k, seed)
    compact(store)
    assert check(store).problems == []


def rewrite(store, trial_row, k, seed):
    """Further attempts of the same trials, and two new ones."""
    rng = random.Random(1000 * seed + k)
    for n in range(14):
        attempt = store.next_attempt(f"t{n}")
        rows = [(rng.randrange(40), rng.choice(["loss", "lr"]), rng.random()) for _ in range(15)]
        store.write_steps(f"e{rng.randrange(2)}", "hc(streams=2)", f"t{n}", attempt, 0, rows)
        store.write_trial(trial_row(f"t{n}", attempt, "stopped"))


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_call_it_loses_and_repeats_nothing(store, trial_row, monkeypatch, seed):
    fill(store, trial_row, trials=4, seed=seed)
    if seed % 2:
        compact(store)
        rewrite(store, trial_row, 1, seed)
    before = answers(store)
    dying = killed_after(random.Random(seed).randrange(60))
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "write", dying(LocalFiles.write))
        patch.setattr(LocalFiles, "delete", dying(LocalFiles.delete))
        with contextlib.suppress(KilledError):
            compact(store)
    assert same(answers(store), before)
    (store.path / "leases" / "%2Ecompaction-0.json").unlink(missing_ok=True)  # of a process that lives on, here only
    compact(store)
    assert same(answers(store), before)
    assert check(store).problems == []


COMPACT = """
import sys
from depthlaw.platform import store_compact
from depthlaw.platform.store import Store
store_compact.ROWS = 200
store = Store(sys.argv[1])
import pandas, pyarrow.parquet
print("go", flush=True)
store_compact.compact(store)
print("done", flush=True)
"""


@contextlib.contextmanager
def compacting(path):
    """A process that has just begun."""
    with subprocess.Popen([sys.executable, "-c", COMPACT, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "go\n"
        yield process


@pytest.mark.engine
def test_killed_with_signal_9_at_random_moments_it_loses_nothing_and_the_next_finishes(store, trial_row):
    fill(store, trial_row, trials=10)
    before, rng, cut_short = answers(store), random.Random(5), 0
    copy = shutil.copytree(store.path, store.path.parent / "copy")
    with compacting(copy) as process:
        began = time.monotonic()
        assert process.stdout.readline() == "done\n"
        whole = time.monotonic() - began
    for _ in range(6):
        with compacting(store.path) as process:
            time.sleep(rng.random() * whole)
            process.kill()
            cut_short += process.stdout.read() == ""
        assert same(answers(store), before)
    assert cut_short > 0
    compact(store)
    assert same(answers(store), before)
    assert check(store).problems == []


def test_a_reader_sees_every_row_while_the_store_is_compacted_under_it(store, trial_row, monkeypatch):
    fill(store, trial_row, trials=6)
    before, real = answers(store), LocalFiles.read
    for moment in (1, 5, 20, 40):
        reads = []

        def read(self, key, moment=moment, reads=reads):
            if threading.current_thread().name != "compacter" and key.startswith(("steps", "trials", "merged")):
                reads.append(key)
                if len(reads) == moment:
                    other = threading.Thread(target=compact, args=(Store(store.path),), name="compacter")
                    other.start()
                    other.join(60)
            return real(self, key)

        with monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("error")
            patch.setattr(LocalFiles, "read", read)
            assert same(answers(store), before)
            rewrite(store, trial_row, moment, 0)
        before = answers(store)


def test_running_trials_and_those_without_an_outcome_keep_their_parts(store, trial_row):
    fill(store, trial_row, trials=3)
    store.write_steps("e0", "pre_ln", "interrupted", 0, 0, [(1, "loss", 2.0)])
    store.write_steps("e0", "pre_ln", "running", 0, 0, [(1, "loss", 2.0)])
    store.write_trial(trial_row("running", 0, "failed"))
    before = answers(store)
    with store.lease("running") as lease:
        assert lease.attempt == 1
        assert compact(store).left == 2
        # It goes on as if nothing had been.
        store.write_steps("e0", "pre_ln", "running", lease.attempt, 0, [(1, "loss", 1.0)])
    assert store.next_attempt("interrupted") == 1
    assert len([name for name in files(store) if name.startswith("steps")]) == 3
    assert store.steps(trial="running")["value"].tolist() == [1.0]
    assert same(before[3:6], answers(store)[3:6])


def test_a_part_that_cannot_be_read_stays_and_is_named(store, trial_row):
    fill(store, trial_row, trials=3)
    broken = next((store.path / "steps").rglob("part-0-0.parquet"))
    row = store.path / "trials" / "u-0-finished.parquet"
    for path in (broken, row):
        path.write_bytes(b"PAR1 not really PAR1")
    with pytest.warns(UserWarning, match="left out what cannot be read"):
        compact(store)
    assert broken.exists()
    assert row.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert {problem.path for problem in check(store).problems} == {
            broken.relative_to(store.path).as_posix(), "trials/u-0-finished.parquet"
        }  # fmt: skip


def test_a_merged_file_that_was_damaged_later_is_left_out_with_a_warning_by_every_query(store, trial_row):
    fill(store, trial_row, trials=3)
    compact(store)
    for name in files(store):
        path = store.path / name
        path.write_bytes(path.read_bytes()[:-100])
    for query in (store.steps, store.trials, store.attempts, store.statuses, store.cells):
        with pytest.warns(UserWarning, match="not a whole Parquet file"):
            assert len(query()) == 0
    with pytest.warns(UserWarning, match="left out"):
        assert len(check(store).problems) == 2


def test_two_compactions_at_once_take_turns(store, trial_row):
    fill(store, trial_row, trials=6)
    before = answers(store)
    threads = [threading.Thread(target=compact, args=(Store(store.path),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert same(answers(store), before)
    assert len(files(store)) == 2
