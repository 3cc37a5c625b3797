"""Quantiles of Student's t without scipy, which a query does not load."""

from __future__ import annotations

import numpy as np

POINTS = 20_001  # of the integral: t to four digits, for up to some thousand degrees of freedom


def student_quantile(probability: float, freedom: float) -> float:
    """t with P(T <= t) = probability (strictly between 0 and 1), for freedom >= 1.

    With t = sqrt(freedom) tan(u) the density of u is proportional to cos(u)^(freedom - 1) on (-pi / 2, pi / 2), whose
    integral is tabulated by trapezoids and read backwards.
    """
    u = np.linspace(-0.5 * np.pi, 0.5 * np.pi, POINTS)
    density = np.abs(np.cos(u)) ** (freedom - 1.0)
    area = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(probability * area[-1], area, u)))
