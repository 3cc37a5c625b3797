"""One trial: a model trained to the end of its tokens, or to its divergence, with every step in the store."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.topologies import topology
from depthlaw.platform import checkpoint, universal
from depthlaw.platform.baselines import frequency_loss
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.engine import final_step, running_engine
from depthlaw.platform.memory import DoesNotFitError, within_memory
from depthlaw.platform.plan import NUMERICS_VERSION, TrialSpec
from depthlaw.platform.ranks import Ranks, alone
from depthlaw.platform.stopping import DivergenceRule
from depthlaw.platform.store import Store

COMMIT = "DEPTHLAW_COMMIT"

Report = Callable[[dict[str, Any]], None]
# Starts the other ranks of a trial for as long as the context lasts, and says what this one, the first, is among them.
Gang = Callable[[TrialSpec], AbstractContextManager[Ranks]]


def _no_report(metrics: dict[str, Any]) -> None:
    pass


def lr_at(step: int, steps: int, peak: float, warmup: float, final: float) -> float:
    """Learning rate of step 0 .. steps - 1: linear warm-up over `warmup` of the steps, then a cosine to `final` x peak.

    The last step has exactly final x peak, of however few steps: what is compared has decayed.
    """
    rise = round(warmup * steps)
    if step < min(rise, steps - 1):
        return peak * (step + 1) / rise
    done = 1.0 if step == steps - 1 else (step - rise) / (steps - 1 - rise)
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))


def run_trial(
    spec: TrialSpec, store: Store, dataset: Dataset, report: Report = _no_report, gang: Gang = alone
) -> dict[str, Any]:
    """Trains the trial, from its checkpoint if one was left, writes its rows and returns its trial row.

    A diverged run is a result (status `diverged`, with the reason), not an exception. A step that does not fit in
    memory is tried again from the last checkpoint with half the sequences at once, and so on: the global batch, and
    with it the numbers, stay. The row's reason says so; its status is `oom` if one sequence does not fit either.
    """

    def attempt(spec: TrialSpec, note: str | None) -> dict[str, Any]:
        universal.fit_to(store.checkpoint_dir(spec.hash), spec.ranks, spec.zero_stage)
        with gang(spec) as ranks:
            return run_rank(spec, store, dataset, ranks, report, note)

    try:
        return within_memory(spec, attempt)
    except DoesNotFitError as error:
        row = trial_row(spec, store.next_attempt(spec.hash), "oom", str(error))
    store.write_trial(row)
    checkpoint.delete(store.checkpoint_dir(spec.hash))
    report({"step": 0, "status": "oom"})
    return row


def run_rank(
    spec: TrialSpec,
    store: Store,
    dataset: Dataset,
    ranks: Ranks,
    report: Report = _no_report,
    note: str | None = None,
) -> dict[str, Any]:
    """One process's part in a trial. All ranks take the same steps; the first alone writes and reports.

    `note` goes into the row's reason.
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    model = build(spec.shape, topology(spec.topology), spec.seed)
    model.recompute = spec.activation_checkpointing
    if torch.cuda.is_available():
        model.cuda()
    converted = checkpoint.pointer_of(store.checkpoint_dir(spec.hash)).get("universal", False)
    with running_engine(model, spec, ranks, converted) as engine:
        return _Run(spec, store, dataset, engine, report, ranks, note).to_its_end()


class _Run:
    """The state of one attempt between its steps."""

    def __init__(
        self,
        spec: TrialSpec,
        store: Store,
        dataset: Dataset,
        engine: Any,
        report: Report,
        ranks: Ranks,
        note: str | None,
    ) -> None:
        self.spec, self.store, self.dataset, self.engine, self.report = spec, store, dataset, engine, report
        self.ranks, self.note = ranks, note
        self.attempt = store.next_attempt(spec.hash)
        self.started_at = datetime.now(UTC)
        self.clock = time.monotonic()
        known = frequency_loss(dataset, spec.seq_len, spec.validation["windows"])
        self.rule = DivergenceRule(spec.divergence, spec.vocab_size, spec.steps, known)
        self.step = 0  # steps done
        self.train_s = 0.0  # seconds inside training steps, over all attempts
        self.earlier_s = 0.0  # wall seconds of earlier attempts, up to the checkpoint
        self.skipped_in_a_row = 0
        self.longest_skip = 0  # the most steps skipped in a row since the last report
        self.last_val_loss: float | None = None
        self.parts = 0
        self.rows: list[tuple[int, str, float]] = []
        self.windows = dataset.validation_windows(spec.seq_len, spec.validation["windows"])
        self.eval_steps = {
            round(spec.steps * k / spec.validation["times"]) for k in range(1, spec.validation["times"] + 1)
        }
        self.folder = store.checkpoint_dir(spec.hash)
        checkpoint.load(engine, self.folder, self._restore, ranks)

    def to_its_end(self) -> dict[str, Any]:
        reason = None
        saved_at = time.monotonic()
        while self.step < self.spec.steps and reason is None:
            reason = self._interval()
            due = reason is None and time.monotonic() - saved_at > self.spec.checkpoint_every_s
            # One decision for all: the clocks of the ranks differ, and so could the last bits of what they saw.
            reason, due = self.ranks.agreed((reason, due))
            if due:
                self._checkpoint()
                saved_at = time.monotonic()
        self._flush()
        row = self._trial_row("finished" if reason is None else "diverged", reason)
        if self.ranks.first:
            self.store.write_trial(row)
            if self.attempt > 0 or self.parts > 1:
                self.store.compact(self.spec.hash)
            checkpoint.delete(self.folder)
            self.report({"step": self.step, "status": row["status"]})
        return row

    def _interval(self) -> str | None:
        """Steps up to the next report or validation; the reason to stop, or None."""
        losses: list[torch.Tensor] = []
        norms: list[float] = []
        began = time.perf_counter()
        first = self.step
        while True:
            loss, norm = self._train_step()
            losses.append(loss)
            norms.append(norm)
            self.step += 1
            if self.step % self.spec.log_every == 0 or self.step in self.eval_steps or self.step == self.spec.steps:
                break
        values = (self.ranks.total(torch.stack(losses)) / self.ranks.world).tolist()
        self.train_s += time.perf_counter() - began
        for offset, (loss_value, norm) in enumerate(zip(values, norms, strict=True)):
            done = first + offset + 1
            self.rows += [
                (done, "train_loss", loss_value),
                (done, "grad_norm", norm),
                (done, "lr", self._lr(done - 1)),
            ]
        mean, worst = sum(values) / len(values), max(norms, key=lambda x: math.inf if math.isnan(x) else x)
        reason = self.rule.report(self.step, mean, worst, self.longest_skip)
        self.longest_skip = self.skipped_in_a_row
        if reason is None and self.step in self.eval_steps:
            self.last_val_loss = self._validate()
            self.rows.append((self.step, "val_loss", self.last_val_loss))
            self.report({"step": self.step, "val_loss": self.last_val_loss, "train_loss": mean})
            reason = self.rule.validated(self.step, self.last_val_loss)
        return reason

    def _train_step(self) -> tuple[torch.Tensor, float]:
        """One optimiser step over all its micro-batches: (mean loss, gradient norm before clipping)."""
        engine, lr = self.engine, self._lr(self.step)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        skipped = engine.skipped_steps
        losses: list[torch.Tensor] = []
        *earlier, last = self._micro_batches()
        for inputs, targets in earlier:
            self._forward_backward(inputs, targets, losses)
            engine.step()  # only counts the micro-batch
        self._forward_backward(*last, losses)
        norm = final_step(engine)
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if engine.skipped_steps > skipped else 0
        self.longest_skip = max(self.longest_skip, self.skipped_in_a_row)
        return torch.stack(losses).mean(), norm

    def _forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor, losses: list[torch.Tensor]) -> None:
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        losses.append(loss.detach())

    def _micro_batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        spec = self.spec
        inputs, targets = self.dataset.train_batch(
            self.step,
            seq_len=spec.seq_len,
            batch_seqs=spec.batch_tokens // spec.seq_len,
            seed=spec.seed,
            rank=self.ranks.rank,
            world=self.ranks.world,
        )
        for k in range(0, len(inputs), spec.micro_batch_seqs):
            chunk = slice(k, k + spec.micro_batch_seqs)
            yield self._tensor(inputs[chunk]), self._tensor(targets[chunk])

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.engine.device)

    def _lr(self, step: int) -> float:
        return lr_at(step, self.spec.steps, self.spec.lr, **self.spec.schedule)

    @torch.no_grad()
    def _validate(self) -> float:
        """Nats per token over the fixed validation windows, which the ranks share out by micro-batch.

        Added up in one order, so that the number does not depend on how many ranks there are.
        """
        inputs, targets = self.windows
        size, ranks = self.spec.micro_batch_seqs, self.ranks
        starts = range(0, len(inputs), size)
        sums = torch.zeros(len(starts), dtype=torch.float64, device=self.engine.device)
        self.engine.eval()
        for first in range(0, len(starts), ranks.world):
            k = first + ranks.rank
            # ZeRO 3 gathers weights in each pass: a rank with nothing left passes too, and its loss is not counted.
            chunk = slice(starts[min(k, len(starts) - 1)], starts[min(k, len(starts) - 1)] + size)
            loss = self.engine(self._tensor(inputs[chunk]), self._tensor(targets[chunk]))
            if k < len(starts):
                sums[k] = float(loss) * targets[chunk].size
        self.engine.train()
        return sum(ranks.total(sums).tolist()) / float(targets.size)

    def _flush(self) -> None:
        if self.rows and self.ranks.first:
            spec = self.spec
            self.store.write_steps(spec.experiment, spec.topology, spec.hash, self.attempt, self.parts, self.rows)
            self.parts += 1
        self.rows = []

    def _checkpoint(self) -> None:
        """Rows first: what a checkpoint has behind it is in the store, what follows it will be computed again."""
        self._flush()
        state = {
            "depthlaw": {
                "step": self.step,
                "rule": self.rule.state(),
                "train_s": self.train_s,
                "wall_s": self._wall_s(),
                "skipped_in_a_row": self.skipped_in_a_row,
                "last_val_loss": self.last_val_loss,
            }
        }
        checkpoint.save(self.engine, self.folder, self.step, state, self.ranks)

    def _restore(self, state: dict[str, Any]) -> None:
        kept = state["depthlaw"]
        self.step, self.train_s, self.earlier_s = kept["step"], kept["train_s"], kept["wall_s"]
        self.skipped_in_a_row = self.longest_skip = kept["skipped_in_a_row"]
        self.last_val_loss = kept["last_val_loss"]
        self.rule.restore(kept["rule"])

    def _wall_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.clock

    def _trial_row(self, status: str, reason: str | None) -> dict[str, Any]:
        spec, val_loss = self.spec, self.last_val_loss if status == "finished" else None
        targets = self.windows[1]
        bits_per_byte = None
        if val_loss is not None:
            bits_per_byte = val_loss * targets.size / math.log(2) / self.dataset.target_bytes(targets)
        return trial_row(
            spec,
            self.attempt,
            status,
            "; ".join(text for text in (reason, self.note) if text) or None,
            tokens_done=self.step * spec.batch_tokens,
            steps_done=self.step,
            wall_s=self._wall_s(),
            train_s=self.train_s,
            peak_memory_bytes=_peak_memory_bytes(),
            val_loss=val_loss,
            bits_per_byte=bits_per_byte,
            last_val_loss=self.last_val_loss,
            val_tokens=int(targets.size),
            epochs=self.dataset.epochs(spec.tokens, spec.seq_len),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            started_at=self.started_at,
        )


def trial_row(spec: TrialSpec, attempt: int, status: str, reason: str | None, **measured: Any) -> dict[str, Any]:
    """The row of one attempt; what was not measured stays null."""
    costs = spec.costs
    return {
        "trial": spec.hash,
        "attempt": attempt,
        "recipe_hash": spec.recipe_hash,
        "experiment": spec.experiment,
        "topology": spec.topology,
        **spec.shape.__dict__,
        "seq_len": spec.seq_len,
        "lr": spec.lr,
        "tokens": spec.tokens,
        "tokens_per_param": spec.tokens / costs.params,
        "seed": spec.seed,
        "batch_tokens": spec.batch_tokens,
        "steps": spec.steps,
        "backbone_params": int(costs.backbone_params),
        "embedding_params": int(spec.shape.embedding_params),
        "params": int(costs.params),
        "train_flops": float(spec.train_flops),
        "status": status,
        "reason": reason,
        "data_fingerprint": spec.data_fingerprint,
        "code_commit": code_commit(),
        "numerics_version": str(NUMERICS_VERSION),
        "versions": json.dumps(_versions()),
        "spec": json.dumps(spec.to_dict()),
        "ended_at": datetime.now(UTC),
        **measured,
    }


def _peak_memory_bytes() -> int:
    """Of the device; on a CPU the high-water mark of the process, which earlier trials in it may have set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib * (1 if sys.platform == "darwin" else 1024)


@cache
def _versions() -> dict[str, str]:
    import depthlaw

    found = {name: version(name) for name in ("torch", "deepspeed", "ray", "numpy")}
    return {"python": sys.version.split()[0], "depthlaw": depthlaw.__version__, **found}


@cache
def code_commit() -> str | None:
    """The commit that the code runs from, `+` behind it where the checkout differs; None outside a checkout.

    A sweep tells the nodes to which it ships the code.
    """
    if COMMIT in os.environ:
        return os.environ[COMMIT] or None
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
