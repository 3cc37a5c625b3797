"""A sweep as a person writes it in YAML, validated. Unknown keys are errors that name the key and the allowed ones."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from depthlaw.archs.diagnostics import DiagnosticName
from depthlaw.archs.errors import ShapeError
from depthlaw.archs.shape import SHAPE_RULES, Shape, shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform.config_sections import (
    Block,
    Divergence,
    LrSearch,
    Optimizer,
    Pruning,
    Schedule,
    Strict,
    Validation,
)
from depthlaw.platform.data_config import DataConfig

Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch and the store take


class _Boolean:
    """Stands for True or False as written, which pydantic would take as 1 and 0 where a number is asked for."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _written_as_boolean(given: Any) -> bool:
    if isinstance(given, _Boolean | bool):
        return given.value if isinstance(given, _Boolean) else given
    raise ValueError(f"{given!r} is neither true nor false")


YesOrNo = Annotated[bool, BeforeValidator(_written_as_boolean)]


class ConfigError(ValueError):
    """A sweep that cannot be planned: one line that says where, the value, and what is allowed."""


class SweepConfig(Strict):
    """A whole sweep. `batch_tokens` is one step over all ranks, `micro_batch_seqs` what a rank holds at once.

    A trial is trained by `ranks_per_trial` processes, each with `cpus_per_rank` and `gpus_per_rank`.

    `max_epochs`: how often the longest trial may see the same text; beyond it the sweep is refused.
    """

    name: str
    data: DataConfig
    seq_len: PositiveInt
    batch_tokens: PositiveInt
    micro_batch_seqs: PositiveInt
    shape_rule: str = "published"
    grid: list[Block] = Field(min_length=1)
    seeds: list[Seed] = Field([0], min_length=1)
    max_epochs: PositiveFloat = 1.0
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    validation: Validation = Validation()
    divergence: Divergence = Divergence()
    pruning: Pruning | None = None
    log_every: PositiveInt = 10
    layer_stats_every: int = Field(0, ge=0)  # steps between statistics of each sublayer; 0 for none
    loggers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(["tensorboard"])
    checkpoint_every_s: PositiveFloat = 30.0  # and at most 5 % of the time goes into checkpoints
    # Weights of finished trials, exported into the store; `best` leaves those of the lowest loss in each cell. Only
    # trials that train from now on have any. `diagnostics` run on those that are kept, when the sweep is complete.
    keep_checkpoints: Literal["none", "best", "all"] = "none"
    diagnostics: list[DiagnosticName] = Field([])
    precision: Literal["fp32", "bf16"] = "fp32"
    zero_stage: Literal[0, 1, 2, 3] = 0
    activation_checkpointing: YesOrNo = False
    ranks_per_trial: PositiveInt = 1
    cpus_per_rank: PositiveInt = 1
    gpus_per_rank: Literal[0, 1] = 0
    # What a trial is expected to run on and the share of its peak it reaches: only for the dry run's estimate of hours.
    estimate_hardware: str = "cpu"
    estimate_mfu: Annotated[float, Field(gt=0, le=1)] = 0.4

    @model_validator(mode="after")
    def _fits(self) -> SweepConfig:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(
                f"name is {self.name!r}; it also names the store's folder: letters, digits, '.', '_' and '-', "
                "beginning with a letter or digit"
            )
        if self.shape_rule not in SHAPE_RULES:
            raise ValueError(f"shape_rule is {self.shape_rule!r}; choose one of {', '.join(SHAPE_RULES)}")
        micro = self.seq_len * self.micro_batch_seqs * self.ranks_per_trial
        if self.batch_tokens % micro:
            ranks = " x ranks_per_trial" if self.ranks_per_trial > 1 else ""
            raise ValueError(
                f"batch_tokens {self.batch_tokens} is not a multiple of seq_len x micro_batch_seqs{ranks} = {micro}: "
                "a step is a whole number of micro-batches on every rank"
            )
        if self.layer_stats_every and self.zero_stage == 3:
            raise ValueError("layer_stats_every needs whole tensors, and zero_stage 3 splits them: set it to 0, 1 or 2")
        self._check_rungs()
        if self.diagnostics and self.keep_checkpoints == "none":
            raise ValueError("diagnostics need weights: set keep_checkpoints to best or all, or leave diagnostics out")
        for block in self.grid:
            for label in block.topologies:
                topology(label)
            for given in block.shapes:
                self.shape(given)
        return self

    def _check_rungs(self) -> None:
        if self.pruning is None:
            return
        if self.schedule.kind == "wsd":
            raise ValueError(
                "pruning and schedule.kind wsd exclude each other: a pruned trial would end a shared trunk"
            )
        times = self.validation.times
        if not all(math.ceil(at * times) < times for at in self.pruning.at):
            raise ValueError(
                f"pruning.at {self.pruning.at} has a rung with no validation between it and the end of the run: raise "
                f"validation.times, which is {times}, or prune earlier"
            )

    def shape(self, given: tuple[int, int] | dict[str, int]) -> Shape:
        """The full shape of one entry of `shapes`. Raises ShapeError."""
        if isinstance(given, dict):
            needed = {"n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff"}
            if set(given) != needed:
                raise ShapeError(f"shape {given}: give exactly {', '.join(sorted(needed))}, or [n_layers, d_model]")
            return Shape(**given, vocab_size=self.data.vocab_size)
        return shape_rule(self.shape_rule).shape(*given, self.data.vocab_size)


class _Loader(yaml.SafeLoader):
    """YAML in which a key that is given twice is a mistake, where PyYAML would keep the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"key {key.value!r} is given twice in one mapping, again at line {line}: keep one")
            seen.add(name)
        return node


def _marked(raw: Any) -> Any:
    if isinstance(raw, dict):
        return {key: _marked(value) for key, value in raw.items()}
    if isinstance(raw, list | tuple):
        return [_marked(value) for value in raw]
    return _Boolean(raw) if isinstance(raw, bool) else raw


def load_config(path: str | Path) -> SweepConfig:
    """Reads and validates a sweep's YAML. Raises ConfigError with one line."""
    path = Path(path)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    return parse_config(raw, str(path))


def parse_config(raw: Any, source: str = "config") -> SweepConfig:
    """The same for a mapping that is already in memory."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: a sweep is a mapping with {', '.join(SweepConfig.model_fields)}")
    try:
        return SweepConfig.model_validate(_marked(raw))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_one_line(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: a list or mapping holds itself") from error


def _one_line(error: ValidationError) -> str:
    """The first thing that is wrong, and how many more there are; a key misspelt before what it leaves missing."""
    first, *more = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        allowed = ", ".join(_fields_at(first["loc"][:-1]))
        text = f"unknown key {where!r}; allowed here: {allowed}"
    elif first["type"] == "value_error":
        text = f"{where + ': ' if where else ''}{first['ctx']['error']}"
    else:
        text = (
            f"{where}: {first['msg']}, got {first['input']!r}" if first["type"] != "missing" else f"{where} is missing"
        )
    others = ", ".join(sorted({".".join(str(part) for part in e["loc"]) or "the whole" for e in more}))
    return text + (f"; wrong too: {others}" if more else "")


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    model: Any = SweepConfig
    nested = {"grid": Block, "lr_search": LrSearch, "pruning": Pruning}
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model = nested.get(part, annotation)
    return list(model.model_fields)
