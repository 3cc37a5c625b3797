"""The default law: a bowl in ln(d / L) whose bottom drifts with size."""

from __future__ import annotations

import numpy as np

from depthlaw.scaling.laws.base import (
    FLOOR,
    SIZE,
    SIZE_EXPONENT,
    TOKENS,
    TOKENS_EXPONENT,
    Array,
    Centre,
    Features,
    Law,
    Parameter,
    gradient,
    lse,
    register,
    shares,
)


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
        return lse(e, a - alpha * x.n + kappa * q * q, b - beta * x.y)

    def jacobian(self, p: Array, x: Features) -> Array:
        e, a, alpha, b, beta, kappa, rho0, rho1 = p
        q = x.ln_ratio - rho0 - rho1 * x.n
        floor, size, tokens = shares(e, a - alpha * x.n + kappa * q * q, b - beta * x.y)
        pull = -2.0 * size * kappa * q
        return gradient(floor, size, -size * x.n, tokens, -tokens * x.y, size * q * q, pull, pull * x.n)

    def best_ln_ratio(self, p: Array, n: Array, centre: Centre) -> Array:
        *_, rho0, rho1 = p
        return np.asarray(rho0 + rho1 * n)
