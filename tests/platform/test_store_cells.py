"""Cells against a computation with plain dictionaries."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from depthlaw.platform.store import STATUSES, StoreError

CELL = [
    "recipe_hash",
    "topology",
    "n_layers",
    "d_model",
    "n_heads",
    "n_kv_heads",
    "d_ff",
    "tokens",
    "seq_len",
    "vocab_size",
]


@pytest.fixture(scope="module")
def numbered(trial_row):
    """The row of a trial t0, t1, ...; a finished one has half as many bits a byte as nats a token."""

    def make(number, **changes):
        row = trial_row(f"t{number}", **changes)
        return row | ({"bits_per_byte": row["val_loss"] / 2} if row["status"] == "finished" else {})

    return make


@pytest.fixture
def fill(store, numbered):
    def cells_of(rows):
        for number, changes in enumerate(rows):
            store.write_trial(numbered(number, **changes))
        return store.cells().to_dict("records")

    return cells_of


def by_hand(rows):
    """Cell key -> (val_loss, lr, seeds, sd, bits, n_lrs, edge, counts), one pass of plain Python."""
    out = {}
    keys = {tuple(row[k] for k in CELL) for row in rows}
    for key in keys:
        mine = [row for row in rows if tuple(row[k] for k in CELL) == key]
        losses = {}
        for row in mine:
            if row["status"] == "finished":
                losses.setdefault(row["lr"], []).append((row["val_loss"], row["bits_per_byte"]))
        means = {lr: sum(v for v, _ in pairs) / len(pairs) for lr, pairs in losses.items()}
        counts = [sum(row["status"] in group for row in mine) for group in
                  (STATUSES, ["finished"], ["diverged"], ["pruned"], ["oom"], ["failed", "stopped"])]  # fmt: skip
        tried = {row["lr"] for row in mine if row["status"] in ("finished", "diverged", "pruned")}
        if not means:
            out[key] = (None, None, 0, None, None, len(tried), None, counts)
            continue
        best = min(means, key=lambda lr: (means[lr], lr))
        values = [v for v, _ in losses[best]]
        sd = statistics.stdev(values) if len(values) > 1 else None
        edge = None if len(tried) < 2 else best in (min(tried), max(tried))
        bits = statistics.fmean(b for _, b in losses[best])
        out[key] = (means[best], best, len(values), sd, bits, len(tried), edge, counts)
    return out


def same(found, expected):
    return math.isnan(found) if expected is None else found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_cells_match_a_computation_by_hand(store, seed, numbered):
    rng = random.Random(seed)
    grid = itertools.product(["pre_ln", "hc(streams=2)"], [2, 4], [10**6, 10**7], [1e-4, 3e-4, 1e-3, 3e-3], [0, 1, 2])
    rows = [
        numbered(n, topology=t, n_layers=depth, tokens=tokens, lr=lr, seed=s, status=status,
                  **({"val_loss": rng.uniform(2, 4)} if status == "finished" else {}))
        for n, (t, depth, tokens, lr, s) in enumerate(grid)
        for status in [rng.choice([*STATUSES, "finished"] if depth == 4 else STATUSES[s < 2 :])]
        if rng.random() < 0.6
    ]  # fmt: skip
    for row in rows:
        store.write_trial(row)
    expected = by_hand(rows)
    found = store.cells().to_dict("records")
    assert len(found) == len(expected)
    for cell in found:
        loss, lr, seeds, sd, bits, n_lrs, edge, counts = expected[tuple(cell[k] for k in CELL)]
        assert same(cell["val_loss"], loss)
        assert same(cell["lr"], lr)
        assert same(cell["seed_sd"], sd)
        assert same(cell["bits_per_byte"], bits)
        assert (cell["seeds"], cell["n_lrs"]) == (seeds, n_lrs)
        assert cell["lr_at_edge"] is edge
        assert [cell[k] for k in ("n_trials", "n_finished", "n_diverged", "n_pruned", "n_oom", "n_failed")] == counts
        assert cell["backbone_params"] == 200_000


def test_a_cell_where_every_trial_diverged_is_a_row_with_no_loss(store, fill):
    (cell,) = fill([{"status": "diverged", "lr": lr} for lr in (1e-3, 1e-2)])
    assert math.isnan(cell["val_loss"])
    assert math.isnan(cell["lr"])
    assert (cell["n_diverged"], cell["n_lrs"], cell["seeds"], cell["lr_at_edge"]) == (2, 2, 0, None)


@pytest.mark.parametrize(
    ("losses", "edge"), [([3.0], None), ([3.0, 2.0], True), ([3.0, 2.0, 2.5], False), ([2.0, 3.0, 4.0], True)]
)
def test_the_edge_of_the_learning_rates_is_flagged_and_unknown_for_one(store, losses, edge, fill):
    (cell,) = fill([{"lr": 10.0**-n, "val_loss": loss} for n, loss in enumerate(losses)])
    assert cell["lr_at_edge"] is edge
    assert cell["n_lrs"] == len(losses)


def test_a_bracketed_cell_has_the_vertex_of_its_mean_losses_with_errors_and_keeps_the_loss_it_measured(store, fill):
    losses = {5e-4: [3.10, 3.12], 1e-3: [3.0, 3.01], 2e-3: [3.05, 3.07]}
    (cell,) = fill([{"lr": lr, "seed": s, "val_loss": v} for lr, vs in losses.items() for s, v in enumerate(vs)])
    x, y = np.log(np.array(list(losses)) / 1e-3), [np.mean(v) for v in losses.values()]
    c2, c1, c0 = np.polyfit(x, y, 2)
    assert (cell["lr_found"], cell["lr"]) == ("vertex", 1e-3)
    assert cell["val_loss"] == pytest.approx(3.005)
    assert cell["vertex_lr"] == pytest.approx(1e-3 * math.exp(-c1 / (2 * c2)), rel=1e-9)
    assert cell["vertex_loss"] == pytest.approx(c0 - c1**2 / (4 * c2), rel=1e-9)
    noise2 = (2e-4 + 0.5e-4 + 2e-4) / 3  # pooled over the three rates: (v0 - v1)^2 / 2 each, one degree of freedom
    step, at = math.log(2), -c1 / (2 * c2) / math.log(2)
    at_vertex = np.array([at * (at - 1) / 2, 1 - at * at, at * (at + 1) / 2])  # Lagrange: the loss there from the three
    assert cell["vertex_loss_sd"] == pytest.approx(math.sqrt(noise2 / 2 * np.sum(at_vertex**2)), rel=1e-9)
    bend = y[0] - 2 * y[1] + y[2]
    slope = np.array([at - 0.5, -2 * at, at + 0.5])  # of the loss at the vertex in steps: it moves by -slope / bend
    sd = step * math.sqrt(noise2 / 2 * np.sum(slope**2)) / bend
    assert cell["vertex_ln_lr_sd"] == pytest.approx(sd, rel=1e-9)


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ([3.0], "few_rates"),
        ([3.0, 2.0, 1.0], "edge"),
        ([3.0, 2.0, "diverged"], "bounded"),
        ([3.0, 2.0, "pruned"], "bounded"),
        (["diverged", "diverged", "diverged"], "none"),
        (["oom", "failed", "stopped"], "none"),
        ([3.0, 2.0, 2.5], "vertex"),
        ([3.0, "failed", 2.0, 2.5], "vertex"),  # a rate that broke for another reason says nothing
    ],
)
def test_how_the_best_rate_of_a_cell_is_known(store, fill, ends, how):
    (cell,) = fill(
        [{"lr": 2.0**n / 1e3} | ({"status": e} if isinstance(e, str) else {"val_loss": e}) for n, e in enumerate(ends)]
    )
    assert cell["lr_found"] == how
    assert math.isnan(cell["vertex_lr"]) == (how != "vertex")


def test_a_mean_over_seeds_chooses_the_learning_rate_not_one_lucky_seed(store, fill):
    losses = {1e-3: [1.0, 5.0], 2e-3: [2.0, 2.5]}
    (cell,) = fill([{"lr": lr, "seed": s, "val_loss": v} for lr, vs in losses.items() for s, v in enumerate(vs)])
    assert (cell["lr"], cell["val_loss"], cell["seeds"]) == (2e-3, 2.25, 2)
    assert cell["seed_sd"] == pytest.approx(statistics.stdev([2.0, 2.5]))


def test_only_the_attempt_that_stands_for_a_trial_counts(store, fill, numbered):
    fill([{"status": "oom"}])
    store.write_trial(numbered(0, attempt=1, val_loss=2.0))
    store.write_trial(numbered(0, attempt=2, status="stopped"))
    (cell,) = store.cells().to_dict("records")
    assert (cell["val_loss"], cell["n_trials"], cell["n_failed"]) == (2.0, 1, 0)


def test_trials_of_two_recipes_are_never_one_cell_but_two_experiments_can_share_one(store, fill):
    rows = [{"recipe_hash": "a"}, {"recipe_hash": "b", "lr": 2e-3}, {"recipe_hash": "a", "lr": 2e-3, "experiment": "f"}]
    cells = fill(rows)
    assert [(cell["recipe_hash"], cell["n_trials"]) for cell in cells] == [("a", 2), ("b", 1)]


def test_a_learning_rate_that_diverged_bounds_the_best_one(store, fill):
    (cell,) = fill([{"lr": 1e-3, "val_loss": 3.0}, {"lr": 2e-3, "val_loss": 2.0}, {"lr": 4e-3, "status": "diverged"}])
    assert (cell["lr"], cell["n_lrs"], cell["lr_at_edge"]) == (2e-3, 3, False)


def test_cells_of_an_experiment_are_those_it_planned_whoever_ran_them(store, fill):
    fill([{"experiment": "first"}, {"experiment": "first", "tokens": 5, "val_loss": 2.0}])
    store.write_plan("second", [{"trial": "t1"}, {"trial": "not run yet"}])
    assert [cell["tokens"] for cell in store.cells("second").to_dict("records")] == [5]
    assert store.experiments() == ["second"]
    with pytest.raises(StoreError, match="no experiment 'third'; it has second"):
        store.cells("third")
