"""Scaling laws: the log of the predicted loss as a function of size, tokens and shape.

Symbols: N backbone (non-embedding) parameters, D tokens, L blocks, d width, R = d / L, n = ln(N / N0), y = ln(D / D0)
with N0, D0 the geometric means of the rows fitted, LSE = log-sum-exp. Loss in nats per token.

A law is one small class: its parameters, `log_loss` and `jacobian`, both in the parameters' own units. What is shared
between topologies, where starts are drawn and which bounds hold is declared beside each parameter; the fit does the
rest, including the log transform of positive parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # float64, or complex128 when a test takes a complex step


class LawError(ValueError):
    """A question about a law that cannot be asked: one line with what, the value, what is allowed and what to do."""


class FitRefusedError(LawError):
    """The question is good and the data cannot answer it at all."""


@dataclass(frozen=True)
class Features:
    """What a law may look at, one value a row: n = ln(N / N0), y = ln(D / D0), ln_ratio = ln(d / L), L and d."""

    n: Array
    y: Array
    ln_ratio: Array
    n_layers: Array
    d_model: Array

    def take(self, rows: Array) -> Features:
        return Features(self.n[rows], self.y[rows], self.ln_ratio[rows], self.n_layers[rows], self.d_model[rows])


def features(N: Any, D: Any, n_layers: Any, d_model: Any, N0: float, D0: float) -> Features:
    """Features of rows (m,); scalars broadcast."""
    N, D, L, d = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (N, D, n_layers, d_model)))
    return Features(np.log(N / N0), np.log(D / D0), np.log(d / L), L, d)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a law.

    start, bounds: ranges to draw starts from and never to leave. `relative_to` says what they are added to: the mean
    observed log-loss ("loss"), the mean ln(d / L) ("ratio"), or nothing. A `positive` parameter is fitted through
    its logarithm, which keeps it positive and makes its standard error relative; its ranges are in its own unit.
    shared: one value for all topologies under the pooling `shared`. known: a parameter counts as identified if moving
    it by this much (a factor e^known where positive) makes the fit significantly worse in both directions. needs: what
    must vary between runs before it can be known at all ("size", "tokens", "path": tokens apart from size, "shape").
    """

    name: str
    start: tuple[float, float]
    bounds: tuple[float, float]
    shared: bool = False
    positive: bool = False
    relative_to: Literal["", "loss", "ratio"] = ""
    known: float = float(np.log(4.0))
    needs: tuple[str, ...] = ()


class Law(ABC):
    """Base of all laws. `p` holds the parameters along its first axis, (P, ...), broadcastable against the rows."""

    name: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]

    @abstractmethod
    def log_loss(self, p: Array, x: Features) -> Array:
        """ln of the predicted loss, (..., rows)."""

    @abstractmethod
    def jacobian(self, p: Array, x: Features) -> Array:
        """d log_loss / d p, (..., rows, P), in the order of `parameters`."""

    def best_ln_ratio(self, p: Array, n: Array) -> Array | None:
        """ln R of least loss at size n, or None where the law has no opinion on shape."""
        return None


LAWS: dict[str, Law] = {}


def register(cls: type[Law]) -> type[Law]:
    """Class decorator: makes a law usable by its name in `fit`, in the command line and in law files."""
    LAWS[cls.name] = cls()
    return cls


def law(name: str) -> Law:
    """The law of this name. Raises LawError naming those that exist."""
    if name not in LAWS:
        raise LawError(f"unknown law {name!r}; choose one of {', '.join(LAWS)}")
    return LAWS[name]


def lse(*terms: Array) -> tuple[Array, list[Array]]:
    """log-sum-exp of the terms and each term's share exp(term - lse): its derivative with respect to the term."""
    wide = np.broadcast_arrays(*terms)
    top = wide[0].real
    for term in wide[1:]:
        top = np.maximum(top, term.real)
    parts = [np.exp(term - top) for term in wide]
    total = np.sum(parts, axis=0)
    return top + np.log(total), [part / total for part in parts]


# The floor, the size term and the token term, common to all laws so far. A floor at its lower bound, e^-5 of the mean
# loss, is no floor.
FLOOR = Parameter("e", (-1.5, -0.05), (-5.0, 1.0), shared=True, relative_to="loss", known=1.0)
SIZE = Parameter("a", (-4.0, -0.5), (-8.0, 3.0), relative_to="loss")
SIZE_EXPONENT = Parameter("alpha", (0.1, 1.0), (1e-4, 5.0), shared=True, positive=True, needs=("size", "path"))
TOKENS = Parameter("b", (-4.0, -0.5), (-8.0, 3.0), shared=True, relative_to="loss")
TOKENS_EXPONENT = Parameter("beta", (0.1, 1.0), (1e-4, 5.0), shared=True, positive=True, needs=("tokens", "path"))


@register
class Chinchilla(Law):
    """LSE(e, a - alpha n, b - beta y): E + A / N^alpha + B / D^beta of Hoffmann et al. 2022 (approach 3), centred."""

    name = "chinchilla"
    parameters = (FLOOR, SIZE, SIZE_EXPONENT, TOKENS, TOKENS_EXPONENT)

    def log_loss(self, p: Array, x: Features) -> Array:
        e, a, alpha, b, beta = p
        return lse(e, a - alpha * x.n, b - beta * x.y)[0]

    def jacobian(self, p: Array, x: Features) -> Array:
        e, a, alpha, b, beta = p
        _, (floor, size, tokens) = lse(e, a - alpha * x.n, b - beta * x.y)
        return np.stack([floor, size, -size * x.n, tokens, -tokens * x.y], -1)


@register
class ShapeAware(Law):
    """LSE(e, a - alpha n + kappa q^2, b - beta y), q = ln R - rho0 - rho1 n, kappa > 0.

    A model of the wrong shape acts like a smaller one: by a factor exp(-kappa q^2 / alpha) in parameters. The best
    ratio d / L is exp(rho0 + rho1 n) and drifts with size.
    """

    name = "shape"
    parameters = (
        FLOOR,
        SIZE,
        SIZE_EXPONENT,
        TOKENS,
        TOKENS_EXPONENT,
        Parameter("kappa", (0.01, 1.0), (1e-6, 100.0), positive=True, needs=("shape",)),
        Parameter("rho0", (-1.5, 1.5), (-9.0, 9.0), relative_to="ratio", needs=("shape",)),
        Parameter("rho1", (-0.3, 0.3), (-3.0, 3.0), shared=True, known=1.0, needs=("shape", "size")),
    )

    def log_loss(self, p: Array, x: Features) -> Array:
        e, a, alpha, b, beta, kappa, rho0, rho1 = p
        q = x.ln_ratio - rho0 - rho1 * x.n
        return lse(e, a - alpha * x.n + kappa * q * q, b - beta * x.y)[0]

    def jacobian(self, p: Array, x: Features) -> Array:
        e, a, alpha, b, beta, kappa, rho0, rho1 = p
        q = x.ln_ratio - rho0 - rho1 * x.n
        _, (floor, size, tokens) = lse(e, a - alpha * x.n + kappa * q * q, b - beta * x.y)
        pull = -2.0 * size * kappa * q
        return np.stack(
            [floor, size, -size * x.n, tokens, -tokens * x.y, size * q * q, pull, pull * x.n],
            -1,
        )

    def best_ln_ratio(self, p: Array, n: Array) -> Array:
        *_, rho0, rho1 = p
        return np.asarray(rho0 + rho1 * n)
