"""How often checkpoints are written: often where they are cheap, seldom where they are not."""

import doctest
import math

import pytest

from depthlaw.platform import cadence
from depthlaw.platform.cadence import Cadence
from depthlaw.platform.config import parse_config


class Simulated:
    """A run of `hours` whose intervals take `interval_s` and whose checkpoints take what `cost_s` says, in order."""

    def __init__(self, every_s, interval_s, cost_s, hours):
        self.now, self.saved_at, costs = 0.0, [], iter(cost_s)
        kept = Cadence(every_s, clock=lambda: self.now)
        self.spent = 0.0
        while self.now < hours * 3600:
            self.now += interval_s
            if kept.due():
                cost = next(costs)
                kept.started()
                self.now += cost
                kept.ended()
                self.saved_at.append(self.now)
                self.spent += cost


def always(cost):
    while True:
        yield cost


def test_the_doctest_holds():
    assert doctest.testmod(cadence).failed == 0


def test_a_small_model_loses_little_more_than_the_interval_that_was_asked_for():
    run = Simulated(30, 0.5, always(0.05), hours=1)
    gaps = [b - a for a, b in zip(run.saved_at, run.saved_at[1:], strict=False)]
    assert max(gaps) <= 30 + 2 * 0.5 + 0.05
    assert run.saved_at[0] <= 31


@pytest.mark.parametrize("cost", [2.0, 20.0, 120.0])
def test_no_more_than_a_twentieth_of_the_time_goes_into_checkpoints_whatever_they_cost(cost):
    run = Simulated(30, 5, always(cost), hours=6)
    share = run.spent / run.now
    assert len(run.saved_at) >= 2
    assert share <= 0.05 + 1e-9
    assert share > 0.04  # and not far less: what is lost to an interruption counts too


def test_a_checkpoint_that_once_took_long_is_made_up_for_and_not_held_against_the_run_for_ever():
    def costs():
        yield from (0.1, 60.0)
        yield from always(0.1)

    run = Simulated(30, 1, costs(), hours=2)
    assert run.spent / run.now <= 0.05
    gaps = [b - a for a, b in zip(run.saved_at, run.saved_at[1:], strict=False)]
    assert sum(gap > 32 for gap in gaps) <= 2
    assert gaps[-1] <= 32


def test_the_default_is_half_a_minute(sweep_of):
    assert parse_config(sweep_of()).checkpoint_every_s == 30
    assert math.isclose(cadence.SHARE, 0.05)
