"""One file per residual topology. Importing this package registers them all."""

from depthlaw.archs.topologies.full_attnres import FullAttnRes
from depthlaw.archs.topologies.hc import HC
from depthlaw.archs.topologies.pre_ln import PreLN

__all__ = ["HC", "FullAttnRes", "PreLN"]
