"""The sections of a sweep's YAML: each a frozen value with its own checks. `config` puts them together."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Optimizer(Strict):
    """torch AdamW. `clip` is the largest global gradient norm."""

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.1, ge=0)
    clip: PositiveFloat = 1.0


class Schedule(Strict):
    """How the rate goes over a run, as `schedules` defines it.

    `cosine`: linear warm-up over a fraction `warmup` of the steps, then a cosine down to `final` (0.1) times the peak.
    `wsd`: warm-up over `warmup_steps`, the peak rate until the last fraction `decay` of the steps, and then 1 - sqrt
    down towards `final` (0) times the peak. Until it decays, a run is the same however long it is to be: trials that
    differ only in tokens share it, and it is trained once.
    """

    kind: Literal["cosine", "wsd"] = "cosine"
    warmup: Fraction = 0.1
    final: Fraction | None = None
    warmup_steps: PositiveInt = 50
    decay: Annotated[float, Field(gt=0, lt=1)] = 0.2

    @model_validator(mode="after")
    def _keys_of_its_kind(self) -> Schedule:
        others = {"cosine": {"warmup_steps", "decay"}, "wsd": {"warmup"}}[self.kind] & self.model_fields_set
        if others:
            allowed = {"cosine": "warmup and final", "wsd": "warmup_steps, decay and final"}[self.kind]
            raise ValueError(f"{', '.join(sorted(others))} is not a key of kind {self.kind}, which has {allowed}")
        return self

    def numbers(self) -> dict[str, Any]:
        """The keys that this kind has. A cosine is the one without `kind`, as in every store from before wsd."""
        if self.kind == "cosine":
            return {"warmup": self.warmup, "final": 0.1 if self.final is None else self.final}
        return {"kind": "wsd", "warmup_steps": self.warmup_steps, "decay": self.decay, "final": self.final or 0.0}


class Validation(Strict):
    """`windows` fixed sequences of the validation split, `times` times a run, evenly, the last at its end."""

    times: PositiveInt = 10
    windows: PositiveInt = 256


class Divergence(Strict):
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


class Pruning(Strict):
    """Stops a trial whose loss at a rung is above those of `keep` other learning rates of its cell.

    `at` are the rungs, as fractions of the steps; each is looked at in the first validation from there on.
    """

    keep: int = Field(3, ge=3)
    at: list[Annotated[float, Field(gt=0, lt=1)]] = Field([0.25, 0.5], min_length=1)


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


class LrSearch(Strict):
    """Where the rates of a block are searched, and how often the list may grow.

    Without `base_shape` each cell searches its own. With it, each topology searches at that shape, for each token
    ratio, and the block's other shapes run at the rate found. Where the best finished rate is the smallest or largest
    of those tried, the list grows by one more on that side, by its own ratio, at most `extensions` times. A rate that
    diverged or was pruned was tried: the list does not grow beyond it.
    """

    base_shape: GivenShape | None = None
    extensions: int = Field(2, ge=0)


def _written_as_search(given: Any) -> Any:
    if not isinstance(given, dict | LrSearch) and given != "per_cell":
        raise ValueError(f"{given!r} is not a search; write per_cell, or a mapping with base_shape, extensions or both")
    return {} if given == "per_cell" else given


class Block(Strict):
    """One cross product of the grid: topologies x shapes x token ratios x learning rates.

    A shape is [n_layers, d_model], completed by the sweep's shape rule, or a mapping with n_layers, d_model, n_heads,
    n_kv_heads and d_ff. Exactly one of the two token ratios is given. Both count the parameters of the shape's Pre-LN
    model, so that all topologies of one shape see the same tokens: `tokens_per_param` all of them (as published
    suites do), `tokens_per_backbone_param` without embedding and head (N of the laws). Rates are
    given as `lr`, or as `published_lr`: those of the published benchmark at 400M for each topology, the `best` that it
    found or the `grid` that it searched. Each is run in every cell, unless `lr_search` says otherwise.
    """

    topologies: list[str] = Field(min_length=1)
    shapes: list[GivenShape] = Field(min_length=1)
    tokens_per_param: list[PositiveFloat] | None = Field(None, min_length=1)
    tokens_per_backbone_param: list[PositiveFloat] | None = Field(None, min_length=1)
    lr: list[PositiveFloat] | None = Field(None, min_length=1)
    published_lr: Literal["best", "grid"] | None = None
    lr_search: Annotated[LrSearch, BeforeValidator(_written_as_search)] | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> Block:
        if (self.tokens_per_param is None) == (self.tokens_per_backbone_param is None):
            raise ValueError("give exactly one of tokens_per_param and tokens_per_backbone_param")
        if (self.lr is None) == (self.published_lr is None):
            raise ValueError(
                "give exactly one of lr, such as [1.0e-3, 2.0e-3], and published_lr, which is best or grid"
            )
        self._check_search()
        return self

    def _check_search(self) -> None:
        search = self.lr_search
        if search is None:
            return
        if self.published_lr == "best" or (self.lr is not None and len(set(self.lr)) < 2):
            raise ValueError("lr_search needs two rates or more: give them as lr, or published_lr: grid")
        if search.base_shape is not None and search.base_shape not in self.shapes:
            raise ValueError(f"lr_search.base_shape {search.base_shape} is none of the block's shapes {self.shapes}")
