"""Laws in which width and depth each have a power of their own."""

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

# The two exponents are told apart only by shapes that differ at several sizes.
WIDTH_EXPONENT = Parameter("w", (0.1, 1.5), (1e-4, 10.0), shared=True, positive=True, needs=("shape", "size"))
DEPTH_EXPONENT = Parameter("l", (0.1, 1.5), (1e-4, 10.0), shared=True, positive=True, needs=("shape", "size"))


def _best_ln_ratio(p: Array, n: Array, centre: Centre) -> Array:
    """Where exp(c_w - w ln d) + exp(c_l - l ln L) is least among shapes of one size, with N proportional to L d^2.

    About the centre n = ln L + 2 ln d then holds on average over the rows, so ln d = (n - ln L) / 2, and the
    derivative with respect to ln L vanishes where (w / 2) exp(c_w - w ln d) = l exp(c_l - l ln L). Both terms are
    convex in ln L, so this is the one minimum, in the interior. Embeddings in N, which L d^2 leaves out, shift it.
    """
    c_w, w, c_l, l = p  # noqa: E741
    depth = (c_l - c_w + 0.5 * w * n + np.log(2.0 * l / w)) / (l + 0.5 * w)
    return np.asarray(centre.ln_ratio + 0.5 * n - 1.5 * depth)


@register
class WidthDepth(Law):
    """LSE(e, c_w - w ln(d / d0), c_l - l ln(L / L0), b - beta y): McLeish et al. 2025 (Gemstones), centred.

    Shape enters through d and L themselves and there is no size term: N is used for the best ratio only.
    """

    name = "width_depth"
    parameters = (
        FLOOR,
        Parameter("c_w", SIZE.start, SIZE.bounds, relative_to="loss"),
        WIDTH_EXPONENT,
        Parameter("c_l", SIZE.start, SIZE.bounds, relative_to="loss"),
        DEPTH_EXPONENT,
        TOKENS,
        TOKENS_EXPONENT,
    )

    def log_loss(self, p: Array, x: Features) -> Array:
        e, c_w, w, c_l, l, b, beta = p  # noqa: E741
        return lse(e, c_w - w * x.width, c_l - l * x.depth, b - beta * x.y)

    def jacobian(self, p: Array, x: Features) -> Array:
        e, c_w, w, c_l, l, b, beta = p  # noqa: E741
        floor, wide, deep, tokens = shares(e, c_w - w * x.width, c_l - l * x.depth, b - beta * x.y)
        return gradient(floor, wide, -wide * x.width, deep, -deep * x.depth, tokens, -tokens * x.y)

    def best_ln_ratio(self, p: Array, n: Array, centre: Centre) -> Array:
        return _best_ln_ratio(p[1:5], n, centre)


@register
class WidthDepthParams(Law):
    """width_depth with a size term: LSE(e, c_w - w ln(d / d0), c_l - l ln(L / L0), a - alpha n, b - beta y)."""

    name = "width_depth_params"
    parameters = (
        FLOOR,
        Parameter("c_w", SIZE.start, SIZE.bounds, relative_to="loss", needs=("shape",)),
        WIDTH_EXPONENT,
        Parameter("c_l", SIZE.start, SIZE.bounds, relative_to="loss", needs=("shape",)),
        DEPTH_EXPONENT,
        SIZE,
        SIZE_EXPONENT,
        TOKENS,
        TOKENS_EXPONENT,
    )

    def log_loss(self, p: Array, x: Features) -> Array:
        e, c_w, w, c_l, l, a, alpha, b, beta = p  # noqa: E741
        return lse(e, c_w - w * x.width, c_l - l * x.depth, a - alpha * x.n, b - beta * x.y)

    def jacobian(self, p: Array, x: Features) -> Array:
        e, c_w, w, c_l, l, a, alpha, b, beta = p  # noqa: E741
        floor, wide, deep, size, tokens = shares(
            e, c_w - w * x.width, c_l - l * x.depth, a - alpha * x.n, b - beta * x.y
        )
        return gradient(floor, wide, -wide * x.width, deep, -deep * x.depth, size, -size * x.n, tokens, -tokens * x.y)

    def best_ln_ratio(self, p: Array, n: Array, centre: Centre) -> Array:
        return _best_ln_ratio(p[1:5], n, centre)
