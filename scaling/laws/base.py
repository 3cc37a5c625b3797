"""What a scaling law is: the log of the predicted loss as a function of size, tokens and shape.

Symbols: N parameters, counted as the fit was told, D tokens, L blocks, d width, R = d / L; n = ln(N / N0),
y = ln(D / D0), w = ln(d / d0), l = ln(L / L0) with N0, D0, d0, L0 the geometric means of the rows fitted; LSE =
log-sum-exp. Loss in nats per token.

A law is one small class: its parameters, `log_loss` and `jacobian`, both in the parameters' own units. What is shared
between topologies, where starts are drawn and which bounds hold is declared beside each parameter; the fit does the
rest, including the log transform of positive parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # float64, or complex128 when a test takes a complex step
SAME_SIZE = float(np.log(1.5))  # runs within a factor 1.5 of each other have one size (one D)


class LawError(ValueError):
    """A question about a law that cannot be asked: one line with what, the value, what is allowed and what to do."""


class FitRefusedError(LawError):
    """The question is good and the data cannot answer it at all."""


class Centre(NamedTuple):
    """Where a law is centred: the geometric means of the rows fitted."""

    N0: float
    D0: float
    L0: float
    d0: float

    @property
    def ln_ratio(self) -> float:
        return float(np.log(self.d0 / self.L0))


@dataclass(frozen=True)
class Features:
    """What a law may look at, one value a row: n, y, width w, depth l and ln_ratio = ln(d / L)."""

    n: Array
    y: Array
    width: Array
    depth: Array
    ln_ratio: Array

    def take(self, rows: Array | slice | int) -> Features:
        return Features(self.n[rows], self.y[rows], self.width[rows], self.depth[rows], self.ln_ratio[rows])


def features(N: Any, D: Any, n_layers: Any, d_model: Any, centre: Centre) -> Features:
    """Features of rows (m,); scalars broadcast."""
    N, D, L, d = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (N, D, n_layers, d_model)))
    N0, D0, L0, d0 = centre
    return Features(np.log(N / N0), np.log(D / D0), np.log(d / d0), np.log(L / L0), np.log(d / L))


@dataclass(frozen=True)
class Parameter:
    """One parameter of a law.

    start, bounds: ranges to draw starts from and never to leave. `relative_to` says what they are added to: the mean
    observed log-loss ("loss"), the mean ln(d / L) ("ratio"), or nothing. A `positive` parameter is fitted through
    its logarithm, which keeps it positive and makes its standard error relative; its ranges are in its own unit.
    shared: one value for all topologies under the poolings `shared` and `shared-shape`; the latter also shares what
    needs "shape". known: a parameter counts as identified if moving
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
    """Base of all laws. `p` holds the parameters along its first axis, (P, ...), broadcastable against the rows.

    remark: what to keep in mind of any fit of this law; shown with each.
    """

    name: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]
    remark: ClassVar[str] = ""

    @abstractmethod
    def log_loss(self, p: Array, x: Features) -> Array:
        """ln of the predicted loss, (..., rows)."""

    @abstractmethod
    def jacobian(self, p: Array, x: Features) -> Array:
        """d log_loss / d p, (..., rows, P), in the order of `parameters`."""

    def best_ln_ratio(self, p: Array, n: Array, centre: Centre) -> Array | None:
        """ln R of least loss at size n, or None where the law has no best shape."""
        return None

    def accept(self, N: Array, D: Array) -> None:  # noqa: B027  most laws take any rows
        """Raises FitRefusedError where rows of these sizes and tokens (m,) are not what the law is for."""


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


def lse(*terms: Array) -> Array:
    """log-sum-exp of the terms. Each is exponentiated in its own shape, which for a floor is one number a start.

    Terms are ln of nats per token: no maximum need be taken out, and where one overflows the loss is infinite.
    """
    with np.errstate(over="ignore", divide="ignore"):
        return np.asarray(np.log(sum(np.exp(term) for term in terms)))


def shares(*terms: Array) -> list[Array]:
    """Each term's share exp(term - lse): the derivative of lse with respect to the term."""
    parts = [np.exp(term) for term in terms]
    whole = 1.0 / np.asarray(sum(parts))
    return [part * whole for part in parts]


def gradient(*by_parameter: Array) -> Array:
    """(..., rows, P) from the P derivatives (..., rows), each parameter's rows side by side in memory; scalars are
    one row."""
    shape = np.broadcast_shapes(*(np.shape(g) for g in by_parameter)) or (1,)
    out = np.empty((*shape[:-1], len(by_parameter), shape[-1]), dtype=np.result_type(*by_parameter))
    for k, g in enumerate(by_parameter):
        out[..., k, :] = g
    return np.swapaxes(out, -1, -2)


# The floor, the size term and the token term, common to most laws. A floor at its lower bound, e^-15 of the mean loss,
# is no floor.
FLOOR = Parameter("e", (-1.5, -0.05), (-15.0, 1.0), shared=True, relative_to="loss", known=1.0)
SIZE = Parameter("a", (-4.0, -0.5), (-8.0, 3.0), relative_to="loss")
SIZE_EXPONENT = Parameter("alpha", (0.1, 1.0), (1e-4, 5.0), shared=True, positive=True, needs=("size", "path"))
TOKENS = Parameter("b", (-4.0, -0.5), (-8.0, 3.0), shared=True, relative_to="loss")
TOKENS_EXPONENT = Parameter("beta", (0.1, 1.0), (1e-4, 5.0), shared=True, positive=True, needs=("tokens", "path"))
