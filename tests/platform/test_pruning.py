"""Pruning by the words of its rule, against every order in which the rates of a cell may come to a rung."""

import csv
import doctest
import itertools
import random
from collections import defaultdict

import pytest

from depthlaw.platform import pruning
from depthlaw.platform.config import parse_config
from depthlaw.platform.plan import plan
from depthlaw.platform.pruning import Rungs, cell_of, middle_out, rung_steps, stored_losses
from depthlaw.platform.store import Store


def test_the_doctest_holds():
    assert doctest.testmod(pruning).failed == 0


@pytest.mark.parametrize("order", itertools.permutations(range(5)))
def test_the_best_three_at_a_rung_go_on_in_whatever_order_they_come_to_it(order):
    rungs = Rungs(keep=3)
    pruned = {rate for rate in order if rungs.verdict("cell", 30, rate, 4.0 + rate / 10)}
    assert not pruned & {0, 1, 2}
    # Who comes after three better ones is stopped; who came before could not know.
    assert pruned == {rate for k, rate in enumerate(order) if sum(other < rate for other in order[:k]) >= 3}


def test_equal_losses_and_other_cells_steps_or_seeds_stop_nobody():
    rungs = Rungs(keep=3)
    for rate in range(3):
        rungs.seen("cell", 30, rate, 4.0)
    assert rungs.verdict("cell", 30, 9, 4.0) is None
    assert rungs.verdict("another", 30, 9, 5.0) is None
    assert rungs.verdict("cell", 50, 9, 5.0) is None
    assert "above those of 3 other learning rates" in rungs.verdict("cell", 30, 9, 5.0)


def test_a_rate_that_comes_back_after_an_interruption_does_not_count_against_itself():
    rungs = Rungs(keep=3)
    for rate in range(2):
        rungs.seen("cell", 30, rate, 4.0)
    assert rungs.verdict("cell", 30, 9, 5.0) is None
    assert rungs.verdict("cell", 30, 9, 5.0) is None


def test_a_rate_that_diverged_says_nothing_against_the_others():
    rungs = Rungs(keep=3)
    for rate in range(3):
        rungs.seen("cell", 30, rate, 4.0)
    rungs.forget("cell", 1)
    assert rungs.verdict("cell", 30, 9, 5.0) is None


@pytest.mark.parametrize(
    ("at", "steps", "validations", "rungs"),
    [
        ([0.25, 0.5], 100, 10, [30, 50]),
        ([0.25, 0.5], 100, 4, [25, 50]),
        ([0.25, 0.5], 99, 10, [30, 50]),  # 29.7 and 49.5, as the validations are rounded
        ([0.3], 100, 10, [30]),  # 0.3 x 10 is not 3 in floating point
        ([0.25, 0.3], 100, 3, [33]),  # one validation for both
        ([0.5], 100, 3, [67]),
        ([0.9], 100, 5, []),  # the next is the end
        ([0.25, 0.5], 1, 10, []),
        ([0.25, 0.5], 4, 10, [1, 2]),
    ],
)
def test_a_rung_is_the_first_validation_from_its_fraction_on_and_never_the_end(at, steps, validations, rungs):
    assert rung_steps(at, steps, validations) == rungs


@pytest.mark.parametrize("seed", range(50))
def test_a_rung_that_a_config_allows_is_found_for_every_length_of_run_that_has_enough_steps(seed, sweep_of):
    draw = random.Random(seed)
    times, at = draw.randint(2, 30), draw.uniform(0.01, 0.99)
    steps = draw.randint(4 * times, 5000)
    try:
        parse_config(sweep_of(validation={"times": times}, pruning={"at": [at]}))
    except ValueError:
        assert at > (times - 1) / times
    else:
        (step,) = rung_steps([at], steps, times)
        assert step >= at * steps - 0.5
        assert step - at * steps <= steps / times + 1


def test_what_prunes_one_another_differs_in_its_rate_only(sweep_of):
    grid = {"topologies": ["pre_ln", "hc"], "shapes": [[2, 32], [4, 16]], "tokens_per_backbone_param": [4, 8],
            "lr": [1e-3, 2e-3, 4e-3]}  # fmt: skip
    trials = plan(parse_config(sweep_of(grid=grid, seeds=[0, 1])), "0123")
    cells = {}
    for spec in trials:
        cells.setdefault(cell_of(spec), set()).add(spec.lr)
    assert len(cells) == 2 * 2 * 2 * 2
    assert all(rates == {1e-3, 2e-3, 4e-3} for rates in cells.values())


def test_trials_go_longest_first_and_from_the_middle_of_their_rates_outwards(sweep_of):
    rates = [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    block = {"shapes": [[2, 32], [4, 48]], "topologies": ["pre_ln", "hc"], "lr": rates}
    order = middle_out(plan(parse_config(sweep_of(grid=block)), "0123"))
    assert [spec.train_flops for spec in order] == sorted((spec.train_flops for spec in order), reverse=True)
    for k in range(0, 20, 5):
        one = order[k : k + 5]
        assert len({cell_of(spec) for spec in one}) == 1
        assert one[0].lr == 4e-3
        assert {spec.lr for spec in one[1:3]} == {2e-3, 8e-3}


def test_the_board_is_told_what_a_store_knows_but_not_of_what_diverged(sweep_of, tmp_path, write_study):
    store = Store.create(tmp_path / "store")
    ends = {
        1e-3: {"status": "finished", "val_loss": 3.0},
        2e-3: {"status": "diverged", "reason": "it left"},
        4e-3: None,
    }
    config = parse_config(sweep_of(grid={"lr": list(ends)}))
    trials = write_study(store, config, lambda spec: ends[spec.lr])  # the third was interrupted
    for k, spec in enumerate(trials):
        rows = [(30, "val_loss", 4.0 + k), (30, "train_loss", 9.0), (50, "val_loss", 3.0 + k)]
        store.write_steps(spec.experiment, spec.topology, spec.hash, 0, 0, rows)
    found = stored_losses(store, trials)
    expected = {(spec.lr, step, base + k) for k, spec in enumerate(trials) for step, base in ((30, 4.0), (50, 3.0))
                if k != 1}  # fmt: skip
    assert {(lr, step, loss) for _, step, lr, loss in found} == expected
    assert {cell for cell, *_ in found} == {cell_of(trials[0])}


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_over_the_cells_that_were_measured_the_winner_is_kept_and_a_third_of_the_work_saved(request):
    """The rule over the stored curves of an exhaustive search (benchmarks/pruning.py), one trial after another."""
    folder = request.config.rootpath / "benchmarks"
    cells = defaultdict(lambda: defaultdict(dict))
    for row in read(folder / "pruning_curves.csv"):
        key = row["topology"], int(row["n_layers"]), int(row["d_model"])
        cells[key][float(row["lr"])][int(row["step"])] = float(row["val_loss"])
    noise = {(r["topology"], int(r["n_layers"]), int(r["d_model"])): r for r in read(folder / "pruning.csv")}
    assert len(cells) == len(noise) >= 8
    done = planned = 0
    for key, curves in cells.items():
        assert len(curves) == 8
        (steps,) = {max(curve) for curve in curves.values()}
        rungs, kept = Rungs(keep=3), []
        rates = sorted(curves)
        for lr in sorted(rates, key=lambda lr: abs(rates.index(lr) - 3.5)):
            at = rung_steps([0.25, 0.5], steps, 10)
            stopped = next((s for s in at if rungs.verdict(key, s, lr, curves[lr][s])), None)
            done += stopped or steps
            if stopped is None:
                kept.append(curves[lr][steps])
        planned += 8 * steps
        assert len(kept) >= 3
        lost = min(kept) - min(curve[steps] for curve in curves.values())
        assert lost <= float(noise[key]["seed_sd"]) > 0
        assert lost == pytest.approx(float(noise[key]["lost_nats_1"]), abs=2e-5)
    assert 1 - done / planned >= 0.30
