"""How much each design is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from depthlaw.scaling.budgets import Limit, Training
from depthlaw.scaling.design import Design
from depthlaw.scaling.laws import Array

TOKENS_PER_PARAM = 20.0
SEQ_LEN = 4096  # of training, where neither the question nor the law's sweep says
MFU = 0.4  # share of its peak that a device reaches in training: an assumption
FLOPS_BUDGET = "train_flops"


class OptimumError(ValueError):
    """A question that cannot be asked: one line with the value and what is allowed."""


@dataclass(frozen=True)
class Amount:
    """How D follows for each design: exactly one of the first three is given.

    tokens: D of every design. tokens_per_param: D is that multiple of a design's TOTAL parameters. flops: a training
    budget C that each design uses up, D = C / train_flops_per_token(seq_len) in whole tokens, rounded down.
    """

    tokens: float | None
    tokens_per_param: float | None
    flops: float | None
    seq_len: int
    mfu: float

    def of(self, design: Design) -> Training:
        """D of each design, (m,) or one number, at least 1."""
        if self.flops is not None:
            # One token is more than such a budget allows, and so the budget itself rules the design out.
            each = np.asarray(design.train_flops_per_token(self.seq_len), float)
            D: Array = np.maximum(np.floor(self.flops / each), 1.0)
        elif self.tokens is not None:
            D = np.asarray(float(self.tokens))
        else:
            D = float(self.tokens_per_param or 0.0) * np.asarray(design.params, float)
        return Training(D, self.seq_len, self.mfu)

    def relaxed(self, factor: float) -> Amount:
        """The same with more FLOPs."""
        return replace(self, flops=None if self.flops is None else factor * self.flops)

    @property
    def words(self) -> str:
        if self.flops is not None:
            return f"D = {self.flops:.4g} FLOPs / FLOPs a token of each design, at {self.seq_len} tokens a sequence"
        if self.tokens is not None:
            return f"D = {self.tokens:.4g} tokens"
        return f"D = {self.tokens_per_param:g} tokens per parameter (total)"


def amount(
    limits: Sequence[Limit], tokens: float | None, tokens_per_param: float | None, seq_len: int, mfu: float
) -> Amount:
    """What a question says of training: the amount given, else a `train_flops` budget, else 20 tokens per parameter.

    Raises OptimumError for two amounts, one that is not positive, or less than a token.
    """
    if tokens is not None and tokens_per_param is not None:
        raise OptimumError(f"tokens {tokens:g} and tokens_per_param {tokens_per_param:g} are both given: keep one")
    for name, value in (("tokens", tokens), ("tokens_per_param", tokens_per_param), ("seq_len", seq_len)):
        if value is not None and not 0.0 < value < float("inf"):
            raise OptimumError(f"{name} is {value}; it must be positive and finite")
    if tokens is not None and tokens < 1.0:
        raise OptimumError(f"tokens is {tokens:g}; it must be at least 1")
    if not 0.0 < mfu <= 1.0:
        raise OptimumError(f"mfu is {mfu}; it is the share of a device's peak, above 0 and at most 1")
    if tokens is not None or tokens_per_param is not None:
        return Amount(tokens, tokens_per_param, None, seq_len, mfu)
    flops = next((x.limit for x in limits if x.name == FLOPS_BUDGET), None)
    return Amount(None, None if flops else TOKENS_PER_PARAM, flops, seq_len, mfu)
