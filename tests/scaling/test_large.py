"""Tables too large to be worked on at once: what is done in parts is the same."""

import numpy as np
import pytest

from depthlaw.scaling import bootstrap as bootstrapping
from depthlaw.scaling import lm, search
from depthlaw.scaling.bootstrap import bootstrap, clusters, problem_of
from depthlaw.scaling.fit import fit
from depthlaw.scaling.rows import read_rows


def test_starts_that_go_one_group_after_another_end_where_they_would_together(simulated, monkeypatch):
    rows = read_rows(simulated(noise=0.004))
    problem = problem_of(fit(simulated(noise=0.004), starts=8), rows)
    (low, high), start = problem.ranges("bounds"), search.latin_hypercube(problem, 12, 0)

    def ends():
        return lm.minimise(problem.residual, problem.jacobian, start, low, high, 1e-2, max_steps=40)

    whole, seen = ends(), []
    monkeypatch.setattr(lm, "AT_ONCE", 5 * rows.N.size * start.shape[1])
    residual = problem.residual
    object.__setattr__(problem, "residual", lambda theta: seen.append(len(theta)) or residual(theta))
    parts = ends()
    assert max(seen) == 5
    assert np.array_equal(parts.theta, whole.theta)
    assert np.array_equal(parts.objective, whole.objective)
    assert (parts.steps, parts.converged.tolist()) == (whole.steps, whole.converged.tolist())


def test_a_jacobian_that_is_read_in_blocks_of_rows_gives_the_same_fit(simulated, monkeypatch):
    frame = simulated(noise=0.004)
    whole = fit(frame, starts=8)
    monkeypatch.setattr(lm, "AT_ONCE", 50 * len(whole.names))  # 50 rows at once, of one start
    assert fit(frame, starts=8).theta == pytest.approx(whole.theta, rel=1e-5)


def test_draws_that_are_made_in_parts_are_those_of_one_go_and_are_told(simulated, monkeypatch):
    frame, told = simulated(noise=0.004), []
    rows, fitted = read_rows(frame), fit(frame, starts=8)
    whole = bootstrap(fitted, rows, clusters(rows), 50)
    monkeypatch.setattr(bootstrapping, "WEIGHTS_AT_ONCE", 20 * len(frame))
    parts = bootstrap(fitted, rows, clusters(rows), 50, progress=told.append)
    assert told == ["bootstrap, 0 of 50 draws", "bootstrap, 20 of 50 draws", "bootstrap, 40 of 50 draws"]
    assert np.array_equal(parts.draws, whole.draws)
