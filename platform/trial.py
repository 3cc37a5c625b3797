"""One trial: a model trained to the end of its tokens, or to its divergence, with every step in the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.topologies import topology
from depthlaw.platform import checkpoint, universal
from depthlaw.platform.attempt import Attempt, Judge, Lead, Report, Watch
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.engine import running_engine
from depthlaw.platform.memory import DoesNotFitError, within_memory
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.ranks import Ranks, alone
from depthlaw.platform.store import Store
from depthlaw.platform.store_lease import Lease
from depthlaw.platform.trial_row import trial_row
from depthlaw.platform.trunk import Trunk

# Starts the other ranks of a trial for as long as the context lasts, and says what this one, the first, is among them.
Gang = Callable[[TrialSpec], AbstractContextManager[Ranks]]


def run_trial(
    spec: TrialSpec,
    store: Store,
    dataset: Dataset,
    report: Report = lambda metrics: None,
    judge: Judge = lambda step, val_loss: None,
    trunk: Trunk | None = None,
    watch: Watch = lambda step, values: None,
    keep: bool = False,
    lease: Lease | None = None,
    gang: Gang = alone,
) -> dict[str, Any]:
    """Trains the trial, from its checkpoint if one was left, writes its rows and returns its trial row.

    Takes a lease on the trial, unless the caller has one and gives it. A diverged run is a result (status `diverged`,
    with the reason), not an exception, and so is a pruned one. With a `trunk` the trial begins where the trunk of
    earlier trials ends, and leaves its own to the later ones. `keep` exports the weights of a finished one.

    A step that does not fit in memory is tried again from the last checkpoint with half the sequences at once, and so
    on, under the same lease and so in the same attempt: the global batch, and with it the numbers, stay. The row's
    reason says so; its status is `oom` if one sequence does not fit either.
    """
    if lease is None:
        with store.lease(spec.hash) as lease:
            return run_trial(spec, store, dataset, report, judge, trunk, watch, keep, lease, gang)
    own = store.checkpoint_dir(spec.hash)

    def once(spec: TrialSpec, note: str | None) -> dict[str, Any]:
        universal.fit_to(_resumed_folder(own, trunk), spec.ranks, spec.zero_stage)
        with gang(spec) as ranks:
            return run_rank(spec, store, dataset, ranks, Lead(report, judge, watch, trunk, keep, lease, note))

    try:
        return within_memory(spec, once)
    except DoesNotFitError as error:
        row = trial_row(spec, lease.attempt, "oom", str(error))
    lease.confirm()
    store.write_trial(row)
    checkpoint.delete(own)
    report({"step": 0, "status": "oom"})
    return row


def run_rank(spec: TrialSpec, store: Store, dataset: Dataset, ranks: Ranks, lead: Lead | None = None) -> dict[str, Any]:
    """One process's part in a trial. All ranks take the same steps; the first, which has a `lead`, writes and reports.

    Returns the trial row, which is complete on the first.
    """
    lead = lead or Lead()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    model = build(spec.shape, topology(spec.topology), spec.seed)
    model.recompute = spec.activation_checkpointing
    if torch.cuda.is_available():
        model.cuda()
    resumed = checkpoint.pointer_of(_resumed_folder(store.checkpoint_dir(spec.hash), lead.trunk))
    with running_engine(model, spec, ranks, resumed.get("universal", False)) as engine:
        return Attempt(spec, store, dataset, engine, ranks, lead).to_its_end()


def _resumed_folder(own: Path, trunk: Trunk | None) -> Path:
    """Where the checkpoint is from which a trial goes on, if there is one: its own, or else its trunk's."""
    return own if trunk is None or checkpoint.pointer_of(own) else trunk.folder
