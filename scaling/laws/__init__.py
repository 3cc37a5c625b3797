"""One file a law, or a law and its variant. Importing this package registers them all; `law` finds one by name."""

from depthlaw.scaling.laws.base import (
    LAWS,
    Array,
    Centre,
    Features,
    FitRefusedError,
    Law,
    LawError,
    Parameter,
    features,
    gradient,
    law,
    lse,
    register,
    shares,
)
from depthlaw.scaling.laws.chinchilla import Chinchilla
from depthlaw.scaling.laws.iso_size import IsoSize
from depthlaw.scaling.laws.morph import Morph
from depthlaw.scaling.laws.shape import ShapeAware
from depthlaw.scaling.laws.width_depth import WidthDepth, WidthDepthParams

__all__ = [
    "LAWS",
    "Array",
    "Centre",
    "Chinchilla",
    "Features",
    "FitRefusedError",
    "IsoSize",
    "Law",
    "LawError",
    "Morph",
    "Parameter",
    "ShapeAware",
    "WidthDepth",
    "WidthDepthParams",
    "features",
    "gradient",
    "law",
    "lse",
    "register",
    "shares",
]
