"""The search for the learning rate of one cell: which rates to try, as a pure function of what is known of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthlaw.platform.plan import TrialSpec
    from depthlaw.platform.store import Store

# Statuses that answer a trial for good: it is not run again.
SETTLED = ("finished", "diverged", "pruned", "oom")


@dataclass(frozen=True)
class Outcome:
    """What a store says of a trial: its status, and its validation loss in nats a token if it finished."""

    status: str
    val_loss: float | None = None


def stored_outcomes(store: Store) -> dict[str, Outcome]:
    """Every trial of the store, by hash."""
    frame = store.trials()
    losses = [None if loss != loss else float(loss) for loss in frame["val_loss"]]  # a null comes as NaN
    return {t: Outcome(s, loss) for t, s, loss in zip(frame["trial"], frame["status"], losses, strict=True)}


@dataclass(frozen=True)
class Search:
    """`trials` that the search wants so far; whether it is `over`; then the `best` rate, None if none finished."""

    trials: list[TrialSpec]
    over: bool
    best: float | None


def search(
    rates: Iterable[float],
    extensions: int,
    outcomes: Mapping[str, Outcome],
    trials_at: Callable[[float], list[TrialSpec]],
) -> Search:
    """The search over `rates`, of which `trials_at` gives the trials, one for each seed.

    Best is the rate with the lowest mean loss over the seeds that finished, as in a store's cells. While it is the
    smallest or the largest of the rates, the list grows by one on that side, at most `extensions` times. A rate that
    diverged, or that was pruned and so is known to be worse, is one of the rates: it bounds the best.
    """
    tried = sorted(set(rates))
    while True:
        by_rate = {lr: trials_at(lr) for lr in tried}
        trials = [spec for specs in by_rate.values() for spec in specs]
        if any(spec.hash not in outcomes or outcomes[spec.hash].status not in SETTLED for spec in trials):
            return Search(trials, over=False, best=None)
        best = _best(by_rate, outcomes)
        if extensions == 0 or best not in (tried[0], tried[-1]):
            return Search(trials, over=True, best=best)
        extensions -= 1
        tried = [beyond(tried[1], tried[0]), *tried] if best == tried[0] else [*tried, beyond(*tried[-2:])]


def _best(by_rate: Mapping[float, list[TrialSpec]], outcomes: Mapping[str, Outcome]) -> float | None:
    losses: dict[float, list[float]] = defaultdict(list)
    for lr, specs in by_rate.items():
        for spec in specs:
            outcome = outcomes[spec.hash]
            if outcome.status == "finished" and outcome.val_loss is not None:
                losses[lr].append(outcome.val_loss)
    return min(losses, key=lambda lr: (sum(losses[lr]) / len(losses[lr]), lr), default=None)


def beyond(inner: float, edge: float) -> float:
    """The next rate after `edge` in steps of their ratio, to six digits, so that 0.004, 0.008 go on with 0.016."""
    return float(f"{edge * edge / inner:.6g}")
