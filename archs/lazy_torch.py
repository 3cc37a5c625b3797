"""torch, imported at its first use.

A topology's file holds both its mathematics and its accounting, and the accounting must import where torch does not.
Such a file says

    if TYPE_CHECKING:
        import torch
    else:
        from depthlaw.archs import lazy_torch as torch

and then reads as if torch had been imported at the top.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    import torch

    value = getattr(torch, name)
    globals()[name] = value  # the next access is an ordinary attribute
    return value
