"""The few operations that topologies share, with backward passes that save and move little memory. Needs torch."""

from depthlaw.archs.ops.depth_mix import AfterSkip, Source, depth_mix, depth_weights, source
from depthlaw.archs.ops.norm import inverse_rms, rms_norm, widened
from depthlaw.archs.ops.sinkhorn import sinkhorn
from depthlaw.archs.ops.stream_mix import normed_projection, stream_mix

__all__ = [
    "AfterSkip",
    "Source",
    "depth_mix",
    "depth_weights",
    "inverse_rms",
    "normed_projection",
    "rms_norm",
    "sinkhorn",
    "source",
    "stream_mix",
    "widened",
]
