"""What is set on the page: a query string, and so a link; a command; a call. Raw texts, as people write them."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from depthlaw.platform.explore.source import Source
from depthlaw.scaling.budgets import BudgetError, parse_budget
from depthlaw.scaling.hardware import HardwareError, Workload
from depthlaw.scaling.training import OptimumError, amount
from depthlaw.scaling.units import UnitError, parse_context, parse_quantity


def _count(text: str) -> float:
    return parse_quantity(text, "count")


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UnitError(f"{text!r} is not a whole number; write one such as 8") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnitError(f"{text!r} is not a number; write one such as 0.5") from None


def _of_training(name: str, value: Any) -> None:
    amount((), **({"tokens": None, "tokens_per_param": None, "seq_len": 1, "mfu": 1.0} | {name: value}))


def _of_workload(name: str, value: Any) -> None:
    Workload(**{name: value})


class Field(NamedTuple):
    """One setting beside the budgets. default: what the command takes if it is not given, "" if that depends."""

    name: str  # of the argument; the command's option is the same with dashes
    label: str
    default: str
    hint: str
    read: Callable[[str], Any]
    check: Callable[[str, Any], None]
    steps: tuple[str, ...] = ()  # what its slider goes through

    @property
    def of_workload(self) -> bool:
        return self.check is _of_workload


POWERS = [2**k for k in range(21)]
CONTEXTS = tuple(str(n) if n < 1024 else f"{n // 1024}k" if n < 2**20 else "1M" for n in POWERS[6:])
FIELDS = (
    Field("context", "Context", "4096", "tokens in the KV cache, such as 32k", parse_context, _of_workload, CONTEXTS),
    Field("batch", "Batch", "1", "sequences decoded at once", _whole, _of_workload, tuple(str(n) for n in POWERS[:11])),
    Field("weight_bytes", "Bytes of a weight", "2", "4 fp32, 2 bf16, 1 fp8", _number, _of_workload),
    Field("cache_bytes", "Bytes of a cache element", "2", "4 fp32, 2 bf16, 1 fp8", _number, _of_workload),
    Field("tensor_parallel", "Devices", "1", "that share the model at inference", _whole, _of_workload),
    Field("tokens", "Training tokens", "", "such as 8B", _count, _of_training),
    Field("tokens_per_param", "Tokens for each parameter", "", "20 where nothing says how much", _number, _of_training),
    Field("seq_len", "Training sequence", "", "tokens; default that of the law", _whole, _of_training),
    Field("mfu", "Share of peak", "0.4", "reached in training, for device_hours", _number, _of_training),
)
HARDWARE = "h100"


@dataclass(frozen=True)
class State:
    """budgets: as written, such as "params<=400M". fields: text by name, of those that are not left at their default.
    topologies: those asked about, or none for all."""

    budgets: tuple[str, ...] = ()
    fields: dict[str, str] = field(default_factory=dict)
    hardware: str = HARDWARE
    topologies: tuple[str, ...] = ()

    @classmethod
    def of(cls, query: str) -> State:
        """What `query` gives back; what it does not know is left out."""
        pairs = [(name, value.strip()) for name, value in parse_qsl(query, keep_blank_values=True)]
        last = dict(pairs)
        texts = {f.name: last[f.name] for f in FIELDS if last.get(f.name, "") not in ("", f.default)}
        return cls(
            tuple(value for name, value in pairs if name == "budget"),
            texts,
            last.get("hardware") or HARDWARE,
            tuple(dict.fromkeys(value for name, value in pairs if name == "topology")),
        )

    def query(self) -> str:
        """The link's part behind the question mark; empty where nothing is set."""
        pairs = [("budget", text) for text in self.budgets] + list(self.fields.items())
        pairs += [("hardware", self.hardware)] if self.hardware != HARDWARE else []
        return urlencode([*pairs, *(("topology", t) for t in self.topologies)])


@dataclass(frozen=True)
class Asked:
    """A state that was read. arguments: of `Question.find` beside the budgets. errors: one line by the field it is
    about, `budget:NAME` for a budget and "" for none of them."""

    state: State
    arguments: dict[str, Any]
    errors: dict[str, str]


def read(state: State, source: Source) -> Asked:
    """Every field read on its own, so that each that is wrong can say so."""
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for f in FIELDS:
        try:
            if f.name in state.fields:
                value = f.read(state.fields[f.name])
                f.check(f.name, value)
                values[f.name] = value
        except (UnitError, HardwareError, OptimumError) as error:
            errors[f.name] = str(error)
    if "tokens" in values and "tokens_per_param" in values:
        errors["tokens"] = "training tokens and tokens for each parameter are both given: keep one"
    names: set[str] = set()
    for text in state.budgets:
        name = text.partition("<")[0].strip()
        try:
            parse_budget(text)
        except BudgetError as error:
            errors[f"budget:{name}"] = str(error)
        if name in names:
            errors[f"budget:{name}"] = f"{name} is limited twice: keep one"
        names.add(name)
    if state.hardware not in source.hardware:
        errors["hardware"] = f"unknown hardware {state.hardware!r}; choose one of {', '.join(source.hardware)}"
    unknown = [t for t in state.topologies if t not in source.topologies]
    if unknown:
        known = ", ".join(source.topologies)
        errors["topology"] = f"topology {unknown[0]!r} is not in the law or not installed here; choose of {known}"
    load = {f.name: values.pop(f.name) for f in FIELDS if f.of_workload and f.name in values}
    return Asked(state, {**values, "workload": Workload(**load), "hardware": state.hardware}, errors)


def command(asked: Asked, source: Source) -> str:
    """The command line that gives the page's answer, for a POSIX shell."""
    state = asked.state
    words = [*source.words(), *state.budgets]
    for name, text in state.fields.items():
        words += [f"--{name.replace('_', '-')}", text]
    words += ["--hardware", state.hardware] if state.hardware != HARDWARE else []
    words += [word for t in state.topologies for word in ("--topology", t)]
    return shlex.join([*words, *source.options()])


def call(asked: Asked, source: Source) -> str:
    """The lines of Python that give the page's answer."""
    given = dict(asked.arguments)
    load, hardware = given.pop("workload"), given.pop("hardware")
    own = [f"{f.name}={getattr(load, f.name)!r}" for f in FIELDS if f.of_workload and f.name in asked.state.fields]
    if asked.state.topologies:
        given["topologies"] = list(asked.state.topologies)
    if hardware != HARDWARE:
        given["hardware"] = hardware
    words = [f"{name}={value!r}" for name, value in {**given, **source.arguments()}.items()]
    words += [f"workload=depthlaw.Workload({', '.join(own)})"] if own else []
    arguments = ",\n    ".join(["law", repr(list(asked.state.budgets)), *words])
    return (
        f"import depthlaw\n\nlaw = {source.call()}\nanswer = depthlaw.optimum(\n    {arguments},\n)\nprint(answer.best)"
    )


def all_topologies(state: State, source: Source) -> State:
    """The same with no topologies named where all are, in the law's order where some are."""
    known = source.topologies
    chosen = tuple(t for t in known if t in state.topologies)
    others = tuple(t for t in state.topologies if t not in known)
    return replace(state, topologies=() if chosen == known else chosen + others)
