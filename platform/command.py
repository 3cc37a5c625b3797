"""What commands share. Imports nothing heavy."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def note(text: str) -> None:
    """What is no answer, so that stdout holds the answer alone."""
    print(text, file=sys.stderr, flush=True)
