"""From a config to the list of trials it asks for, and from there to those that a store does not have yet."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, partial
from typing import Any

from depthlaw.archs.costs import Costs
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology
from depthlaw.archs.topology import Topology
from depthlaw.platform.config import ConfigError, SweepConfig
from depthlaw.platform.config_sections import Block
from depthlaw.platform.lr_search import SETTLED, Outcome, search
from depthlaw.platform.schedules import branch_step

# Raised whenever the code changes what a trial computes; a test of golden losses says when.
NUMERICS_VERSION = 1


# Fields of a trial that do not change its numbers.
UNHASHED = (
    "experiment",
    "data",
    "shape_rule",
    "micro_batch_seqs",
    "zero_stage",
    "checkpoint_every_s",
    "ranks",
    "activation_checkpointing",
    "layer_stats_every",
    "lr_searched_at",
)


@dataclass(frozen=True)
class TrialSpec:
    """One training run, complete: with the data it names, this fixes the result.

    `tokens` is a whole number of steps. `hash` covers everything that changes the numbers; how the run is executed
    (experiment name, ranks, micro-batch, ZeRO stage, checkpoints) changes them at most in the last bits of rounding
    and is left out, so that a run moves between machines without being trained again. `log_every` is in,
    because the divergence rule reads the reports.
    """

    experiment: str
    topology: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    vocab_size: int
    seq_len: int
    lr: float
    tokens: int
    batch_tokens: int
    seed: int
    optimizer: Mapping[str, Any]
    schedule: Mapping[str, Any]
    validation: Mapping[str, Any]
    divergence: Mapping[str, Any]
    log_every: int
    precision: str
    data_fingerprint: str
    # Not hashed: they do not change the numbers.
    data: str
    shape_rule: str
    micro_batch_seqs: int
    zero_stage: int
    checkpoint_every_s: float
    ranks: int = 1
    activation_checkpointing: bool = False
    layer_stats_every: int = 0  # steps; 0 for never
    lr_searched_at: str = ""  # the base shape whose search gave the rate; empty where this cell's own list did

    @cached_property
    def hash(self) -> str:
        return content_hash({"spec": self._numbers(), "numerics_version": NUMERICS_VERSION})

    @cached_property
    def recipe_hash(self) -> str:
        """What must be equal for two losses to compare: data, validation, batch, optimiser, schedule, precision."""
        varied = ("topology", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "tokens", "lr", "seed")
        kept = {k: v for k, v in self._numbers().items() if k not in (*varied, "divergence", "log_every")}
        return content_hash({"recipe": kept, "numerics_version": NUMERICS_VERSION})

    def _numbers(self) -> dict[str, Any]:
        # Not by `to_dict`, whose deep copies are half of the time that a plan of thousands takes.
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in UNHASHED}

    @cached_property
    def shape(self) -> Shape:
        return Shape(self.n_layers, self.d_model, self.n_heads, self.n_kv_heads, self.d_ff, self.vocab_size)

    @cached_property
    def costs(self) -> Costs:
        return Costs(topology(self.topology), self.shape)

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    @property
    def rank_seqs(self) -> int:
        """Sequences of a step that each rank takes."""
        return self.batch_tokens // self.seq_len // self.ranks

    @property
    def train_flops(self) -> int:
        return self.flops_of(self.steps)

    def flops_of(self, steps: int) -> int:
        return steps * self.batch_tokens * int(self.costs.train_flops_per_token(self.seq_len))

    def plan_row(self) -> dict[str, Any]:
        """What a store keeps of a planned trial: its hash, the columns of its cell and what it costs."""
        cell = {"topology": self.topology, **asdict(self.shape), "tokens": self.tokens, "seq_len": self.seq_len}
        cost = {"steps": self.steps, "train_flops": self.train_flops}
        params = int(self.costs.backbone_params)
        row = {"trial": self.hash, "recipe_hash": self.recipe_hash, **cell, "backbone_params": params, "lr": self.lr}
        return row | cost | ({"lr_searched_at": self.lr_searched_at} if self.lr_searched_at else {})

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TrialSpec:
        return cls(**raw)


def content_hash(value: Any) -> str:
    """16 hex digits of SHA-256 over canonical JSON; floats by their shortest exact text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Round:
    """What a sweep wants, as far as it is known. `trials` are all of it, those already run included.

    `later` are the trials that wait for the search at their base shape, here with the first rate of the list.
    `searching` counts the searches that are not over, each of which may still ask for another rate. `stuck` says in a
    line each at which base shapes no rate finished, so that the other shapes cannot run.
    """

    trials: list[TrialSpec]
    later: list[TrialSpec]
    searching: int
    stuck: list[str]


def plan(config: SweepConfig, data_fingerprint: str = "not built") -> list[TrialSpec]:
    """The trials that a config asks for before anything has run, each once, in the order of the grid.

    Without a data fingerprint the trials can be counted and shown, but their hashes match no store.
    """
    return wanted(config, {}, data_fingerprint).trials


def wanted(config: SweepConfig, outcomes: Mapping[str, Outcome], data_fingerprint: str = "not built") -> Round:
    """What a config asks for, given what is known of its trials by hash: a pure function, so to resume is to ask again.

    Blocks without `lr_search` ask for the same whatever is known. Raises ConfigError.
    """
    found: dict[str, TrialSpec] = {}
    later: dict[str, TrialSpec] = {}
    searching: set[str] = set()
    stuck: dict[str, None] = {}

    def specs(
        shape: Shape, label: str, tokens: Iterable[int], rates: Iterable[float], searched_at: str = ""
    ) -> list[TrialSpec]:
        return [
            _spec(config, label, shape, lr, seed, count, data_fingerprint, searched_at)
            for lr, seed, count in itertools.product(rates, config.seeds, tokens)
        ]

    def add(trials: Iterable[TrialSpec], to: dict[str, TrialSpec] = found) -> None:
        for spec in trials:
            to.setdefault(spec.hash, spec)

    for block in config.grid:
        for label, given in itertools.product(block.topologies, block.shapes):
            design, shape = topology(label), config.shape(given)
            counts, rates = list(_token_counts(config, block, shape)), _rates(block, design)
            if block.lr_search is None:
                add(specs(shape, design.label, counts, rates))
                continue
            base = shape if block.lr_search.base_shape is None else config.shape(block.lr_search.base_shape)
            for base_count, count in zip(_token_counts(config, block, base), counts, strict=True):
                trials_at = partial(_one_rate, specs, base, design.label, base_count)
                result = search(rates, block.lr_search.extensions, outcomes, trials_at)
                place = f"{base.n_layers} x {base.d_model}"
                if shape == base:
                    add(result.trials)
                    if not result.over:
                        searching.add(result.trials[0].hash)
                elif result.best is not None:
                    add(specs(shape, design.label, [count], [result.best], place))
                elif result.over:
                    stuck[f"{design.label}: no learning rate finished at the base shape {place}: give lower ones"] = (
                        None
                    )
                else:
                    add(specs(shape, design.label, [count], rates[:1], place), later)
    return Round(list(found.values()), list(later.values()), len(searching), list(stuck))


def _one_rate(
    specs: Callable[..., list[TrialSpec]], shape: Shape, label: str, count: int, lr: float
) -> list[TrialSpec]:
    return specs(shape, label, [count], [lr])


def _rates(block: Block, design: Topology) -> Sequence[float]:
    if block.lr is not None:
        return block.lr
    return design.lr_grid if block.published_lr == "grid" else (design.default_lr,)


def _token_counts(config: SweepConfig, block: Block, shape: Shape) -> Iterable[int]:
    """Tokens of each ratio, rounded to the nearest whole number of steps, at least one."""
    if block.tokens_per_param is not None:
        ratios, params = block.tokens_per_param, shape.plain_params + shape.embedding_params
    else:
        assert block.tokens_per_backbone_param is not None
        ratios, params = block.tokens_per_backbone_param, shape.plain_params
    for ratio in ratios:
        yield max(1, round(ratio * params / config.batch_tokens)) * config.batch_tokens


def _spec(
    config: SweepConfig,
    label: str,
    shape: Shape,
    lr: float,
    seed: int,
    tokens: int,
    data_fingerprint: str,
    lr_searched_at: str,
) -> TrialSpec:
    spec = TrialSpec(
        experiment=config.name,
        topology=label,
        **{k: int(v) for k, v in asdict(shape).items()},
        seq_len=config.seq_len,
        lr=lr,
        tokens=tokens,
        batch_tokens=config.batch_tokens,
        seed=seed,
        optimizer=config.optimizer.model_dump(mode="json"),
        schedule=config.schedule.numbers(),
        validation=config.validation.model_dump(mode="json"),
        divergence=config.divergence.model_dump(mode="json"),
        log_every=config.log_every,
        precision=config.precision,
        data_fingerprint=data_fingerprint,
        data=config.data.describe(),
        shape_rule=config.shape_rule,
        micro_batch_seqs=config.micro_batch_seqs,
        zero_stage=config.zero_stage,
        checkpoint_every_s=config.checkpoint_every_s,
        ranks=config.ranks_per_trial,
        activation_checkpointing=config.activation_checkpointing,
        layer_stats_every=config.layer_stats_every,
        lr_searched_at=lr_searched_at,
    )
    if config.schedule.kind == "wsd" and branch_step(spec) <= config.schedule.warmup_steps:
        raise ConfigError(
            f"{label} {shape.n_layers} x {shape.d_model} with {tokens:,} tokens makes {spec.steps} steps, of which the "
            f"last {spec.steps - branch_step(spec)} decay: schedule.warmup_steps is {config.schedule.warmup_steps} and "
            f"must be below {branch_step(spec)}; lower it or train on more tokens"
        )
    return spec


def missing(trials: Iterable[TrialSpec], statuses: Mapping[str, str]) -> list[TrialSpec]:
    """Trials without a settled result; failed and stopped ones are tried again."""
    return [spec for spec in trials if statuses.get(spec.hash) not in SETTLED]
