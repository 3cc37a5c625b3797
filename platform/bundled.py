"""Data sets that come with the package, so that a question can be asked before anything was trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class BundledError(ValueError):
    """A data set that does not come with the package. One line for a person."""


@dataclass(frozen=True)
class Bundled:
    """`runs` is a table or a store, as `fit` takes it; SOURCE.md beside it says where it is from."""

    name: str
    runs: Path
    limits: str  # what the figures cannot tell, said wherever they are shown

    @property
    def law(self) -> Path:
        """The law fitted on it, as `fit` writes it."""
        return self.runs.parent / "law.json"

    @property
    def source(self) -> str:
        """Where it is from, in words."""
        return " ".join((self.runs.parent / "SOURCE.md").read_text(encoding="utf-8").split())

    @property
    def note(self) -> str:
        """What a command says of it before it answers."""
        return f"about {self.name}: {self.limits}"


HOME = Path(__file__).parents[1] / "bundled"
DATA = {
    one.name: one
    for one in (
        Bundled(
            "published-400m",
            HOME / "published-400m" / "runs.csv",
            "ten topologies at one size, about 400M parameters and 20 tokens a parameter, read off a published suite: "
            "one run a shape, five to seven shapes a topology. It says nothing of other sizes or amounts of training. "
            "Its sizes are those of pre_ln at each shape: what mhc (1 to 2 %) and moda (11 to 14 %) add is not in "
            "them, which flatters moda.",
        ),
        Bundled(
            "tiny",
            HOME / "tiny" / "store",
            "six topologies of 50k to 450k backbone parameters, trained by this code on technical documentation and "
            "Python code, one seed, learning rates searched at one shape a size. So small that width itself is the "
            "limit: it shows what the tool does, and says nothing of large models or web text.",
        ),
    )
}


def bundled(name: str) -> Bundled:
    """Raises BundledError naming what there is."""
    if name not in DATA:
        raise BundledError(f"no bundled data set {name!r}; choose one of {', '.join(DATA)}")
    return DATA[name]


def chosen(given: object, data: str | None, what: str) -> Bundled | None:
    """The data set that --data names, or None where a person gives `what` of their own. Raises BundledError for neither
    and for both."""
    if (given is None) == (data is None):
        raise BundledError(f"give one of the two: {what}, or --data {' or '.join(DATA)}")
    return None if data is None else bundled(data)
