"""Which unknowns a pooled fit has, and a law's loss and Jacobian as functions of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from depthlaw.scaling.laws import Array, Features, Law, LawError, Parameter

POOLINGS = {
    "shared": "parameters that a law declares as shared have one value for all topologies",
    "separate": "every topology has its own value of every parameter",
    "shared-shape": "as shared, and every parameter that only runs of several shapes can tell (of law shape kappa and "
    "rho0) has one value too: topologies differ in their level alone. The same as shared for laws without such",
}


@dataclass(frozen=True)
class Layout:
    """The vector of K unknowns theta of a law over T topologies.

    names: `alpha` for a shared unknown, `kappa[hc]` for one topology's. index (T, P): the unknown behind each
    parameter of each topology. Positive parameters enter theta as logarithms.
    """

    names: tuple[str, ...]
    index: Array
    parameters: tuple[Parameter, ...]

    @property
    def positive(self) -> Array:
        return np.array([p.positive for p in self.parameters])

    def natural(self, theta: Array, topology: int) -> Array:
        """Parameters (P, S, 1) of one topology, in their own units, from theta (S, K)."""
        p = theta[:, self.index[topology]].T
        return np.asarray(np.where(self.positive[:, None], np.exp(np.where(self.positive[:, None], p, 0.0)), p))[
            ..., None
        ]


def layout(law: Law, topologies: Sequence[str], pooling: str) -> Layout:
    """Unknowns shared between topologies first, then each topology's own. Raises LawError for an unknown pooling."""
    if pooling not in POOLINGS:
        raise LawError(f"unknown pooling {pooling!r}; choose one of {', '.join(POOLINGS)}")
    shape = pooling == "shared-shape"
    shared = [pooling != "separate" and (p.shared or (shape and "shape" in p.needs)) for p in law.parameters]
    names = [p.name for p, common in zip(law.parameters, shared, strict=True) if common]
    index = np.zeros((len(topologies), len(law.parameters)), dtype=np.int64)
    for t, topology in enumerate(topologies):
        for k, (p, common) in enumerate(zip(law.parameters, shared, strict=True)):
            if common:
                index[t, k] = names.index(p.name)
            else:
                index[t, k] = len(names)
                names.append(f"{p.name}[{topology}]")
    return Layout(tuple(names), index, law.parameters)


@dataclass(frozen=True)
class Problem:
    """The rows of a fit, one topology after another: rows[t] are those of topology t, x[t] their features."""

    law: Law
    layout: Layout
    x: tuple[Features, ...]
    rows: tuple[slice, ...]
    observed: Array  # ln of the observed loss, (m,)

    def residual(self, theta: Array) -> Array:
        """ln(predicted) - ln(observed), (S, m) for theta (S, K)."""
        out = np.empty((theta.shape[0], self.observed.size), dtype=theta.dtype)
        for t, rows in enumerate(self.rows):
            out[:, rows] = self.law.log_loss(self.layout.natural(theta, t), self.x[t]) - self.observed[rows]
        return out

    def jacobian(self, theta: Array) -> Array:
        """d residual / d theta, (S, m, K): the law's own times the chain rule of the logarithms."""
        S, K = theta.shape
        out = np.zeros((S, K, self.observed.size), dtype=theta.dtype)
        for t, rows in enumerate(self.rows):
            p = self.layout.natural(theta, t)
            own = self.law.jacobian(p, self.x[t])
            for k, (unknown, positive) in enumerate(zip(self.layout.index[t], self.layout.positive, strict=True)):
                out[:, unknown, rows] = own[..., k] * p[k] if positive else own[..., k]
        return out.swapaxes(1, 2)

    def ranges(self, which: str) -> tuple[Array, Array]:
        """(low, high), each (K,): the declared `start` or `bounds` ranges in theta's coordinates."""
        ratio = float(np.mean(np.concatenate([x.ln_ratio for x in self.x])))
        offset = {"": 0.0, "loss": float(np.mean(self.observed)), "ratio": ratio}
        low, high = np.empty(len(self.layout.names)), np.empty(len(self.layout.names))
        for k, p in enumerate(self.layout.parameters):
            edges = np.asarray(getattr(p, which)) + offset[p.relative_to]
            edges = np.log(edges) if p.positive else edges
            low[self.layout.index[:, k]], high[self.layout.index[:, k]] = edges
        return low, high

    def known(self) -> Array:
        """(K,): how far each unknown must be pinned down to count as identified."""
        out = np.empty(len(self.layout.names))
        for k, p in enumerate(self.layout.parameters):
            out[self.layout.index[:, k]] = p.known
        return out
