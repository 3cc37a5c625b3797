"""A sweep: rounds of trials, until the store has all that its config wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from depthlaw.platform.cluster import SweepError, check_resources
from depthlaw.platform.config import SweepConfig
from depthlaw.platform.data_config import DataError, data_root
from depthlaw.platform.loggers import check
from depthlaw.platform.lr_search import stored_outcomes
from depthlaw.platform.plan import Round, TrialSpec, missing, wanted
from depthlaw.platform.rounds import running
from depthlaw.platform.store import Store
from depthlaw.platform.trunk import spent_flops
from depthlaw.platform.watcher import Tell, describe
from depthlaw.platform.worker import WAIT_S
from depthlaw.scaling.units import counted

if TYPE_CHECKING:
    from depthlaw.platform.dataset import Dataset

__all__ = ["Progress", "SweepError", "sweep"]


@dataclass(frozen=True)
class Progress:
    """What a running sweep tells its caller after each event."""

    done: int
    planned: int
    flops_done: float
    flops_planned: float
    message: str
    routine: bool = False  # one of many like it, which may go unseen


Listener = Callable[[Progress], None]


def sweep(
    config: SweepConfig,
    store: Store,
    *,
    data_folder: Path | None = None,
    address: str = "local",
    concurrent: int | None = None,
    listener: Listener = lambda progress: None,
) -> list[TrialSpec]:
    """Trains every wanted trial that has no settled row in the store; returns the wanted trials.

    It goes in rounds: what is wanted follows from the config and from what the store holds, and is asked again when a
    round has ended, until nothing is missing. `address` is "local" for a cluster of its own on this machine, or "auto"
    or an address for a running one. `concurrent` bounds the trials that run at once; by default the cluster's resources
    do. Calling it again resumes: nothing that is settled runs again, and a trial that was interrupted goes on from its
    checkpoint. Raises SweepError when a trial failed for good or a search found no learning rate.
    """
    from depthlaw.platform.data_build import build

    if address == "local":
        check_resources(config)
    check(config.loggers)
    folder = (data_folder or data_root()).absolute()
    store = Store(store.path, WAIT_S)  # it has answered just now: what is away later is waited for as trials do
    dataset = build(config.data, folder, progress=lambda text: listener(Progress(0, 0, 0, 0, text)))

    def look() -> tuple[Round, list[TrialSpec]]:
        outcomes = stored_outcomes(store)
        asked = wanted(config, outcomes, dataset.fingerprint)
        store.write_plan(config.name, [spec.plan_row() for spec in asked.trials])
        return asked, missing(asked.trials, {trial: outcome.status for trial, outcome in outcomes.items()})

    asked, todo = look()
    _check_text([*asked.trials, *asked.later], dataset, config)
    problems: dict[str, str] = {}
    if todo:
        listener(Progress(0, 0, 0, 0, f"{counted(len(todo), 'trial')} to run; starting Ray"))
        with running(config, store, folder, address, concurrent) as run:
            tried: set[str] = set()
            while now := [spec for spec in todo if spec.hash not in tried]:
                problems |= run(now, asked.trials, _counting(listener, asked.trials, now))
                tried |= {spec.hash for spec in now}
                asked, todo = look()
    if todo:
        first = todo[0]
        raise SweepError(
            f"{len(todo)} of {len(asked.trials)} trials have no result (first: {describe(first)}: "
            f"{problems.get(first.hash, 'not run')}); run the same command again to go on"
        )
    if asked.stuck:
        raise SweepError("; ".join(asked.stuck))
    _after(asked.trials, config, store, dataset, listener)
    return asked.trials


def _after(trials: list[TrialSpec], config: SweepConfig, store: Store, dataset: Dataset, listener: Listener) -> None:
    """What a complete sweep does with the weights it kept."""
    if config.keep_checkpoints == "none":
        return
    from depthlaw.platform import diagnose, export

    flops = float(sum(spec.train_flops for spec in trials))

    def tell(text: str, routine: bool = True) -> None:
        listener(Progress(len(trials), len(trials), flops, flops, text, routine))

    wanted = export.keep(store, [spec.hash for spec in trials], config.keep_checkpoints)
    there = export.kept(store, wanted)
    if len(there) < len(wanted):
        tell(f"{len(wanted) - len(there)} of {len(wanted)} trials were trained without keeping weights", routine=False)
    if config.diagnostics:
        diagnose.kept_trials(store, there, config.diagnostics, dataset, tell)


def _check_text(trials: list[TrialSpec], dataset: Dataset, config: SweepConfig) -> None:
    """There is a window to validate on, and text is never repeated silently. Raises DataError."""
    dataset.n_windows("validation", config.seq_len)
    allowed = config.max_epochs
    largest = max(trials, key=lambda spec: spec.tokens)
    epochs = dataset.epochs(largest.tokens, largest.seq_len)
    if epochs > allowed:
        raise DataError(
            f"the corpus has {dataset.n_tokens('train'):,} training tokens, and {describe(largest)} would make "
            f"{epochs:.3g} epochs where max_epochs allows {allowed:g}: use more text, fewer tokens per parameter, "
            "or a larger max_epochs"
        )


def _counting(listener: Listener, trials: list[TrialSpec], todo: list[TrialSpec]) -> Tell:
    """Turns single events into the running totals that a listener sees."""
    flops = spent_flops(trials)
    total = float(sum(flops.values()))
    left = {spec.hash: flops[spec.hash] for spec in todo}

    def tell(ended: TrialSpec | None, message: str, *, routine: bool = False) -> None:
        if ended is not None:
            left.pop(ended.hash, None)
        done, flops_done = len(trials) - len(left), total - sum(left.values())
        listener(Progress(done, len(trials), flops_done, total, message, routine))

    return tell
