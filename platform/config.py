"""A sweep as a person writes it in YAML, validated. Unknown keys are errors that name the key and the allowed ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from depthlaw.archs.errors import ShapeError
from depthlaw.archs.shape import SHAPE_RULES, Shape, shape_rule
from depthlaw.archs.topologies import topology
from depthlaw.platform.data_config import DataConfig

Fraction = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch and the store take
Beta = Annotated[float, Field(ge=0, lt=1)]


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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Optimizer(_Strict):
    """torch AdamW. `clip` is the largest global gradient norm."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip: PositiveFloat = 1.0


class Schedule(_Strict):
    """Linear warm-up over a fraction of the steps, then a cosine down to `final` times the peak rate."""

    warmup: Fraction = 0.1
    final: Fraction = 0.1


class Validation(_Strict):
    """`windows` fixed sequences of the validation split, `times` times a run, evenly, the last at its end."""

    times: PositiveInt = 10
    windows: PositiveInt = 256


class Divergence(_Strict):
    """When a run is diverged, and stopped. A report is the mean loss since the last, over `log_every` steps at most.

    At once on a loss or gradient norm that is not finite; after `skipped` steps in a row that the engine skipped;
    after `patience` reports in a row above `factor` times the lowest so far; and when a fraction `learnt_by` of the
    steps is done without a report below ln(vocabulary), the loss of knowing nothing, which is also the first "lowest",
    or when it ends stuck at what the frequencies of tokens alone give.
    """

    factor: float = Field(1.3, gt=1)
    patience: PositiveInt = 3
    skipped: PositiveInt = 5
    learnt_by: Fraction = 0.5


def _written_as_shape(given: Any) -> Any:
    values = given.values() if isinstance(given, dict) else given
    counts = isinstance(given, dict | list | tuple) and all(isinstance(v, int) and v > 0 for v in values)
    if not counts or (not isinstance(given, dict) and len(given) != 2):
        raise ValueError(
            f"{given!r} is not a shape; write whole numbers from 1 on, as [n_layers, d_model] or as a mapping with "
            "n_layers, d_model, n_heads, n_kv_heads and d_ff"
        )
    return given


GivenShape = Annotated[tuple[PositiveInt, PositiveInt] | dict[str, PositiveInt], BeforeValidator(_written_as_shape)]


class Block(_Strict):
    """One cross product of the grid: topologies x shapes x token ratios x learning rates.

    A shape is [n_layers, d_model], completed by the sweep's shape rule, or a mapping with n_layers, d_model, n_heads,
    n_kv_heads and d_ff. Exactly one of the two token ratios is given. Both count the parameters of the shape's Pre-LN
    model, so that all topologies of one shape see the same tokens: `tokens_per_param` all of them (as published
    suites do), `tokens_per_backbone_param` without embedding and head (N of the laws). Rates are
    given as `lr`, or as `published_lr`: those of the published benchmark at 400M for each topology, the `best` that it
    found or the `grid` that it searched.
    """

    topologies: list[str] = Field(min_length=1)
    shapes: list[GivenShape] = Field(min_length=1)
    tokens_per_param: list[PositiveFloat] | None = Field(None, min_length=1)
    tokens_per_backbone_param: list[PositiveFloat] | None = Field(None, min_length=1)
    lr: list[PositiveFloat] | None = Field(None, min_length=1)
    published_lr: Literal["best", "grid"] | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> Block:
        if (self.tokens_per_param is None) == (self.tokens_per_backbone_param is None):
            raise ValueError("give exactly one of tokens_per_param and tokens_per_backbone_param")
        if (self.lr is None) == (self.published_lr is None):
            raise ValueError(
                "give exactly one of lr, such as [1.0e-3, 2.0e-3], and published_lr, which is best or grid"
            )
        return self


class SweepConfig(_Strict):
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
    log_every: PositiveInt = 10
    checkpoint_every_s: PositiveFloat = 120.0
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
        for block in self.grid:
            for label in block.topologies:
                topology(label)
            for given in block.shapes:
                self.shape(given)
        return self

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
    nested = {"grid": Block}
    for part in loc:
        if isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model = nested.get(part, annotation)
    return list(model.model_fields)
