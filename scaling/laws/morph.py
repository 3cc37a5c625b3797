"""A law with a power of d / L as a factor of the whole loss, to compare with."""

from __future__ import annotations

import numpy as np

from depthlaw.scaling.laws.base import Array, Features, Law, Parameter, gradient, register
from depthlaw.scaling.laws.chinchilla import Chinchilla

_CHINCHILLA = Chinchilla()


@register
class Morph(Law):
    """chinchilla + ln(1 + exp(g + eta ln(R / R0))): the loss times 1 + epsilon R^eta of Bian et al. 2025, centred.

    Monotone in R: it has no best shape but the narrowest or the widest allowed.
    """

    name = "morph"
    parameters = (
        *Chinchilla.parameters,
        Parameter("g", (-5.0, -1.0), (-12.0, 2.0), needs=("shape",)),
        Parameter("eta", (-1.0, 1.0), (-10.0, 10.0), shared=True, known=1.0, needs=("shape",)),
    )
    remark = "law morph is monotone in d/L: the best shape it gives is always at a bound of what is allowed"

    def log_loss(self, p: Array, x: Features) -> Array:
        *_, g, eta = p
        return np.asarray(_CHINCHILLA.log_loss(p[:5], x) + np.log1p(np.exp(g + eta * (x.width - x.depth))))

    def jacobian(self, p: Array, x: Features) -> Array:
        *_, g, eta = p
        ratio = x.width - x.depth
        share = 1.0 / (1.0 + np.exp(-g - eta * ratio))
        own = _CHINCHILLA.jacobian(p[:5], x)
        return gradient(*np.moveaxis(own, -1, 0), share, share * ratio)
