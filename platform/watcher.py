"""What the driver of a sweep sees of its trials, event by event, told in a line each."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from depthlaw.platform.lr_search import SETTLED
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.store import Store, StoreError


def describe(spec: TrialSpec) -> str:
    """A trial in a few words, for people."""
    return f"{spec.topology} {spec.n_layers} x {spec.d_model}, {spec.tokens / 1e6:.3g}M tokens, lr {spec.lr:g}"


def _reason(trial: Any) -> str:
    """Why the trial's last attempt failed, in one line: kind and message, without the traceback around it."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        # Where the driver wrote it; `get_pickled_error` reads a copy that is made later.
        error = pickle.loads(Path(trial.pickled_error_file).read_bytes())
    except Exception:  # not written, cut short, or of a kind that cannot be unpickled
        return "Ray kept no reason: is the disk of its temporary folder full?"
    if isinstance(error, RayTaskError):
        error = error.cause
    if isinstance(error, RayActorError):
        return "its worker process died: killed, or out of memory"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


class Tell(Protocol):
    """Takes an event: the trial that ended with it, if one did; whether it is one of many and may go unseen."""

    def __call__(self, ended: TrialSpec | None, message: str, *, routine: bool = False) -> None: ...


def watcher(
    runs: Mapping[str, list[TrialSpec]],
    store: Store,
    tell: Tell,
    problems: dict[str, str],
) -> Any:
    """A callback for Tune over the trials of `runs`; fills `problems`: why those that failed for good did, by hash."""
    from ray.tune import Callback

    specs = {spec.hash: spec for run in runs.values() for spec in run}

    class Watcher(Callback):
        """Follows the trials from the driver; stores `failed` for those whose worker died too often."""

        def __reduce__(self) -> tuple[Any, ...]:
            # Tune pickles its callbacks with the experiment; a listener may hold a terminal, which cannot be.
            return Callback, ()

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            if "trial" not in result:
                return
            spec = specs[result["trial"]]
            if "val_loss" in result:
                loss = f"val_loss {result['val_loss']:.4f}"
                tell(None, f"{describe(spec)}: step {result['step']}, {loss}", routine=True)
            elif "status" in result:
                tell(spec, f"{describe(spec)}: {result['status']}")
            elif "waiting" in result:
                tell(None, f"{describe(spec)}: {result['waiting']} is training it, waiting for that one")

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            spec = specs[trial.config["trial"]]
            tell(None, f"{describe(spec)}: started again after: {_reason(trial)}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            from depthlaw.platform.trial_row import trial_row

            reason, statuses = _reason(trial), store.statuses()
            for spec in runs[trial.config["trial"]]:
                if statuses.get(spec.hash) in SETTLED:
                    continue
                problems[spec.hash] = reason
                # A store that refuses the row (a full disk) must not end the trials that still run.
                with suppress(StoreError):
                    store.write_trial(trial_row(spec, store.next_attempt(spec.hash), "failed", reason))
                tell(spec, f"{describe(spec)}: failed: {reason}")

    return Watcher()
