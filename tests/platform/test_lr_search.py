"""Which rates are tried, given what is known: against a slow search over losses that are known beforehand."""

import itertools
import math
from collections import Counter

import pytest

from depthlaw.archs.topologies import topology
from depthlaw.platform.config import load_config, parse_config
from depthlaw.platform.lr_search import Outcome, beyond, search, stored_outcomes
from depthlaw.platform.observations import context, law_rows
from depthlaw.platform.plan import plan, wanted
from depthlaw.platform.report.gather import gather
from depthlaw.platform.report.provenance import doubts
from depthlaw.platform.show import law_lines
from depthlaw.platform.store import Store
from depthlaw.platform.trial_row import trial_row

RATES = [2e-3, 4e-3, 8e-3]


def run(config, loss_of, rounds=20):
    """Rounds until nothing is missing: (what each round added, the last round, what is known)."""
    known, added = {}, []
    for _ in range(rounds):
        asked = wanted(config, known, "fingerprint")
        new = [spec for spec in asked.trials if spec.hash not in known]
        if not new:
            return added, asked, known
        added.append(new)
        known |= {spec.hash: loss_of(spec) for spec in new}
    raise AssertionError("it never ends")


def bowl(best, diverges_from=math.inf, pruned=()):
    """Loss rises by the square of the octaves from `best`; rates from `diverges_from` on diverge."""

    def loss_of(spec):
        if spec.lr >= diverges_from:
            return Outcome("diverged")
        if any(math.isclose(spec.lr, lr) for lr in pruned):
            return Outcome("pruned")
        return Outcome("finished", 3 + 0.01 * math.log2(spec.lr / best) ** 2 + 0.001 * spec.seed)

    return loss_of


def config_of(sweep_of, search="per_cell", grid=None, **more):
    return parse_config(sweep_of(**more, grid={"lr": RATES, "lr_search": search} | (grid or {})))


def rates(specs):
    return sorted({spec.lr for spec in specs})


@pytest.mark.parametrize(
    ("loss_of", "tried"),
    [
        (bowl(4e-3), RATES),  # inside the list
        (bowl(8.1e-3), [*RATES, 1.6e-2]),  # at the edge, and not beyond it
        (bowl(1.5e-2), [*RATES, 1.6e-2, 3.2e-2]),
        (bowl(1.0), [*RATES, 1.6e-2, 3.2e-2]),  # at most two extensions
        (bowl(1.1e-3), [5e-4, 1e-3, *RATES]),
        (bowl(1.0, diverges_from=8e-3), RATES),  # the side beyond a rate that diverged is not tried
        (bowl(1.0, diverges_from=1.6e-2), [*RATES, 1.6e-2]),
        (bowl(1.0, pruned=[8e-3]), RATES),  # what was pruned is known to be worse
        (bowl(1.0, pruned=[1.6e-2]), [*RATES, 1.6e-2]),
        (bowl(1e-9, diverges_from=4e-3), [5e-4, 1e-3, *RATES]),
        (bowl(4e-3, diverges_from=0), RATES),  # all diverged: nothing says where to look
    ],
)
def test_the_list_grows_where_the_best_finished_rate_is_at_its_edge(sweep_of, loss_of, tried):
    added, asked, _ = run(config_of(sweep_of), loss_of)
    assert rates(asked.trials) == pytest.approx(tried)
    assert len(added) == 1 + len(tried) - len(RATES)  # one rate a round
    assert (asked.searching, asked.later, asked.stuck) == (0, [], [])


@pytest.mark.parametrize("extensions", [0, 1, 5])
def test_the_number_of_extensions_is_a_bound(sweep_of, extensions):
    config = config_of(sweep_of, {"extensions": extensions})
    assert len(rates(run(config, bowl(1.0))[1].trials)) == 3 + extensions


def test_each_cell_searches_for_itself_and_all_its_seeds_together(sweep_of):
    grid = {"topologies": ["pre_ln", "hc"], "shapes": [[2, 32], [4, 16]], "tokens_per_backbone_param": [4, 8]}
    config = config_of(sweep_of, grid=grid, seeds=[0, 1])
    best = {("pre_ln", 2): 4e-3, ("pre_ln", 4): 1.2e-2, ("hc", 2): 1e-3, ("hc", 4): 1.0}
    added, asked, _ = run(config, lambda spec: bowl(best[spec.topology, spec.n_layers])(spec))
    assert len(added[0]) == 2 * 2 * 2 * 3 * 2
    expected = {("pre_ln", 2): 3, ("pre_ln", 4): 5, ("hc", 2): 5, ("hc", 4): 5}
    for (label, n_layers), count in expected.items():
        cells = [t for t in asked.trials if (t.topology, t.n_layers) == (label, n_layers)]
        assert len(cells) == 2 * 2 * count  # tokens, seeds
    assert all(spec.lr_searched_at == "" for spec in asked.trials)


def test_the_best_is_that_of_the_mean_over_seeds():
    losses = {(2e-3, 0): 3.0, (2e-3, 1): 3.4, (4e-3, 0): 3.1, (4e-3, 1): 3.1, (8e-3, 0): 3.3, (8e-3, 1): 3.3}

    class Trial:
        def __init__(self, hash):
            self.hash = hash

    outcomes = {key: Outcome("finished", loss) for key, loss in losses.items()}
    found = search(RATES, 2, outcomes, lambda lr: [Trial((lr, 0)), Trial((lr, 1))])
    assert (found.over, found.best) == (True, 4e-3)


def test_a_search_waits_for_what_failed_and_goes_on_elsewhere(sweep_of):
    config = config_of(sweep_of, grid={"shapes": [[2, 32], [4, 16]]})
    first = wanted(config, {}, "fingerprint").trials
    known = {t.hash: bowl(1.0)(t) for t in first}
    known[first[0].hash] = Outcome("failed")
    asked = wanted(config, known, "fingerprint")
    assert asked.searching == 2
    assert {t.n_layers for t in asked.trials if t.hash not in known} == {4}


def test_the_other_shapes_run_at_the_rate_that_the_base_shape_found(sweep_of):
    grid = {"topologies": ["pre_ln", "hc"], "shapes": [[2, 32], [4, 16], [6, 24]], "tokens_per_backbone_param": [4, 8]}
    config = config_of(sweep_of, {"base_shape": [4, 16]}, grid=grid, seeds=[0, 1])
    first = wanted(config, {}, "fingerprint")
    assert {t.n_layers for t in first.trials} == {4}
    assert {(t.n_layers, t.lr) for t in first.later} == {(2, 2e-3), (6, 2e-3)}
    assert (len(first.trials), len(first.later), first.searching) == (2 * 2 * 3 * 2, 2 * 2 * 2 * 2, 4)

    # By topology and token ratio: pre_ln's best at the shorter run needs an extension.
    base_tokens = sorted({t.tokens for t in first.trials})
    best = {("pre_ln", base_tokens[0]): 1.6e-2, ("pre_ln", base_tokens[1]): 4e-3}
    _, asked, _ = run(config, lambda spec: bowl(best.get((spec.topology, spec.tokens), 2.5e-3))(spec))
    found = {(t.topology, t.n_layers, t.tokens): t.lr for t in asked.trials if t.n_layers != 4}
    assert len(found) == 2 * 2 * 2
    for n_layers in (2, 6):
        short, long = sorted(tokens for _, n, tokens in found if n == n_layers)[::2]
        assert (found["pre_ln", n_layers, short], found["pre_ln", n_layers, long]) == (1.6e-2, 4e-3)
        assert found["hc", n_layers, short] == found["hc", n_layers, long] == 2e-3
    assert {t.lr_searched_at for t in asked.trials if t.n_layers != 4} == {"4 x 16"}
    assert {t.lr_searched_at for t in asked.trials if t.n_layers == 4} == {""}
    assert len(asked.trials) == sum(len({t.lr for t in asked.trials if (t.topology, t.tokens, t.n_layers) == key}) * 2
                                    for key in {(t.topology, t.tokens, t.n_layers) for t in asked.trials})  # fmt: skip
    assert (asked.searching, asked.later, asked.stuck) == (0, [], [])


def test_a_base_shape_where_nothing_finished_is_named_and_the_other_shapes_do_not_run(sweep_of):
    config = config_of(sweep_of, {"base_shape": [4, 16]}, grid={"shapes": [[2, 32], [4, 16], [6, 24]]})
    _, asked, _ = run(config, bowl(1.0, diverges_from=0))
    assert {t.n_layers for t in asked.trials} == {4}
    assert asked.stuck == ["pre_ln: no learning rate finished at the base shape 4 x 16: give lower ones"]


def test_the_shipped_search_begins_at_the_published_base_shape_and_its_two_blocks_share_it(request):
    config = load_config(request.config.rootpath / "tune_configs/lr_search_400m.yaml")
    first = wanted(config, {})
    assert {(t.n_layers, t.d_model) for t in first.trials} == {(24, 1024)}
    per_topology = Counter(t.topology for t in first.trials)
    assert {label: len(topology(label).lr_grid) for label in per_topology} == dict(per_topology)
    assert (len(per_topology), first.searching, len(first.later)) == (10, 10, 10 * 4 + 3 * 2)


def test_without_a_search_what_is_known_changes_nothing(sweep_of):
    config = parse_config(sweep_of(grid={"lr": RATES}))
    _, asked, known = run(config, bowl(1.0))
    assert [t.hash for t in asked.trials] == [t.hash for t in plan(config, "fingerprint")]
    assert len(known) == 3


def test_the_hash_of_a_trial_is_the_same_in_a_search_and_in_a_list(sweep_of):
    listed = parse_config(sweep_of(grid={"shapes": [[2, 32], [4, 16]], "lr": [4e-3]}))
    searched = config_of(sweep_of, {"base_shape": [4, 16]}, grid={"shapes": [[2, 32], [4, 16]]})
    _, asked, _ = run(searched, bowl(4e-3))
    assert {t.hash for t in plan(listed, "fingerprint")} <= {t.hash for t in asked.trials}


def test_the_next_rate_keeps_the_ratio_at_its_edge():
    assert beyond(4e-3, 8e-3) == 1.6e-2
    assert beyond(4e-3, 2e-3) == 1e-3
    assert beyond(2e-3, 5e-3) == 1.25e-2
    grown = [1e-3, 3e-3]
    for _ in range(4):
        grown.append(beyond(*grown[-2:]))
    assert all(b / a == pytest.approx(3, rel=1e-5) for a, b in itertools.pairwise(grown))


def test_a_store_and_a_law_say_which_rates_were_searched_at_the_base_shape_only(sweep_of, tmp_path, write_study):
    shapes = [[1, 32], [2, 24], [4, 16], [2, 48], [4, 32]]
    config = config_of(sweep_of, {"base_shape": [4, 16]}, grid={"shapes": shapes})
    store = Store.create(tmp_path / "store")
    _, asked, known = run(config, bowl(4e-3))
    store.write_plan(config.name, [spec.plan_row() for spec in asked.trials])
    plain = parse_config(sweep_of(name="plain", grid={"shapes": [[8, 16]], "lr": [4e-3]}))
    write_study(store, plain, lambda spec: {"status": "finished", "val_loss": 3.0})
    listed = parse_config(sweep_of(name="all", grid={"shapes": shapes, "lr": RATES}))
    hashes = {t.hash for t in asked.trials}
    write_study(store, listed, lambda t: {"status": "finished", "val_loss": known[t.hash].val_loss} if t.hash in hashes else None)  # fmt: skip  # noqa: E501
    found = context(store, law_rows(store))
    assert (found["cells"], found["cells_with_one_lr"], found["cells_with_lr_of_base_shape"]) == (6, 1, 4)
    assert stored_outcomes(store)[asked.trials[0].hash] == known[asked.trials[0].hash]


def test_which_rates_were_searched_elsewhere_stays_known_after_the_experiment_was_planned_anew(sweep_of, tmp_path):
    config = config_of(sweep_of, {"base_shape": [4, 16]}, grid={"shapes": [[1, 32], [2, 24], [4, 16]]})
    store = Store.create(tmp_path / "store")
    _, asked, known = run(config, bowl(4e-3))
    for spec in asked.trials:
        measured = {"val_loss": known[spec.hash].val_loss, "epochs": spec.tokens / 1_234_567}
        store.write_trial(trial_row(spec, 0, "finished", None, **measured))
    found = context(store, law_rows(store))
    assert (found["cells_with_lr_of_base_shape"], found["corpus_tokens"]) == (2, 1_234_567)
    told = doubts(gather(store, None, [], None, {}, progress=lambda _: None))
    assert "The learning rate was searched at the base shape of its topology only in 2 of 3 cells" in told
    assert not any("One learning rate only" in words for words in told)


def test_a_law_says_it_in_words(study):
    from dataclasses import replace

    from depthlaw.platform.query import fit

    law = fit(study.store)
    assert law.context["cells_with_lr_of_base_shape"] == 0
    told = law_lines(replace(law, context=law.context | {"cells_with_lr_of_base_shape": 4}))
    assert "learning rate searched at the base shape of its topology only: 4 of" in told
