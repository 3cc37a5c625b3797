"""A law for tables of one size and one amount of training."""

from __future__ import annotations

import numpy as np

from depthlaw.scaling.laws.base import (
    SAME_SIZE,
    Array,
    Centre,
    Features,
    FitRefusedError,
    Law,
    Parameter,
    gradient,
    register,
)


@register
class IsoSize(Law):
    """exp(c) + kappa (ln R - rho)^2 nats, every parameter the topology's own, kappa > 0; the best d / L is exp(rho).

    A parabola in the loss itself, as tables of one size are published with: kappa is in nats, and kappa / exp(c) is the
    curvature in ln loss. N and D are the same in all rows, so it says nothing of any other size or amount of training.
    """

    name = "iso_size"
    parameters = (
        Parameter("c", (-0.1, 0.1), (-2.0, 2.0), relative_to="loss"),
        Parameter("kappa", (3e-3, 0.5), (1e-7, 100.0), positive=True, needs=("shape",)),
        Parameter("rho", (-1.5, 1.5), (-9.0, 9.0), relative_to="ratio", needs=("shape",)),
    )
    one_size = True
    remark = "law iso_size holds at the size and training fitted, and says nothing of others"

    def log_loss(self, p: Array, x: Features) -> Array:
        c, kappa, rho = p
        return np.asarray(np.log(np.exp(c) + kappa * (x.ln_ratio - rho) ** 2))

    def jacobian(self, p: Array, x: Features) -> Array:
        c, kappa, rho = p
        q = x.ln_ratio - rho
        loss = np.exp(c) + kappa * q * q
        return gradient(np.exp(c) / loss, q * q / loss, -2.0 * kappa * q / loss)

    def best_ln_ratio(self, p: Array, n: Array, centre: Centre) -> Array:
        return np.asarray(p[2] + 0.0 * n)

    def accept(self, N: Array, D: Array) -> None:
        for name, v in (("N", N), ("D", D)):
            if np.ptp(np.log(v)) >= SAME_SIZE:
                raise FitRefusedError(
                    f"law iso_size is for tables of one size, and {name} goes from {v.min():.3g} to {v.max():.3g} "
                    f"(a factor {np.exp(SAME_SIZE):.2g} is allowed): use law shape, or fit one size at a time"
                )
