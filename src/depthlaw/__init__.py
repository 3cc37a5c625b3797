"""depthlaw: how deep, how wide, and which residual connection, under parameter, memory and latency budgets.

The names below load at first use: a query must not pay for torch or ray.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "plan": "depthlaw.platform.plan",
    "sweep": "depthlaw.platform.sweep",
    "Store": "depthlaw.platform.store",
    "fit": "depthlaw.platform.query",
    "choose": "depthlaw.scaling.choose",
    "optimum": "depthlaw.platform.query",
    "report": "depthlaw.platform.report",
    "compare": "depthlaw.scaling.compare",
    "next_cells": "depthlaw.platform.next_sweep",
    "evaluate": "depthlaw.platform.evaluate",
    "load_config": "depthlaw.platform.config",
    "budget": "depthlaw.scaling.budgets",
    "load_law": "depthlaw.scaling.law_file",
    "bundled": "depthlaw.platform.bundled",
    "Workload": "depthlaw.scaling.hardware",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'depthlaw' has no attribute {name!r}; it offers {', '.join(sorted(_HOME))}")


def __dir__() -> list[str]:
    return sorted(__all__)
