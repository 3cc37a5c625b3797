"""How often a running trial may write its checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.05  # of a trial's time, at most, goes into its checkpoints


class Cadence:
    """A checkpoint every `every_s` seconds, but less often where that would take more than a twentieth of the time.

    Small models then lose half a minute to Ctrl-C, and a model whose checkpoint takes a minute writes one every twenty.
    What the next one takes is expected from the last one; the first is taken to cost nothing, for it is not known yet.

    >>> now = 0.0
    >>> cadence = Cadence(30, clock=lambda: now)
    >>> now = 31.0; cadence.due()
    True
    >>> cadence.started(); now = 41.0; cadence.ended()  # it took 10 s: 20 of 390 s are the most that a second may make
    >>> now = 389.0; cadence.due()
    False
    >>> now = 391.0; cadence.due()
    True
    """

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.every_s, self.clock = every_s, clock
        self.begun = self.ended_at = clock()
        self.spent = self.last = 0.0

    def due(self) -> bool:
        now = self.clock()
        within = self.spent + self.last <= SHARE * (now - self.begun + self.last)
        return now - self.ended_at > self.every_s and within

    def started(self) -> None:
        self.started_at = self.clock()

    def ended(self) -> None:
        self.ended_at = self.clock()
        self.last = self.ended_at - self.started_at
        self.spent += self.last
