"""Budgets: what a design may use at most. Adding one is a function and a decorator.

    @budget("kv_mib_per_user", unit="bytes")
    def kv_mib_per_user(design, workload, hardware):
        \"\"\"KV cache of one user at full context.\"\"\"
        return workload.cache_bytes * design.kv_elements(workload.context)

and "kv_mib_per_user<=64MiB" then works wherever budgets are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from depthlaw.scaling import hardware as machine
from depthlaw.scaling.design import Design
from depthlaw.scaling.hardware import Hardware, Workload
from depthlaw.scaling.units import UnitError, format_quantity, parse_quantity

# (design over m shapes, workload, hardware) -> what each shape uses, (m,), in counts, bytes, seconds or the own unit.
Use = Callable[[Design, Workload, Hardware], Any]


class BudgetError(ValueError):
    """A budget that cannot be read or used: one line with the text and what is allowed."""


@dataclass(frozen=True)
class Budget:
    """A named use of a design. unit: `count`, `bytes`, `seconds`, or a word of its own that is then written plainly."""

    name: str
    unit: str
    use: Use
    describe: str


BUDGETS: dict[str, Budget] = {}


def budget(name: str, unit: str) -> Callable[[Use], Use]:
    """Decorator that makes a function usable as a budget under this name; its docstring's first line describes it.

    Raises BudgetError if the name is not a plain word or another function has it; running one definition again is fine.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise BudgetError(f"{name!r} cannot name a budget: use letters, digits and underscores")

    def register(use: Use) -> Use:
        taken = BUDGETS.get(name)
        if taken and (taken.use.__module__, taken.use.__qualname__) != (use.__module__, use.__qualname__):
            raise BudgetError(f"budget {name!r} exists already ({taken.describe}): choose another name")
        describe = (use.__doc__ or name).strip().splitlines()[0]
        BUDGETS[name] = Budget(name, unit, use, describe)
        return use

    return register


@budget("params", unit="count")
def params(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """All parameters: backbone, embedding and head."""
    return design.params


@budget("kv_bytes", unit="bytes")
def kv_bytes(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """KV cache of the whole batch at full context."""
    return machine.kv_bytes(design, workload)


@budget("tpot", unit="seconds")
def tpot(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """Time per output token: one decode step of the batch at full context."""
    return machine.tpot(design, workload, hardware)


@budget("ttft", unit="seconds")
def ttft(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """Time to the first token: prefill of the batch, each prompt as long as the context."""
    return machine.ttft(design, workload, hardware)


@dataclass(frozen=True)
class Limit:
    """A budget with its limit, in counts, bytes or seconds, and the text it was written as."""

    budget: Budget
    limit: float
    text: str

    @property
    def name(self) -> str:
        return self.budget.name

    def show(self, value: float) -> str:
        return format_quantity(value, self.budget.unit)


def parse_budget(text: str) -> Limit:
    """`name <= quantity`, such as "kv_bytes<=2GiB"; `<` means the same. Raises BudgetError."""
    match = re.fullmatch(r"\s*(\w+)\s*([<>=!~]+)\s*(.*?)\s*", text)
    if not match:
        raise BudgetError(f"{text!r} is not a budget; write name<=limit, such as params<=400M. Budgets: {_listed()}")
    name, operator, quantity = match.groups()
    if name not in BUDGETS:
        raise BudgetError(f"unknown budget {name!r} in {text!r}; choose one of {_listed()}")
    if operator not in ("<", "<="):
        raise BudgetError(f"{text!r} uses {operator!r}; a budget is an upper limit: write {name}<={quantity}")
    found = BUDGETS[name]
    try:
        return Limit(found, parse_quantity(quantity, found.unit), text.strip())
    except UnitError as error:
        raise BudgetError(f"budget {text!r}: {error}") from error


def parse_budgets(texts: str | Sequence[str | Limit]) -> tuple[Limit, ...]:
    """All budgets of a question. One name twice is an error: which limit is meant is the asker's to say."""
    texts = [texts] if isinstance(texts, str) else texts
    limits = tuple(t if isinstance(t, Limit) else parse_budget(t) for t in texts)
    by_name: dict[str, str] = {}
    for limit in limits:
        if limit.name in by_name:
            raise BudgetError(f"{limit.name} is limited twice, {by_name[limit.name]!r} and {limit.text!r}: keep one")
        by_name[limit.name] = limit.text
    return limits


def _listed() -> str:
    return ", ".join(f"{b.name} ({b.unit})" for b in BUDGETS.values())
