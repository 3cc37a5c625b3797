"""Where a sweep can be watched beside its own store: TensorBoard files, Weights & Biases, MLflow.

The store is the record; these are views, and none of them is read back. TensorBoard files are written by the trial
itself, with tensorboardX, which Ray Tune needs anyway: Ray's own callback would put them into the folder that goes when
the sweep ends. W&B and MLflow go through Ray's callbacks, from the driver, and see the validations.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from depthlaw.platform.config import ConfigError

if TYPE_CHECKING:
    from depthlaw.platform.attempt import Watch
    from depthlaw.platform.plan import TrialSpec
    from depthlaw.platform.store import Store

# What a logger imports, and the extra of this package that installs it.
_NEEDS = {"wandb": "wandb", "mlflow": "mlflow"}


def check(loggers: Iterable[str]) -> None:
    """Raises ConfigError for one whose package is not installed."""
    for name in loggers:
        if name in _NEEDS and importlib.util.find_spec(_NEEDS[name]) is None:
            raise ConfigError(
                f"loggers has {name}, which is not installed: pip install 'depthlaw[{name}]', or leave it out"
            )


def run_name(spec: TrialSpec) -> str:
    """A trial's name in a folder and in other people's tables."""
    label = re.sub(r"[^A-Za-z0-9_.-]+", "_", spec.topology).strip("_")
    return f"{label}-{spec.n_layers}x{spec.d_model}-{spec.tokens}-lr{spec.lr:g}-s{spec.seed}-{spec.hash[:8]}"


@contextmanager
def tensorboard(spec: TrialSpec, store: Store) -> Iterator[Watch]:
    """Takes (step, values by name) of a trial to STORE/tensorboard/EXPERIMENT/RUN, for `tensorboard --logdir`.

    An attempt that resumes repeats steps since its checkpoint; they have the same values. A disk that refuses the file
    (full, say) ends the view and not the trial. So tensorboardX's SummaryWriter is not used: its thread dies of that,
    and then the trial waits for ever for room in its queue.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.summary import scalar

    folder = store.local_folder / "tensorboard" / spec.experiment / run_name(spec)
    writer: Any = None
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        writer = EventsWriter(str(folder / "events"))

    def watch(step: int, values: Mapping[str, float]) -> None:
        nonlocal writer
        if writer is None:
            return
        try:
            for name, value in values.items():
                summary = scalar(name.replace(".", "/"), value)  # grad_norm.0, grad_norm.1 share a group
                writer.write_event(Event(wall_time=time.time(), step=step, summary=summary))
            writer.flush()
        except OSError:
            writer = None

    try:
        yield watch
    finally:
        if writer is not None:
            with suppress(OSError):
                writer.close()


def callbacks(loggers: Iterable[str], runs: Mapping[str, list[TrialSpec]], store: Store) -> list[Any]:
    """Ray's callbacks of these loggers. W&B follows its own WANDB_ variables, MLflow MLFLOW_TRACKING_URI."""
    found: list[Any] = []
    experiment = next(iter(runs.values()))[0].experiment
    if "wandb" in loggers:
        from ray.air.integrations.wandb import WandbLoggerCallback

        found.append(_described(WandbLoggerCallback, runs)(project=experiment))
    if "mlflow" in loggers:
        from ray.air.integrations.mlflow import MLflowLoggerCallback

        where = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{store.local_folder / 'mlflow.db'}"
        found.append(_described(MLflowLoggerCallback, runs)(tracking_uri=where, experiment_name=experiment))
    return found


def _described(base: Any, runs: Mapping[str, list[TrialSpec]]) -> Any:
    """The callback, which also tells what a trial is: Tune knows no more of it than its hash."""
    about = {
        key: {
            "topology": specs[0].topology, "n_layers": specs[0].n_layers, "d_model": specs[0].d_model,
            "lr": specs[0].lr, "tokens": specs[-1].tokens, "seed": specs[0].seed,
        }
        for key, specs in runs.items()
    }  # fmt: skip

    class Described(base):  # type: ignore[misc]
        def log_trial_start(self, trial: Any) -> None:
            known = trial.config
            trial.config = known | about[known["trial"]]
            try:
                super().log_trial_start(trial)
            finally:
                trial.config = known

    return Described
