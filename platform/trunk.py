"""Trials of a wsd schedule that differ only in tokens: until each decays they are one run, the trunk, trained once.

They are run one after another, the shortest first. Each leaves a checkpoint of the trunk where its own decay begins,
and the next goes on from there with what the trunk recorded, so that its rows are those of a run from scratch. When all
have ended the checkpoint goes: tokens that are added to a config later are trained from the first step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from depthlaw.platform.plan import TrialSpec, content_hash
from depthlaw.platform.schedules import branch_step


@dataclass(frozen=True)
class Trunk:
    """What a trial leaves to those that share its trunk: where its checkpoint goes, and who `later` goes on from it."""

    folder: Path
    later: list[TrialSpec]


def trunk_key(spec: TrialSpec) -> str:
    """Equal for trials that share a trunk; the trial's own hash where nothing is shared."""
    if spec.schedule.get("kind") != "wsd":
        return spec.hash
    own = {"tokens": 0, "experiment": "", "lr_searched_at": "", "ranks": 1, "activation_checkpointing": False}
    return content_hash({"trunk": spec.to_dict() | own})


def families(trials: Iterable[TrialSpec]) -> list[list[TrialSpec]]:
    """Trials that share a trunk together, the shortest first; all others alone. In the order of their longest."""
    found: dict[str, list[TrialSpec]] = defaultdict(list)
    for spec in trials:
        found[trunk_key(spec)].append(spec)
    return [sorted(family, key=lambda spec: spec.tokens) for family in found.values()]


def spent_flops(trials: Iterable[TrialSpec]) -> dict[str, int]:
    """Training FLOPs of each trial, by hash, a shared trunk counted once: for those whose decay comes first."""
    spent = {}
    for family in families(trials):
        shared = 0
        for spec in family:
            spent[spec.hash] = spec.flops_of(spec.steps - shared)
            shared = branch_step(spec) if len(family) > 1 else 0
    return spent
