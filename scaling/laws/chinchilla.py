"""The law without shape."""

from __future__ import annotations

from depthlaw.scaling.laws.base import (
    FLOOR,
    SIZE,
    SIZE_EXPONENT,
    TOKENS,
    TOKENS_EXPONENT,
    Array,
    Features,
    Law,
    gradient,
    lse,
    register,
    shares,
)


@register
class Chinchilla(Law):
    """LSE(e, a - alpha n, b - beta y): E + A / N^alpha + B / D^beta of Hoffmann et al. 2022 (approach 3), centred."""

    name = "chinchilla"
    parameters = (FLOOR, SIZE, SIZE_EXPONENT, TOKENS, TOKENS_EXPONENT)

    def log_loss(self, p: Array, x: Features) -> Array:
        e, a, alpha, b, beta = p
        return lse(e, a - alpha * x.n, b - beta * x.y)

    def jacobian(self, p: Array, x: Features) -> Array:
        e, a, alpha, b, beta = p
        floor, size, tokens = shares(e, a - alpha * x.n, b - beta * x.y)
        return gradient(floor, size, -size * x.n, tokens, -tokens * x.y)
