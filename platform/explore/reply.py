"""What a page is told when something on it was moved."""

from __future__ import annotations

import logging
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Event
from typing import Any

import numpy as np

from depthlaw.platform.explore import state as states
from depthlaw.platform.explore.source import Source
from depthlaw.platform.explore.state import Asked, State
from depthlaw.platform.query import Question
from depthlaw.scaling.budgets import Budget, every_budget, parse_budget
from depthlaw.scaling.optimum import Found, Infeasible
from depthlaw.scaling.units import format_quantity, parse_quantity

STEPS = 120  # of a budget's slider
NO_SPAN = (1.0, 1e12)  # of a budget that no design uses any of


@dataclass(frozen=True)
class Reply:
    """found or infeasible, or neither where `errors` says why not."""

    asked: Asked
    question: Question | None = None
    found: Found | None = None
    infeasible: Infeasible | None = None
    errors: dict[str, str] = field(default_factory=dict)
    outdated: Event = field(default_factory=Event)  # set once something else was moved


def ask(query: str, source: Source) -> Reply:
    """The answer to a page's query string. Raises nothing: a page outlives whatever is typed into it."""
    asked = states.read(states.all_topologies(State.of(query), source), source)
    if asked.errors:
        return Reply(asked, errors=asked.errors)
    try:
        question = source.question(asked.state.topologies)
        return Reply(asked, question, question.find(asked.state.budgets, **asked.arguments))
    except Infeasible as no:
        return Reply(asked, infeasible=no)
    except Exception as error:
        if type(error).__module__.startswith("depthlaw."):
            return Reply(asked, errors={"": str(error)})
        # A budget of another package can fail in any way.
        logging.getLogger(__name__).exception("a question failed: %s", query)
        return Reply(asked, errors={"": f"the question failed ({type(error).__name__}: {error})"})


def slider_steps(asked: Asked, source: Source) -> dict[str, tuple[str, ...]]:
    """What each budget's slider goes through: from the least to the most that a design uses, evenly in the logarithm.

    Depends on context, batch, hardware and training, and never on the limits.
    """
    if any(not where.startswith("budget:") for where in asked.errors):
        return {}
    budgets = tuple(every_budget()[0])
    return _scales(source.question(asked.state.topologies), budgets, tuple(asked.arguments.items()))


@lru_cache(maxsize=8)
def _scales(
    question: Question, budgets: tuple[Budget, ...], arguments: tuple[tuple[str, Any], ...]
) -> dict[str, tuple[str, ...]]:
    found = {}
    for budget in budgets:
        try:
            span = question.span(budget, **dict(arguments))
        except Exception:  # asking about it will say what fails
            span = None
        found[budget.name] = _steps(*(span or NO_SPAN), budget.unit)
    return found


def _steps(low: float, high: float, unit: str) -> tuple[str, ...]:
    if high < 1.5 * low:
        low, high = low / 10, high * 10
    return tuple(format_quantity(value, unit) for value in np.geomspace(low, high, STEPS + 1).tolist())


def positions(state: State, steps: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """Where each limit is on its slider."""
    found = {}
    for text in state.budgets:
        try:
            limit = parse_budget(text)
            scale = [parse_quantity(step, limit.budget.unit) for step in steps[limit.name]]
        except (ValueError, KeyError):  # said by its field
            continue
        found[limit.name] = min(bisect_left(scale, limit.limit * (1 - 1e-9)), STEPS)
    return found
