"""What the depth of a trained model does: one file a diagnostic, all against the interface of a topology.

Blocks count from 0. Depth l is the place before block l: depth 0 is the embedding, depth L what the final norm reads.
The names import without torch; everything else here needs it.
"""

from typing import Literal, get_args

DiagnosticName = Literal[
    "angular",
    "causal",
    "pruning",
    "permutation",
    "lens",
    "early_exit",
    "paths",
    "rank",
    "streams",
    "dead_zone",
    "cka",
    "repetition",
    "recomputation",
    "jacobian",
]
DIAGNOSTICS: tuple[DiagnosticName, ...] = get_args(DiagnosticName)
