"""The shape of a model and the rules that turn (n_layers, d_model) into one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from depthlaw.archs.errors import ShapeError

# A count is one whole number, or an integer array when a Shape stands for a whole lattice of designs.
Count = Any


def ceil_to_16(x: Count) -> Count:
    """Round up to a multiple of 16, on exact integers."""
    return -(-x // 16) * 16


@dataclass(frozen=True)
class Shape:
    """Everything that fixes the matrices of the backbone.

    Each field is a whole number. For accounting alone a field may also be an int64 array; all arrays have one length,
    and every count is then an array of that length.
    """

    n_layers: Count
    d_model: Count
    n_heads: Count
    n_kv_heads: Count
    d_ff: Count
    vocab_size: Count

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if np.any(np.asarray(value) < 1):
                raise ShapeError(f"{name} is {value}; it must be at least 1")
        self._divides("n_heads", self.n_heads, "d_model", self.d_model)
        self._divides("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        if np.any(np.asarray(self.head_dim) % 2):
            raise ShapeError(
                f"d_model {self.d_model} over n_heads {self.n_heads} gives an odd head_dim {self.head_dim}; "
                "rotary embedding needs an even one: change d_model or n_heads"
            )

    @staticmethod
    def _divides(small_name: str, small: Count, big_name: str, big: Count) -> None:
        if np.any(np.asarray(big) % np.asarray(small)):
            raise ShapeError(
                f"{small_name} {small} does not divide {big_name} {big}: make {big_name} a multiple of {small_name}"
            )

    @property
    def head_dim(self) -> Count:
        return self.d_model // self.n_heads

    @property
    def d_kv(self) -> Count:
        """Width of all keys (or all values) of one token in one layer."""
        return self.n_kv_heads * self.head_dim

    @property
    def branch_params(self) -> Count:
        """Weights of all attention and SwiGLU branches: L (2 d^2 + 2 d d_kv + 3 d d_ff)."""
        d = self.d_model
        return self.n_layers * (2 * d * d + 2 * d * self.d_kv + 3 * d * self.d_ff)

    @property
    def plain_params(self) -> Count:
        """Backbone of the Pre-LN model of this shape: branches, two gains a block and the final gain."""
        return self.branch_params + 2 * self.n_layers * self.d_model + self.d_model

    @property
    def embedding_params(self) -> Count:
        """Untied embedding and head: 2 V d."""
        return 2 * self.vocab_size * self.d_model


@dataclass(frozen=True)
class ShapeRule:
    """Turns (n_layers, d_model) into a Shape, and lists the widths that it allows."""

    name: str
    describe: str
    head_dim: Callable[[Count], Count]
    width_step: int
    widest: int  # where an enumeration of designs ends unless told otherwise
    queries_per_key: int = 1  # query heads that share one key-value head
    d_ff: Callable[[Count], Count] = lambda d: ceil_to_16(-(-8 * d // 3))

    def shape(self, n_layers: Count, d_model: Count, vocab_size: Count) -> Shape:
        """The shape of this rule. Raises ShapeError if d_model is not one of the rule's widths."""
        if np.any(np.asarray(d_model) % self.width_step) or np.any(np.asarray(d_model) < self.width_step):
            raise ShapeError(
                f"d_model {d_model} does not fit the shape rule {self.name!r} ({self.describe}): "
                f"choose a multiple of {self.width_step}"
            )
        n_heads = d_model // self.head_dim(d_model)
        return Shape(n_layers, d_model, n_heads, n_heads // self.queries_per_key, self.d_ff(d_model), vocab_size)

    def widths(self, largest: int) -> np.ndarray:
        """All widths up to and including `largest`, as int64."""
        return np.arange(self.width_step, largest + 1, self.width_step, dtype=np.int64)


def _small_head_dim(d_model: Count) -> Count:
    d = np.asarray(d_model)
    dim = np.where(d % 16 == 0, 16, np.where(d % 24 == 0, 24, 8))
    return dim if isinstance(d_model, np.ndarray) else int(dim)


SHAPE_RULES = {
    rule.name: rule
    for rule in (
        ShapeRule("published", "16 heads, even head_dim, d_ff 8 d / 3 rounded up to 16", lambda d: d // 16, 32, 8192),
        ShapeRule(
            "published_1600m",
            "16 heads over 8 key-value heads, even head_dim, d_ff 3 d",
            lambda d: d // 16,
            32,
            16384,
            queries_per_key=2,
            d_ff=lambda d: 3 * d,
        ),
        ShapeRule(
            "small",
            "head_dim the first of 16, 24 and 8 that divides d_model; d_ff 8 d / 3 rounded up to 16",
            _small_head_dim,
            8,
            1024,
        ),
        ShapeRule("head64", "head_dim 64, d_ff 8 d / 3 rounded up to 16", lambda d: 64, 64, 8192),
        ShapeRule("head128", "head_dim 128, d_ff 8 d / 3 rounded up to 16", lambda d: 128, 128, 16384),
    )
}


def shape_rule(name: str) -> ShapeRule:
    """Raises ShapeError naming the rules that exist."""
    if name not in SHAPE_RULES:
        raise ShapeError(f"unknown shape rule {name!r}; choose one of {', '.join(SHAPE_RULES)}")
    return SHAPE_RULES[name]
