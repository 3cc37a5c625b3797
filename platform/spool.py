"""Documents kept on disk between the pass that reads them and the passes that need the split."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from depthlaw.platform.corpus import Document


class Spool:
    """Deduplicated documents on disk until their total, and so the split, is known. 12 bytes of memory each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[bytes] = path.open("wb")
        self.lengths = array("Q")
        self.group_of = array("L")
        self.groups: dict[str, int] = {}
        self.size = 0

    def add(self, document: Document) -> None:
        data = document.text.encode()
        self.file.write(data)
        self.lengths.append(len(data))
        self.group_of.append(self.groups.setdefault(document.group, len(self.groups)))
        self.size += len(data)

    def close(self) -> None:
        self.file.close()

    def group_bytes(self) -> dict[str, int]:
        totals = np.bincount(self.group_of, weights=self.lengths, minlength=len(self.groups)) if self.groups else []
        return {group: int(total) for group, total in zip(self.groups, totals, strict=True)}

    def texts(self, held: set[str], validation: bool) -> Iterator[str]:
        """Texts of one side of the split, in the order they came."""
        wanted = [(group in held) == validation for group in self.groups]
        with self.path.open("rb") as file:
            for length, group in zip(self.lengths, self.group_of, strict=True):
                if wanted[group]:
                    yield file.read(length).decode()
                else:
                    file.seek(length, os.SEEK_CUR)

    def sample(self, held: set[str], limit: int) -> Iterator[str]:
        """About `limit` bytes of training text: every k-th document."""
        stride = max(1, -(-self.size // limit))
        taken = 0
        for number, text in enumerate(self.texts(held, validation=False)):
            if number % stride == 0 and taken < limit:
                taken += len(text)
                yield text
