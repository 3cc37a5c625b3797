"""Budgets: what a design may use at most. Adding one is a function and a decorator.

    @budget("kv_mib_per_user", unit="bytes")
    def kv_mib_per_user(design, workload, hardware):
        \"\"\"KV cache of one user at full context.\"\"\"
        return workload.cache_bytes * design.kv_elements(workload.context)

and "kv_mib_per_user<=64MiB" then works wherever budgets are written. A function with a fourth argument named `training`
is also given how much each design is trained. A package offers its budgets to the command line through the entry point
group `depthlaw.budgets`: docs/adding.md.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from depthlaw.scaling import hardware as machine
from depthlaw.scaling.design import Design
from depthlaw.scaling.hardware import Hardware, Workload
from depthlaw.scaling.laws import Array
from depthlaw.scaling.units import UnitError, format_quantity, parse_quantity

ENTRY_POINTS = "depthlaw.budgets"
# (design over m shapes, workload, hardware[, training]) -> what each shape uses, (m,), in the budget's unit.
Use = Callable[..., Any]


class BudgetError(ValueError):
    """A budget that cannot be read or used: one line with the text and what is allowed."""


@dataclass(frozen=True)
class Training:
    """How a design is trained: `tokens` D of each of its shapes, (m,) or one number, in sequences of seq_len tokens, on
    devices that reach the share `mfu` of their peak."""

    tokens: Array
    seq_len: int
    mfu: float


@dataclass(frozen=True)
class Budget:
    """A named use of a design. unit: `count`, `bytes`, `seconds`, `FLOPs`, `hours`, or a word of its own that is then
    written plainly."""

    name: str
    unit: str
    use: Use
    describe: str
    of_training: bool = False  # whether `use` takes the fourth argument

    def of(self, design: Design, workload: Workload, hardware: Hardware, training: Training) -> Any:
        given = {"training": training} if self.of_training else {}
        return self.use(design, workload, hardware, **given)


BUDGETS: dict[str, Budget] = {}


def budget(name: str, unit: str) -> Callable[[Use], Use]:
    """Decorator that makes a function usable as a budget under this name; its docstring's first line describes it.

    Raises BudgetError if the name is not a plain word or another function has it, or for other arguments than (design,
    workload, hardware) or (design, workload, hardware, training); running one definition again is fine.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise BudgetError(f"{name!r} cannot name a budget: use letters, digits and underscores")

    def register(use: Use) -> Use:
        taken = BUDGETS.get(name)
        if taken and (taken.use.__module__, taken.use.__qualname__) != (use.__module__, use.__qualname__):
            raise BudgetError(f"budget {name!r} exists already ({taken.describe}): choose another name")
        takes = inspect.signature(use).parameters.values()
        needed = [
            p.name for p in takes if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        of_training = any(p.name == "training" for p in takes)
        if len(needed) - ("training" in needed) != 3:
            raise BudgetError(
                f"budget {name!r} takes ({', '.join(needed)}); write it as a function of (design, workload, hardware), "
                "or of (design, workload, hardware, training) to see how many tokens each design is trained on"
            )
        describe = (use.__doc__ or name).strip().splitlines()[0]
        BUDGETS[name] = Budget(name, unit, use, describe, of_training)
        return use

    return register


def find_budget(name: str) -> Budget:
    """The budget of this name: one that was registered, else one that an installed package offers.

    Packages are looked through only for a name that is not known here. Raises BudgetError naming those that exist.
    """
    if name not in BUDGETS:
        for point in _offered():
            if point.name == name:
                _load(point)
    if name not in BUDGETS:
        raise BudgetError(f"unknown budget {name!r}; choose one of {_listed()}")
    return BUDGETS[name]


def every_budget() -> tuple[list[Budget], list[str]]:
    """All budgets there are, those that packages offer included, which are imported; in words, which do not load."""
    problems = []
    for point in _offered():
        if point.name not in BUDGETS:
            try:
                _load(point)
            except BudgetError as error:
                problems.append(str(error))
    return list(BUDGETS.values()), problems


def _offered() -> list[Any]:
    from importlib.metadata import entry_points

    return list(entry_points(group=ENTRY_POINTS))


def _load(point: Any) -> None:
    """Imports what an entry point names, which registers it."""
    whose = f"budget {point.name!r} of the package {point.dist.name if point.dist else point.value}"
    try:
        point.load()
    except Exception as error:
        raise BudgetError(f"{whose} does not load ({type(error).__name__}: {error}): repair or uninstall it") from error
    if point.name not in BUDGETS:
        raise BudgetError(
            f"{whose} is not registered by {point.value}: decorate it as @budget({point.name!r}, unit=...)"
        )


def _listed() -> str:
    """Every budget with its unit; of those that packages offer and that are not loaded yet, the name."""
    here = [f"{b.name} ({b.unit})" for b in BUDGETS.values()]
    return ", ".join(here + [point.name for point in _offered() if point.name not in BUDGETS])


@budget("params", unit="count")
def params(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """All parameters: backbone, embedding and head."""
    return design.params


@budget("kv_bytes", unit="bytes")
def kv_bytes(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """KV cache of the whole batch at full context, over all devices."""
    return machine.kv_bytes(design, workload)


@budget("tpot", unit="seconds")
def tpot(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """Time per output token: one decode step of the batch at full context."""
    return machine.tpot(design, workload, hardware)


@budget("ttft", unit="seconds")
def ttft(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """Time to the first token: prefill of the batch, each prompt as long as the context."""
    return machine.ttft(design, workload, hardware)


@budget("backbone_params", unit="count")
def backbone_params(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """Parameters without embedding and head: N of the laws."""
    return design.backbone_params


@budget("weight_bytes", unit="bytes")
def weight_bytes(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """All weights, embedding and head included, over all devices."""
    return machine.weight_bytes(design, workload)


@budget("peak_memory", unit="bytes")
def peak_memory(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """What one device holds at the peak: weights, KV cache, and the numbers of a prefill of the whole batch."""
    return machine.peak_memory(design, workload, hardware)


@budget("prefill_flops", unit="FLOPs")
def prefill_flops(design: Design, workload: Workload, hardware: Hardware) -> Any:
    """One prefill of the batch, each prompt as long as the context."""
    return machine.prefill_flops(design, workload)


@budget("train_flops", unit="FLOPs")
def train_flops(design: Design, workload: Workload, hardware: Hardware, training: Training) -> Any:
    """The whole training, forward and backward. D follows from it where no other amount of training is given."""
    return training.tokens * np.asarray(design.train_flops_per_token(training.seq_len), float)


@budget("train_tokens", unit="count")
def train_tokens(design: Design, workload: Workload, hardware: Hardware, training: Training) -> Any:
    """Training tokens D."""
    return training.tokens


@budget("device_hours", unit="hours")
def device_hours(design: Design, workload: Workload, hardware: Hardware, training: Training) -> Any:
    """Hours of one device for the whole training, at the share `mfu` of its peak."""
    return train_flops(design, workload, hardware, training) / (hardware.peak_flops * training.mfu) / 3600.0


@dataclass(frozen=True)
class Limit:
    """A budget with its limit, in the budget's unit, and the text it was written as."""

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
    found = find_budget(name)
    if operator not in ("<", "<="):
        raise BudgetError(f"{text!r} uses {operator!r}; a budget is an upper limit: write {name}<={quantity}")
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
