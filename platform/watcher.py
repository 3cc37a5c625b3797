"""What the driver of a sweep sees of its trials, event by event, told in a line each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.store import Store, StoreError


def describe(spec: TrialSpec) -> str:
    """A trial in a few words, for people."""
    return f"{spec.topology} {spec.n_layers} x {spec.d_model}, {spec.tokens / 1e6:.3g}M tokens, lr {spec.lr:g}"


def _reason(trial: Any) -> str:
    """Why the trial's last attempt failed, in one line: kind and message, without the traceback around it."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        error = trial.get_pickled_error()
    except (
        Exception
    ):  # Ray keeps it in a file: on a full disk that is cut short, or an error of any kind unpickles badly
        error = None
    if isinstance(error, RayTaskError):
        error = error.cause
    if error is None:
        return "Ray kept no reason: is the disk full?"
    if isinstance(error, RayActorError):
        return "its worker process died: killed, or out of memory"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def watcher(store: Store, tell: Callable[[TrialSpec | None, str], None], problems: dict[str, str]) -> Any:
    from ray.tune import Callback

    class Watcher(Callback):
        """Follows the trials from the driver; stores `failed` for those whose worker died too often."""

        def __reduce__(self) -> tuple[Any, ...]:
            # Tune pickles its callbacks with the experiment; a listener may hold a terminal, which cannot be.
            return Callback, ()

        def on_trial_result(
            self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **_: Any
        ) -> None:
            spec = TrialSpec.from_dict(trial.config["spec"])
            if "val_loss" in result:
                tell(None, f"{describe(spec)}: step {result['step']}, val_loss {result['val_loss']:.4f}")
            elif "status" in result:
                tell(spec, f"{describe(spec)}: {result['status']}")
            elif "waiting" in result:
                tell(None, f"{describe(spec)}: another process of this machine is training it, waiting for that one")

        def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            spec = TrialSpec.from_dict(trial.config["spec"])
            tell(None, f"{describe(spec)}: started again after: {_reason(trial)}")

        def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:
            from depthlaw.platform.trial import trial_row

            spec = TrialSpec.from_dict(trial.config["spec"])
            reason = problems[spec.hash] = _reason(trial)
            # A store that refuses the row (a full disk) must not end the trials that still run.
            with suppress(StoreError):
                store.write_trial(trial_row(spec, store.next_attempt(spec.hash), "failed", reason))
            tell(spec, f"{describe(spec)}: failed: {reason}")

    return Watcher()
