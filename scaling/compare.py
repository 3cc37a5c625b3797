"""What each topology is worth beside a reference, in parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from depthlaw.scaling.fitted import FittedLaw
from depthlaw.scaling.laws import LawError
from depthlaw.scaling.laws import law as find_law

LEVEL = 0.95


@dataclass(frozen=True)
class Worth:
    """One topology. worth: at its best shape it is as good as the reference with `worth` times the parameters at its
    own best shape; best_ratio: d_model / n_layers of that shape. lower, upper: 95 % from the law's bootstrap draws, and
    ratio_lower, ratio_upper from its profile if it is a law of one size;
    None without draws, 0 and inf beyond 1/1000 and 1000. worth is None where the data cannot tell, and doubt says why.
    better_in: share of the draws in which worth is above 1."""

    topology: str
    worth: float | None
    lower: float | None
    upper: float | None
    better_in: float | None
    best_ratio: float | None
    ratio_lower: float | None
    ratio_upper: float | None
    doubt: str


@dataclass(frozen=True)
class Comparison:
    """All topologies of a law, the most worth first. Judged at N backbone parameters of the topology and D tokens, the
    centre of the runs fitted."""

    reference: str
    N: float
    D: float
    draws: int
    ratio_by: str  # where the intervals of the best ratio come from
    topologies: tuple[Worth, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: an end that the draws do not bound is null."""
        found = asdict(self)
        for row in found["topologies"]:
            row.update({k: None for k, v in row.items() if v == np.inf})
        return found


def compare(law: FittedLaw, reference: str = "pre_ln") -> Comparison:
    """Each topology's parameter equivalent of the reference. Raises LawError if the law was not fitted on it."""
    if reference not in law.topologies:
        raise LawError(
            f"the law was not fitted on the reference {reference!r}; it knows {', '.join(law.topologies)}: "
            "choose one of them"
        )
    rows = [_worth(law, topology, reference) for topology in law.topologies]
    rows.sort(key=lambda row: -np.inf if row.worth is None else row.worth, reverse=True)
    draws = 0 if law.draws is None else len(law.draws)
    by = "the profile likelihood" if find_law(law.law).one_size and law.profiles else "the same"
    return Comparison(reference, law.N0, law.D0, draws, by, tuple(rows))


def _worth(law: FittedLaw, topology: str, reference: str) -> Worth:
    ends = [0.5 * (1.0 - LEVEL), 0.5 * (1.0 + LEVEL)]
    value: float | None = 1.0 if topology == reference else law.worth(topology, reference)
    lower = upper = better = low_ratio = high_ratio = None
    ratio = law.best_ratio(topology, law.N0)
    doubt = ""
    if value is None or np.isnan(value):
        unknown = [name for name in law.worth_rests_on(topology, reference) if name in law.unidentified]
        if find_law(law.law).one_size:
            doubt = f"{find_law(law.law).remark}: no number of parameters is worth another"
        elif unknown:
            doubt = f"the data do not identify {', '.join(unknown)}"
        else:
            doubt = f"law {law.law} sees no size of {reference} between 1/1000 and 1000 times as good"
        value = None
    if law.draws is not None:
        if value is not None:
            draws = np.ones(len(law.draws)) if topology == reference else law.worth_draws(topology, reference)
            # A quantile between a number and inf is not a number: one that was drawn is taken.
            lower, upper = (float(v) for v in np.quantile(draws, ends, method="nearest"))
            better = float(np.mean(draws > 1.0))
        ratios = law.best_ratio_draws(topology, law.N0)
        profile = law.profiles.get(f"best d/L[{topology}]")
        if find_law(law.law).one_size and profile:
            # Such tables are small: in simulation the draws of the best d/L held the truth in 88 %, this in 95 %.
            low_ratio, high_ratio = profile
        elif ratios is not None:
            low_ratio, high_ratio = (float(v) for v in np.quantile(ratios, ends))
    return Worth(
        topology, value, lower, upper, better, None if ratio is None else float(ratio), low_ratio, high_ratio, doubt
    )
