"""What a question about the optimum is answered with."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

INTERVAL = (
    "95 % interval, an approximation: 1.96 standard deviations from the scatter of the rows about the law and the "
    "linearised covariance of its parameters; rows count as independent, and the form of the law is taken as true"
)


@dataclass(frozen=True)
class Candidate:
    """One design. ratio: d_model / n_layers. loss, lower, upper: nats per token, see INTERVAL. uses: by budget."""

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
    uses: dict[str, float]


@dataclass(frozen=True)
class BudgetUse:
    """One budget at the best design, in counts, bytes, seconds or its own unit.

    binds: relaxing it alone by 10 % would improve the optimum. price: the change of the best loss that this brings,
    nats per token, 0 or negative. next_limit: the least limit at which, it alone relaxed, a better design fits; None if
    none ever does. Shapes come in steps, so a budget can hold the answer without a better design within 10 %.
    """

    name: str
    unit: str
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

    per_topology: the best of each topology that has a feasible design, best first. training: how D follows. flags: in
    plain words, empty if nothing is in doubt.
    """

    best: Candidate
    budgets: tuple[BudgetUse, ...]
    per_topology: tuple[Candidate, ...]
    near_ties: NearTies
    flags: tuple[str, ...]
    training: str
    considered: int
    feasible: int
    workload: dict[str, Any]
    hardware: dict[str, Any]
    law: dict[str, Any]
    interval: str = INTERVAL
    lattice: str = ""  # in words, which designs were considered

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


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
