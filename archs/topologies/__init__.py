"""One file per residual topology. Importing this package registers them all; `topology` finds one by its label."""

import ast
from dataclasses import MISSING, fields

from depthlaw.archs.errors import TopologyError
from depthlaw.archs.topologies.block_attnres import BlockAttnRes
from depthlaw.archs.topologies.deepnorm import DeepNorm
from depthlaw.archs.topologies.full_attnres import FullAttnRes
from depthlaw.archs.topologies.hc import HC
from depthlaw.archs.topologies.hybrid import Hybrid
from depthlaw.archs.topologies.keel import Keel
from depthlaw.archs.topologies.lns import LNS
from depthlaw.archs.topologies.mhc import MHC
from depthlaw.archs.topologies.moda import MoDA
from depthlaw.archs.topologies.pre_ln import PreLN
from depthlaw.archs.topologies.sandwich_ln import SandwichLN
from depthlaw.archs.topology import TOPOLOGIES, Topology

__all__ = [
    "HC",
    "LNS",
    "MHC",
    "TOPOLOGIES",
    "BlockAttnRes",
    "DeepNorm",
    "FullAttnRes",
    "Hybrid",
    "Keel",
    "MoDA",
    "PreLN",
    "SandwichLN",
    "topology",
]


def topology(label: str) -> Topology:
    """The topology that a label names: `pre_ln`, `hc`, `hc(streams=2)`.

    Raises TopologyError for an unknown name or option, saying what exists.
    """
    try:
        node = ast.parse(label.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else None
        name = ast.unparse(call.func if call else node)
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords} if call else {}
        positional = bool(call and call.args)
    except (SyntaxError, ValueError) as error:
        raise TopologyError(f"{label!r} is not a topology; write it as `hc` or `hc(streams=2)`") from error
    if name not in TOPOLOGIES:
        raise TopologyError(f"unknown topology {name!r}; choose one of {', '.join(sorted(TOPOLOGIES))}")
    cls = TOPOLOGIES[name]
    allowed = [f.name for f in fields(cls)]
    if positional or set(options) - set(allowed):
        raise TopologyError(
            f"{label!r}: the options of {name} are {', '.join(allowed) or 'none'}, each written as option=value"
        )
    for f in fields(cls):
        value, kind = options.get(f.name, f.default), type(f.default)
        if f.default not in (MISSING, None) and type(value) is not kind and (type(value), kind) != (int, float):
            raise TopologyError(f"{label!r}: {f.name} is {value!r}; it must be of type {kind.__name__}")
    try:
        return cls(**options)
    except (TypeError, ValueError) as error:
        raise TopologyError(f"{label!r}: {error}") from error
