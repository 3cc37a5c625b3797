"""The drawn front: scales, ticks, and points where their values are."""

import math
import re

import pytest

from depthlaw.platform.explore.chart import MOST_TICKS, _Scale, chart, marker
from depthlaw.platform.palette import MARKERS
from depthlaw.scaling.answer import Candidate


def design(topology, loss, seconds):
    return Candidate(topology, 2, 64, 32.0, 1, 1, 1.0, loss, loss, loss, seconds, 2.0**20, {}, None, 1.0, 1.0)


@pytest.mark.parametrize("base", [1000.0, 1024.0])
@pytest.mark.parametrize("ratio", [1.0, 1.0001, 1.3, 3, 5.5, 7, 40, 1e4, 1e9])
def test_ticks_are_few_and_inside_and_wherever_there_is_a_range_at_least_two(base, ratio):
    for low in (2.6834, 1.9e-5, 0.3, 7.7e8):
        scale = _Scale(low, low * ratio, 50, 368)
        ticks = scale.ticks(base)
        assert 1 <= len(ticks) <= MOST_TICKS + 1
        assert len(ticks) >= 2 or ratio < 1.01
        assert all(50 - 1e-6 <= scale.place(tick) <= 368 + 1e-6 for tick in ticks)
        assert ticks == sorted(set(ticks))


def test_a_point_stands_where_the_logarithms_of_its_values_say():
    designs = [design("hc", 2.5, 1e-3), design("pre_ln", 5.0, 1e-4), design("hc", 3.0, 3e-4)]
    drawn = chart(designs, designs[0], ["pre_ln", "hc"], "tpot_s", "seconds", "time")
    ticks = {
        label: float(x) for x, label in re.findall(r'<text x="([\d.]+)" y="\d+" class="middle">([^<]+)</text>', drawn)
    }
    at = float(re.search(r'<circle cx="([\d.]+)"', drawn)[1])
    assert at == pytest.approx(ticks["1 ms"], abs=0.11)
    per_decade = (ticks["1 ms"] - ticks["100 us"]) / math.log(10)
    assert ticks["500 us"] == pytest.approx(ticks["100 us"] + per_decade * math.log(5), abs=0.2)
    assert drawn.count("<title>") == 3
    assert "hc, L 2, d 64: 3.0000, 300 us" in drawn


def test_each_topology_has_a_sign_of_its_own_and_text_is_escaped():
    shapes = {re.search(r' d="([^"]*)"', marker(k, 0, 0))[1] for k in range(len(MARKERS))}
    assert len(shapes) == len(MARKERS)
    assert "<b>" not in marker(0, 0, 0, "<b>")
