"""What a page is about: one law, the designs considered, and how both are named in a command and in a script."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from depthlaw.platform.bundled import bundled
from depthlaw.platform.query import Question, installed
from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.hardware import PRESETS, hardware
from depthlaw.scaling.law_file import load_law


@dataclass(frozen=True)
class Source:
    """law: the path of a law file, or data: the name of a bundled data set. hardware_files: offered beside the presets.
    layers to vocab_size: which designs, as in `optimum`. Raises the errors of what it reads."""

    law: str | None = None
    data: str | None = None
    hardware_files: tuple[str, ...] = ()
    layers: tuple[int, int] | None = None
    widest: int | None = None
    rule: str | None = None
    vocab_size: int | None = None

    @cached_property
    def fitted(self) -> FittedLaw:
        return load_law(bundled(self.data).law if self.data else str(self.law))

    @property
    def name(self) -> str:
        return self.data or str(self.law)

    @property
    def limits(self) -> str:
        """What the data cannot tell, where it came with depthlaw."""
        return bundled(self.data).limits if self.data else ""

    @property
    def topologies(self) -> tuple[str, ...]:
        """Those of the law whose designs can be counted here."""
        return tuple(installed(self.fitted)[0])

    @property
    def hardware(self) -> tuple[str, ...]:
        """What a page may choose from."""
        return (*PRESETS, *self.hardware_files)

    def check(self) -> None:
        """Raises what is wrong with the law, the designs or a hardware file before a page is there to say it."""
        self.question()
        for path in self.hardware_files:
            hardware(path)

    def question(self, topologies: tuple[str, ...] = ()) -> Question:
        """About these topologies, or all. The last few are kept."""
        return _question(self, topologies)

    def words(self) -> list[str]:
        """The command's first words."""
        return ["depthlaw", "optimum", *(["--data", self.data] if self.data else [str(self.law)])]

    def options(self) -> list[str]:
        """The command's options that say which designs."""
        given = {
            "--layers": self.layers and "{}:{}".format(*self.layers),
            "--widest": self.widest,
            "--shape-rule": self.rule,
            "--vocab-size": self.vocab_size,
        }
        return [word for option, value in given.items() if value is not None for word in (option, str(value))]

    def call(self) -> str:
        """The line of a script that loads the law."""
        return (
            f"depthlaw.load_law(depthlaw.bundled({self.data!r}).law)"
            if self.data
            else f"depthlaw.load_law({self.law!r})"
        )

    def arguments(self) -> dict[str, object]:
        """The call's arguments that say which designs."""
        given = {"layers": self.layers, "widest": self.widest, "rule": self.rule, "vocab_size": self.vocab_size}
        return {name: value for name, value in given.items() if value is not None}


@lru_cache(maxsize=4)
def _question(source: Source, topologies: tuple[str, ...]) -> Question:
    return Question(source.fitted, topologies or None, source.layers, source.rule, source.widest, source.vocab_size)
