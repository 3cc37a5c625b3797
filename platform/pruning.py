"""Pruning inside a cell: a learning rate that others of its cell have clearly beaten is stopped before its end.

Losses before a rate has decayed order the rates otherwise than final losses do: a high rate looks worse than it ends.
So only rates of one cell are compared, at the same step, and the best three at a rung always go on. What that costs
and saves is measured in benchmarks/pruning.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthlaw.platform.plan import TrialSpec
    from depthlaw.platform.store import Store


def rung_steps(at: Iterable[float], steps: int, validations: int) -> list[int]:
    """The steps of the rungs: of each fraction in `at` the first of the evenly spaced validations from there on."""
    evaluated = [round(steps * k / validations) for k in range(1, validations)]
    # A hair below the fraction: 0.3 x 10 is more than 3 in floating point.
    found = {next((step for step in evaluated if step >= fraction * steps - 0.5), steps) for fraction in at}
    return sorted(step for step in found if 0 < step < steps)


def cell_of(spec: TrialSpec) -> Hashable:
    """What trials that prune one another share: everything but the learning rate."""
    return spec.recipe_hash, spec.topology, spec.shape, spec.tokens, spec.seed


class Rungs:
    """The losses at the rungs of each cell, and the rule over them. A pure object; a sweep runs it as a Ray actor.

    >>> rungs = Rungs(keep=3)
    >>> [rungs.verdict("cell", 30, lr, loss) for lr, loss in [(1, 4.0), (2, 3.9), (4, 3.8), (8, 3.95)]]
    [None, None, None, None]
    >>> rungs.verdict("cell", 30, 16, 4.1)
    'validation loss 4.1 at step 30 is above those of 3 other learning rates of its cell: 4 (3.8), 2 (3.9), 8 (3.95)'
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._losses: dict[Hashable, dict[int, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))

    def seen(self, cell: Hashable, step: int, lr: float, loss: float) -> None:
        """Nats a token of the rate at this step, for the rates that come there later."""
        self._losses[cell][step][lr] = loss

    def forget(self, cell: Hashable, lr: float) -> None:
        """The rate has diverged: what it had reached before says nothing against the others."""
        for losses in self._losses[cell].values():
            losses.pop(lr, None)

    def verdict(self, cell: Hashable, step: int, lr: float, loss: float) -> str | None:
        """Why the rate is to stop at this rung, or None. Equal losses stop nobody."""
        self.seen(cell, step, lr, loss)
        better = sorted((other, rate) for rate, other in self._losses[cell][step].items() if other < loss)
        if len(better) < self.keep:
            return None
        shown = ", ".join(f"{rate:g} ({other:.4g})" for other, rate in better[: self.keep])
        return (
            f"validation loss {loss:.4g} at step {step} is above those of {self.keep} other learning rates of its "
            f"cell: {shown}"
        )


def stored_losses(store: Store, trials: Iterable[TrialSpec]) -> list[tuple[Hashable, int, float, float]]:
    """(cell, step, lr, loss) of every validation that a store holds of these trials; none of those that diverged."""
    found, statuses = [], store.statuses()
    for spec in trials:
        if statuses.get(spec.hash) != "diverged":
            rows = store.steps(trial=spec.hash, names="val_loss")
            found += [(cell_of(spec), int(r.step), spec.lr, float(r.value)) for r in rows.itertuples()]
    return found


def middle_out(trials: Sequence[TrialSpec]) -> list[TrialSpec]:
    """The longest trials first, and those of one cell together, from the middle of its rates outwards.

    The middle of a list is where its author expects the best rate: the earlier it is known, the more can be pruned.
    """
    cells: dict[Hashable, list[float]] = defaultdict(list)
    for spec in trials:
        cells[cell_of(spec)].append(spec.lr)
    places = {cell: k for k, cell in enumerate(cells)}

    def key(spec: TrialSpec) -> tuple[float, int, float]:
        cell = cell_of(spec)
        rates = sorted(cells[cell])
        return -spec.train_flops, places[cell], abs(rates.index(spec.lr) - (len(rates) - 1) / 2)

    return sorted(trials, key=key)
