"""What a question about the optimum is answered with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from depthlaw.scaling.fitted import FittedLaw

LINEARISED = (
    "95 % interval, an approximation: 1.96 standard deviations from the scatter of the rows about the law and the "
    "linearised covariance of its parameters; rows count as independent, and the form of the law is taken as true"
)
BOOTSTRAP = (
    "95 % interval of one new run: the law refitted to resampled runs, plus the scatter of a run about the law, "
    "{}; the form of the law is taken as true"
)
HELD_OUT = "widened {:.3g} times for the error of predicting larger sizes from smaller ones"
AS_EXPECTED = "not widened, for larger sizes were predicted from smaller ones as well as it expects"
NOTHING_HELD_OUT = "not widened, for no size could be held out and the error on larger ones is not known"


def interval_words(law: FittedLaw) -> str:
    """What the interval of an answer is, and what it leaves out."""
    if law.draws is None:
        return LINEARISED
    if not law.held_out:
        return BOOTSTRAP.format(NOTHING_HELD_OUT)
    return BOOTSTRAP.format(HELD_OUT.format(law.inflation) if law.inflation > 1 else AS_EXPECTED)


@dataclass(frozen=True)
class Candidate:
    """One design. ratio: d_model / n_layers. loss, lower, upper: nats per token, see `Optimum.interval`.

    uses: by budget. tpot_s, kv_bytes: seconds and bytes at the workload and hardware asked about, budgets or not.
    share: of the law's bootstrap draws in which it has the least loss of all feasible designs; None if the law carries
    no draws. size_beyond, ratio_beyond: by what factor its N and its d/L lie past those fitted for its topology, 1
    within them.
    """

    topology: str
    n_layers: int
    d_model: int
    ratio: float
    backbone_params: int
    params: int
    tokens: float
    loss: float
    lower: float
    upper: float
    tpot_s: float
    kv_bytes: float
    uses: dict[str, float]
    share: float | None
    size_beyond: float
    ratio_beyond: float

    @property
    def beyond(self) -> float:
        """The larger of the two."""
        return max(self.size_beyond, self.ratio_beyond)


@dataclass(frozen=True)
class BudgetUse:
    """One budget at the best design, in its unit. describe: what it counts, in words.

    binds: relaxing it alone by 10 % would improve the optimum. price: the change of the best loss that this brings,
    nats per token, 0 or negative. next_limit: the least limit at which, it alone relaxed, a better design fits; None if
    none ever does. Shapes come in steps, so a budget can hold the answer without a better design within 10 %. Where D
    follows from a FLOP budget, more of that one trains longer: its price says so and its next_limit is None.
    """

    name: str
    unit: str
    describe: str
    text: str
    use: float
    limit: float
    binds: bool
    price: float
    next_limit: float | None


@dataclass(frozen=True)
class NearTies:
    """Feasible designs whose predicted ln loss is within `noise` (the fit's log_rms) of the best; it is one of them."""

    count: int
    noise: float
    n_layers: tuple[int, int]
    d_model: tuple[int, int]
    topologies: tuple[str, ...]


@dataclass(frozen=True)
class Optimum:
    """The best design, what it rests on, and what to doubt.

    per_topology: the best of each topology that has a feasible design, best first. contenders: the designs that win
    most of the law's bootstrap draws, 20 at most; topology_shares: the share of draws that each topology's designs win
    together; both empty where `draws` is 0. pareto: the feasible designs that no other feasible one equals or beats in
    loss, tpot and KV memory all together, best loss first. training: how D follows; mfu, seq_len: assumed of it. flags:
    in plain words, empty if nothing is in doubt.
    """

    best: Candidate
    budgets: tuple[BudgetUse, ...]
    per_topology: tuple[Candidate, ...]
    near_ties: NearTies
    contenders: tuple[Candidate, ...]
    topology_shares: dict[str, float]
    draws: int
    pareto: tuple[Candidate, ...]
    flags: tuple[str, ...]
    training: str
    considered: int
    feasible: int
    workload: dict[str, Any]
    hardware: dict[str, Any]
    law: dict[str, Any]
    interval: str
    mfu: float
    seq_len: int
    lattice: str = ""  # in words, which designs were considered

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_frame(self) -> pd.DataFrame:
        """One row for each design of the answer, best loss first: the columns of Candidate, its uses as `use_<budget>`,
        and whether it is the `best`, `best_of_topology`, `contender` or on the `pareto` front."""
        import pandas as pd

        roles = {
            "best": (self.best,),
            "best_of_topology": self.per_topology,
            "contender": self.contenders,
            "pareto": self.pareto,
        }
        found = {_key(c): c for designs in roles.values() for c in designs}
        keys = {role: {_key(c) for c in designs} for role, designs in roles.items()}
        rows = [
            {k: v for k, v in asdict(c).items() if k != "uses"}
            | {f"use_{name}": use for name, use in c.uses.items()}
            | {role: key in keys[role] for role in roles}
            for key, c in found.items()
        ]
        return pd.DataFrame(rows).sort_values("loss", kind="stable", ignore_index=True)


def _key(c: Candidate) -> tuple[str, int, int]:
    return c.topology, c.n_layers, c.d_model


class Infeasible(Exception):  # noqa: N818  an answer, not a fault
    """No design meets every budget.

    conflict: names of a smallest set of budgets that no design meets together. nearest: the design with the smallest
    worst use / limit over all budgets; ratios: its use / limit of each.
    """

    def __init__(
        self, message: str, conflict: tuple[str, ...], nearest: Candidate, ratios: dict[str, float], considered: int
    ) -> None:
        super().__init__(message)
        self.conflict, self.nearest, self.ratios, self.considered = conflict, nearest, ratios, considered

    def to_dict(self) -> dict[str, Any]:
        return {
            "infeasible": str(self),
            "conflict": list(self.conflict),
            "nearest": asdict(self.nearest),
            "ratios": self.ratios,
            "considered": self.considered,
        }
