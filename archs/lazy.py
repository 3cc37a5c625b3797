"""torch and the operations built on it, imported at their first use.

A topology's file holds both its mathematics and its accounting, and the accounting must import where torch does not.
Such a file says

    if TYPE_CHECKING:
        import torch

        from depthlaw.archs import ops
    else:
        from depthlaw.archs.lazy import ops, torch

and then reads as if both had been imported at the top.
"""

from importlib import import_module
from typing import Any


class _Lazy:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._module), name)
        setattr(self, name, value)  # the next access is an ordinary attribute
        return value


torch = _Lazy("torch")
ops = _Lazy("depthlaw.archs.ops")
