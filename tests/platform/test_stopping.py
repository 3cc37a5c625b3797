"""The divergence rule against a slow reading of its words that looks at the whole history each time."""

import doctest
import json
import math
import random

import pytest

from depthlaw.platform import stopping
from depthlaw.platform.config_sections import Divergence
from depthlaw.platform.stopping import DivergenceRule

VOCAB = 512
KNOWS_NOTHING = math.log(VOCAB)  # 6.238
RULE = {"factor": 1.3, "patience": 3, "skipped": 5, "learnt_by": 0.5}


def watch(reports, rule=RULE, steps=100):
    """The first (step, reason) of reports (step, loss, gradient norm, skipped), or None."""
    watcher = DivergenceRule(rule, VOCAB, steps)
    return next(((r[0], why) for r in reports if (why := watcher.report(*r))), None)


def by_words(reports, rule=RULE, steps=100):
    """(step, kind) of the first report at which the rule of `Divergence` applies, or None."""
    for i, (step, loss, norm, skipped) in enumerate(reports):
        if math.isnan(loss) or math.isinf(loss):
            return step, "loss"
        if math.isnan(norm) or math.isinf(norm):
            return step, "gradient"
        if skipped >= rule["skipped"]:
            return step, "skipped"
        high = [
            reports[j][1] > rule["factor"] * min([KNOWS_NOTHING, *(r[1] for r in reports[:j])]) for j in range(i + 1)
        ]
        if i + 1 >= rule["patience"] and all(high[-rule["patience"] :]):
            return step, "above"
        if step / steps >= rule["learnt_by"] and all(r[1] >= KNOWS_NOTHING for r in reports[: i + 1]):
            return step, "never learnt"
    return None


WORDS = {
    "loss": "is not finite",
    "gradient": "gradient norm",
    "skipped": "skipped",
    "above": "was above",
    "never learnt": "never learnt",
}


def every_ten(losses):
    return [(10 * (k + 1), loss, 1.0, 0) for k, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([6.0, 5.0, 4.0, 3.0], None),
        ([6.0, math.nan], (20, "loss nan is not finite")),
        ([math.inf], (10, "loss inf is not finite")),
        ([-math.inf], (10, "loss -inf is not finite")),
        ([5.0, 6.6, 6.6], None),  # two reports in a row are not three
        ([5.0, 6.6, 6.6, 6.6], (40, "above 1.3 x its lowest so far, 5, for 3 reports")),
        ([5.0, 6.6, 6.6, 6.4, 6.6, 6.6, 4.0], None),  # 6.4 <= 6.5 starts the count again
        ([5.0, 6.5, 6.5, 6.5, 6.5], None),  # exactly 1.3 x is not above
        ([9.0, 9.0, 9.0], (30, "lowest so far, 6.238")),  # ln(vocabulary) is the first lowest
        ([7.0, 7.0, 7.0, 7.0], None),
        ([7.0, 7.0, 7.0, 7.0, 7.0], (50, "never learnt")),
        ([7.0, 7.0, 7.0, 7.0, KNOWS_NOTHING], (50, "never learnt")),
        ([7.0, 7.0, 7.0, 7.0, math.nextafter(KNOWS_NOTHING, 0)], None),
        ([6.2, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0, 7.0], None),  # learnt once, and not far above since
    ],
)
def test_a_series_of_losses_ends_where_the_rule_says(losses, ends):
    found = watch(every_ten(losses))
    if ends is None:
        assert found is None
    else:
        assert found[0] == ends[0]
        assert ends[1] in found[1]
        assert f"step {ends[0]}" in found[1]


def test_gradients_that_are_not_finite_and_skipped_steps_end_a_run_whose_loss_is_fine():
    assert watch([(10, 5.0, math.nan, 0)]) == (10, "gradient norm nan is not finite, at step 10")
    assert watch([(10, 5.0, math.inf, 0)]) == (10, "gradient norm inf is not finite, at step 10")
    assert watch([(10, 5.0, 1.0, 4), (20, 5.0, 1.0, 5)]) == (20, "the engine skipped 5 steps in a row, at step 20")


def random_run(rng):
    """A rule and reports that come near every border of it."""
    steps = rng.choice([40, 100, 333])
    rule = {
        "factor": rng.choice([1.05, 1.3, 2.0]),
        "patience": rng.randint(1, 4),
        "skipped": rng.randint(1, 6),
        "learnt_by": rng.choice([0.0, 0.3, 0.5, 1.0]),
    }
    level, reports = rng.choice([4.0, 6.0, 6.3, 8.0]), []
    for step in range(10, steps + 1, 10):
        level *= math.exp(rng.gauss(-0.03, 0.15))
        odd = rng.random()
        loss = math.nan if odd < 0.01 else math.inf if odd < 0.02 else KNOWS_NOTHING if odd < 0.1 else level
        norm = rng.choice([math.nan, math.inf]) if rng.random() < 0.02 else rng.random()
        reports.append((step, loss, norm, rng.randint(0, 6) if rng.random() < 0.05 else 0))
    return reports, rule, steps


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_end_at_the_report_and_for_the_reason_of_the_words(seed):
    rng = random.Random(seed)
    kinds = set()
    for _ in range(50):
        run = random_run(rng)
        found, expected = watch(*run), by_words(*run)
        assert (found is None) == (expected is None), run
        if expected:
            assert found[0] == expected[0]
            assert WORDS[expected[1]] in found[1]
            kinds.add(expected[1])
    assert kinds >= {"above", "never learnt"}  # the runs do reach the rule


@pytest.mark.parametrize("seed", range(10))
def test_a_run_resumed_from_json_at_any_report_decides_as_an_undisturbed_one(seed):
    rng = random.Random(1000 + seed)
    for _ in range(30):
        reports, rule, steps = random_run(rng)
        whole = watch(reports, rule, steps)
        watcher, found = DivergenceRule(rule, VOCAB, steps), None
        for report in reports:
            kept = json.loads(json.dumps(watcher.state()))
            watcher = DivergenceRule(rule, VOCAB, steps)
            watcher.restore(kept)
            why = watcher.report(*report)
            if why:
                found = (report[0], why)
                break
        assert found == whole


def test_a_fresh_rule_that_forgot_its_state_decides_otherwise():
    """So the resumed runs above depend on what is kept."""
    losses = [3.0, 5.0, 5.0]
    assert watch(every_ten([*losses, 5.0])) is not None
    watcher = DivergenceRule(RULE, VOCAB, 100)
    assert watcher.report(40, 5.0, 1.0, 0) is None


def test_the_defaults_of_a_sweep_make_a_rule():
    rule = Divergence().model_dump(mode="json")
    assert rule == RULE
    assert watch(every_ten([5.0, 6.6, 6.6, 6.6]), rule)[0] == 40


def test_the_example_in_the_rules_words_is_true():
    assert doctest.testmod(stopping).failed == 0
    assert doctest.testmod(stopping).attempted > 0


def test_a_run_that_stays_at_the_frequencies_of_tokens_is_stuck_and_one_that_moves_is_not():
    def first_stop(losses):
        rule = DivergenceRule(RULE, VOCAB, 100, frequency_loss=5.0)
        steps = [100 * k // len(losses) for k in range(1, len(losses) + 1)]
        return next((s for s, v in zip(steps, losses, strict=True) if rule.validated(s, v)), None)

    assert first_stop([5.2, 5.0, 5.0, 4.99, 4.98, 4.97, 4.97, 4.97, 4.97, 4.97]) == 100
    assert first_stop([9.0, 5.2, 5.1, 5.0, 4.99, 4.98, 4.97, 4.97, 4.97, 4.6]) is None  # a plateau, left in time
    assert first_stop([6.0, 5.9, 5.8, 5.7, 5.6, 5.5, 5.4, 5.3, 5.2, 5.1]) is None  # slow, but it learns
    assert first_stop([5.0, 4.99]) == 100
    assert first_stop([4.99]) is None  # nothing to compare with
    assert first_stop([4.0, 4.0, 4.0, 4.0, 4.0]) is None
    assert first_stop([4.0, math.nan]) == 100


def test_a_stuck_run_is_judged_alike_after_a_resume():
    rule = DivergenceRule(RULE, VOCAB, 100, frequency_loss=5.0)
    rule.validated(40, 4.96)
    again = DivergenceRule(RULE, VOCAB, 100, frequency_loss=5.0)
    again.restore(json.loads(json.dumps(rule.state())))
    assert again.validated(100, 4.95) == rule.validated(100, 4.95) is not None
