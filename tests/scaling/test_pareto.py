"""The front against the definition, tried point by point."""

import numpy as np
import pytest

from depthlaw.scaling.pareto import front


def by_definition(points):
    """Indices that no other point undercuts or equals in all coordinates; the first of several that are equal."""
    kept = set()
    for i, p in enumerate(points):
        as_good = (points <= p).all(axis=1)
        better = as_good & ((points < p).any(axis=1) | (np.arange(len(points)) < i))
        if not better.any():
            kept.add(i)
    return kept


@pytest.mark.parametrize("seed", range(40))
def test_the_front_is_that_of_the_definition_with_ties_and_equal_points(seed):
    rng = np.random.default_rng(seed)
    points = rng.integers(0, rng.integers(2, 30), (rng.integers(1, 120), 3)).astype(float)
    got = front(points)
    assert set(got.tolist()) == by_definition(points)
    assert len(set(got.tolist())) == len(got)
    assert (np.diff(points[got, 0]) >= 0).all()


def test_a_point_that_is_not_finite_is_not_on_the_front():
    assert front(np.array([[1.0, np.nan, 1.0], [2.0, 2.0, 2.0], [3.0, np.inf, 0.0]])).tolist() == [1]
    assert front(np.empty((0, 3))).tolist() == []


def test_a_front_of_more_points_than_are_looked_at_together_is_that_of_the_definition(monkeypatch):
    monkeypatch.setattr("depthlaw.scaling.pareto.BLOCK", 16)
    for seed in range(20):
        points = np.random.default_rng(seed).integers(0, 25, (300, 3)).astype(float)
        assert set(front(points).tolist()) == by_definition(points)
