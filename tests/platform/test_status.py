"""What is there of what was planned, what is running, and the time left."""

from datetime import UTC, datetime, timedelta

import pytest

from depthlaw.platform.config import parse_config
from depthlaw.platform.plan import plan
from depthlaw.platform.show import dry_run_rows, plan_table
from depthlaw.platform.status import status_rows, status_table, time_left
from support import row_of

FINISHED = {"status": "finished", "val_loss": 3.25, "bits_per_byte": 1.5}


def test_status_shows_cells_that_were_planned_and_not_run(store, sweep_of, write_study, printed):
    config = parse_config(sweep_of(grid={"shapes": [[2, 32], [4, 24], [6, 16]], "lr": [1e-3, 2e-3, 4e-3]}))
    ends = {2: dict(FINISHED), 4: None, 6: {"status": "diverged", "reason": "loss nan is not finite, at step 7"}}

    def outcomes(spec):
        ended = ends[spec.n_layers]
        return ended and {**ended} if spec.lr < 3e-3 else None

    specs = write_study(store, config, outcomes)
    text = printed(status_table(store))
    # topology, L, d, backbone, tokens, expected, found, finished, diverged, pruned, oom, failed, running, lr, parabola,
    # loss, bits and the trial; of equal losses the first id is the best, as of weights that are kept.
    first = min(spec.hash for spec in specs if spec.n_layers == 2 and spec.lr < 3e-3)
    ran = ["3", "2", "2", "0", "0", "0", "0", "0", "0.001", "few_rates", "3.2500", "1.5000", first]
    assert row_of(text, "pre_ln", 2, 32)[5:] == ran
    assert row_of(text, "pre_ln", 4, 24)[5:] == ["3", "0", "0", "0", "0", "0", "0", "0", "-", "-", "-", "-", "-"]
    assert row_of(text, "pre_ln", 6, 16)[5:] == ["3", "2", "0", "2", "0", "0", "0", "0", "-", "-", "-", "-", "-"]
    assert text.count("diverged, loss nan is not finite, at step 7") == 2
    assert row_of(text, "pre_ln", 2, 32)[3] == "26,784"  # 2 (4 x 32^2 + 3 x 32 x 96) + 4 x 32 + 32


@pytest.mark.parametrize(("seeds", "words"), [([0], "0.00224+-?"), ([0, 1], "0.00224+-3.1%")])
def test_status_shows_the_best_rate_of_a_parabola_with_its_error(store, sweep_of, write_study, printed, seeds, words):
    """Mean losses 3.06, 3.00, 3.03 at 1, 2, 4e-3: the vertex is (3.06 - 3.03) / (2 x 0.09) = 1/6 of ln 2 above 2e-3.

    Seeds 0.01 apart give a mean an error of 0.005, and 1/6 one of ln 2 x 0.005 sqrt(1/9 + 1/9 + 4/9) / 0.09 = 3.1 %.
    """
    config = parse_config(sweep_of(grid={"lr": [1e-3, 2e-3, 4e-3]}, seeds=seeds))
    means = {1e-3: 3.06, 2e-3: 3.0, 4e-3: 3.03}
    gap = 0.01 if len(seeds) > 1 else 0.0
    write_study(
        store,
        config,
        lambda spec: {**FINISHED, "val_loss": means[spec.lr] + gap * (spec.seed - 0.5 * (len(seeds) - 1))},
    )
    assert row_of(printed(status_table(store)), "pre_ln", 2, 32)[14] == words


def test_status_tells_what_did_not_fit_into_memory_from_what_failed(store, sweep_of, write_study, printed):
    config = parse_config(sweep_of(grid={"lr": [1e-3, 2e-3, 4e-3]}))
    write_study(store, config, lambda spec: {"status": "failed" if spec.lr < 3e-3 else "oom", "reason": "x"})
    assert row_of(printed(status_table(store)), "pre_ln", 2, 32)[9:12] == ["0", "1", "2"]
    (row,) = status_rows(store)
    assert (row["n_oom"], row["n_failed"], row["n_trials"]) == (1, 2, 3)


def test_tables_that_are_piped_have_no_spaces_at_the_ends_of_lines(store, sweep_of, write_study, printed):
    config = parse_config(sweep_of(grid={"shapes": [[2, 32], [16, 32]]}))
    write_study(store, config, lambda spec: {"status": "diverged", "reason": "x"} if spec.n_layers == 2 else None)
    for table in (status_table(store), plan_table(config, dry_run_rows(config, store.path))):
        lines = printed(table).splitlines()
        assert len(lines) > 3
        assert [line for line in lines if line != line.rstrip()] == []


def test_a_table_that_is_wider_than_any_terminal_is_whole(store, sweep_of, write_study, printed, monkeypatch):
    config = parse_config(sweep_of(grid={"topologies": ["block_attnres(length=3)"]}))
    write_study(store, config, lambda spec: dict(FINISHED))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(status_table(store))
    assert "…" not in text
    assert status_rows(store)[0]["trial"] in text


def test_status_of_a_store_without_a_trial_yet_shows_its_plan(store, sweep_of, write_study, printed):
    write_study(store, parse_config(sweep_of()), lambda spec: None)
    rows = status_rows(store)
    assert [(r["n_planned"], r["n_trials"], r["val_loss"]) for r in rows] == [(2, 0, None)]
    assert row_of(printed(status_table(store)), "pre_ln", 2, 32)[5:9] == ["2", "0", "0", "0"]


def test_status_of_an_empty_store_is_an_empty_table(store, printed):
    assert status_rows(store) == []
    assert "topology" in printed(status_table(store))


def test_status_of_a_store_whose_plans_are_gone_still_shows_what_was_run(store, sweep_of, write_study, printed):
    write_study(store, parse_config(sweep_of()), lambda spec: dict(FINISHED))
    (store.path / "plans" / "s.json").unlink()
    rows = status_rows(store)
    assert [(r["n_planned"], r["n_finished"], r["val_loss"]) for r in rows] == [(0, 2, 3.25)]
    assert row_of(printed(status_table(store)), "pre_ln", 2, 32)[3] == "26,784"


def test_status_of_one_experiment_shows_its_cells_and_its_failures_only(store, sweep_of, write_study, printed):
    for name, lr in (("one", [1e-3]), ("two", [2e-3, 4e-3])):
        ended = {"status": "diverged", "reason": f"broken in {name}"}
        write_study(store, parse_config(sweep_of(name=name, grid={"lr": lr})), lambda spec, e=ended: dict(e))
    text = printed(status_table(store, "one"))
    assert row_of(text, "pre_ln", 2, 32)[5:9] == ["1", "1", "0", "1"]
    assert "broken in one" in text
    assert "broken in two" not in text
    both = printed(status_table(store))
    assert row_of(both, "pre_ln", 2, 32)[5:9] == ["3", "3", "0", "3"]
    assert both.count("broken in") == 3


def test_a_trial_that_two_experiments_plan_is_counted_once(store, sweep_of, write_study):
    for name in ("one", "two"):
        write_study(store, parse_config(sweep_of(name=name)), lambda spec: dict(FINISHED))
    assert [(r["n_planned"], r["n_finished"]) for r in status_rows(store)] == [(2, 2)]


def test_more_than_twenty_failures_are_cut_and_counted(store, sweep_of, write_study, printed):
    config = parse_config(sweep_of(grid={"lr": [1e-3 * k for k in range(1, 24)]}))
    write_study(store, config, lambda spec: {"status": "failed", "reason": "no memory"})
    text = printed(status_table(store))
    assert text.count("failed, no memory") == 20
    assert "and 3 more" in text


def test_a_plan_that_cannot_be_read_is_named_and_the_others_are_shown(store, sweep_of, write_study):
    write_study(store, parse_config(sweep_of()), lambda spec: dict(FINISHED))
    (store.path / "plans" / "broken.json").write_text("{")
    (store.path / "plans" / "notes.txt").write_text("mine")
    with pytest.warns(UserWarning, match="left out plan 'broken'"):
        rows = status_rows(store)
    assert [(row["n_planned"], row["n_finished"]) for row in rows] == [(2, 2)]


# ---- running, and the time left


@pytest.fixture
def half(store, sweep_of, write_study):
    """Eight trials of two shapes, of which four finished, each at a speed of its own shape: 1 and 4 GFLOP/s."""
    shapes = [[2, 32], [8, 64]]
    config = parse_config(sweep_of(grid={"shapes": shapes, "lr": [1e-3, 2e-3, 3e-3, 4e-3]}))
    speed = {2: 1e9, 8: 4e9}

    def outcomes(spec):
        if spec.lr > 2.5e-3:
            return None
        took = spec.train_flops / speed[spec.n_layers]
        steps = {"steps": spec.steps, "steps_done": spec.steps, "train_flops": float(spec.train_flops)}
        return FINISHED | steps | {"wall_s": took, "ended_at": datetime.now(UTC)}

    specs = write_study(store, config, outcomes)
    return store, specs, speed


def test_time_left_is_that_of_each_shape_at_its_own_speed(half):
    store, specs, speed = half
    left = time_left(store)
    todo = [spec for spec in specs if spec.lr > 2.5e-3]
    assert (left.trials, left.settled, left.running) == (8, 4, 0)
    assert left.flops_left == sum(spec.train_flops for spec in todo) == left.flops / 2
    by_hand = sum(spec.train_flops / speed[spec.n_layers] for spec in todo)
    assert left.trial_seconds == pytest.approx(by_hand, rel=1e-9)
    assert left.seconds is None
    assert "50% of the FLOPs left, about" in left.text()
    assert "one trial at a time; nothing is running" in left.text()


def test_running_trials_count_with_what_they_have_done_at_their_own_speed_and_share_the_rest(half):
    store, specs, speed = half
    small, large = (next(s for s in specs if s.n_layers == depth and s.lr > 2.5e-3) for depth in (2, 8))
    with store.lease(small.hash) as one, store.lease(large.hash) as two:
        two.progress(large.steps // 2, 0.5 * large.train_flops / 4e9)
        for lease in (one, two):
            lease.confirm()  # a heartbeat now
        left = time_left(store)
        todo = {s.hash: s.train_flops / speed[s.n_layers] for s in specs if s.lr > 2.5e-3}
        todo[large.hash] *= 1 - (large.steps // 2) / large.steps
        assert left.running == 2
        assert left.trial_seconds == pytest.approx(sum(todo.values()), rel=1e-3)
        assert left.seconds == pytest.approx(max(sum(todo.values()) / 2, todo[large.hash]), rel=1e-3)
        assert left.text().startswith("4 of 8 trials settled, 2 running; ")
        assert left.text().endswith("with 2 at once")
        rows = {row["n_layers"]: row["n_running"] for row in status_rows(store)}
        assert rows == {2: 1, 8: 1}
    assert time_left(store).running == 0


def test_a_lease_on_a_trial_that_has_finished_is_not_a_running_trial(half):
    store, specs, _ = half
    with store.lease(specs[0].hash):  # another sweep, for the moment in which it looks whether there is a result
        assert time_left(store).running == 0


def test_without_any_measured_speed_the_time_is_not_known_and_with_nothing_left_none_is_told(
    store, sweep_of, write_study
):
    config = parse_config(sweep_of())
    write_study(store, config, lambda spec: None)
    left = time_left(store)
    assert (left.trial_seconds, left.seconds, left.settled) == (None, None, 0)
    assert "time not known: no trial's speed has been measured yet" in left.text()
    write_study(store, config, lambda spec: dict(FINISHED))
    assert time_left(store).text() == "2 of 2 trials settled, 0 running"


def test_the_speed_is_that_of_the_last_trials_not_of_an_older_machine(store, sweep_of, write_study):
    config = parse_config(sweep_of(grid={"lr": [k * 1e-4 for k in range(1, 62)]}))

    def outcomes(spec):
        rank = round(spec.lr * 1e4)
        if rank == 61:
            return None
        speed = 1e9 if rank > 10 else 1e6  # the first ten, an hour ago, were a thousand times slower
        ended = datetime.now(UTC) - timedelta(hours=rank <= 10)
        steps = {"steps": spec.steps, "steps_done": spec.steps, "train_flops": float(spec.train_flops)}
        return FINISHED | steps | {"wall_s": spec.train_flops / speed, "ended_at": ended}

    (todo,) = [spec for spec in write_study(store, config, outcomes) if spec.lr > 60.5e-4]
    assert time_left(store).trial_seconds == pytest.approx(todo.train_flops / 1e9, rel=1e-9)


def test_the_plan_that_the_time_is_told_from_has_exact_flops(sweep_of):
    for spec in plan(parse_config(sweep_of())):
        row = spec.plan_row()
        assert (row["steps"], row["train_flops"]) == (spec.steps, spec.train_flops)
