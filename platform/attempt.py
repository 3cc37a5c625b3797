"""One attempt at a trial, step by step: what is measured, reported, validated and kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from depthlaw.platform import checkpoint
from depthlaw.platform.baselines import frequency_loss
from depthlaw.platform.cadence import Cadence
from depthlaw.platform.dataset import Dataset
from depthlaw.platform.export import export_trial
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.ranks import Ranks
from depthlaw.platform.schedules import branch_step, rate
from depthlaw.platform.stepper import Stepper
from depthlaw.platform.stopping import DivergenceRule
from depthlaw.platform.store import Store
from depthlaw.platform.store_lease import Lease
from depthlaw.platform.trial_row import peak_memory_bytes, trial_row
from depthlaw.platform.trunk import Trunk

Report = Callable[[dict[str, Any]], None]
Watch = Callable[[int, Mapping[str, float]], None]  # (step, values by name), for people who look on
Judge = Callable[[int, float], str | None]  # (step, validation loss) -> why the trial is pruned there, or None


class StepRecord(NamedTuple):
    """What is known of one step: mean loss in nats, gradient norm before clipping, steps skipped in a row up to it."""

    loss: float
    grad_norm: float
    skipped_in_a_row: int


class Lead(NamedTuple):
    """What the first rank of a trial alone has: who listens, who decides, and the right to write."""

    report: Report = lambda metrics: None
    judge: Judge = lambda step, val_loss: None
    watch: Watch = lambda step, values: None
    trunk: Trunk | None = None
    keep: bool = False
    lease: Lease | None = None
    note: str | None = None  # goes into the row's reason


def eval_steps(spec: TrialSpec) -> set[int]:
    """Steps done when the trial is validated: evenly spaced, the last at its end."""
    times = spec.validation["times"]
    return {round(spec.steps * k / times) for k in range(1, times + 1)}


class Attempt:
    """What is known between its steps, the same on all ranks but for what the first alone decides."""

    def __init__(self, spec: TrialSpec, store: Store, dataset: Dataset, engine: Any, ranks: Ranks, lead: Lead) -> None:
        self.spec, self.store, self.dataset, self.engine, self.ranks = spec, store, dataset, engine, ranks
        self.report, self.judge, self.watch, self.lease = lead.report, lead.judge, lead.watch, lead.lease
        self.note, self.attempt = lead.note, lead.lease.attempt if lead.lease else 0
        trunk, self.keep = ranks.agreed((lead.trunk, lead.keep))
        self.trunk: Trunk | None = trunk
        self.started_at = datetime.now(UTC)
        self.clock = time.monotonic()
        self.cadence = Cadence(spec.checkpoint_every_s)
        known = frequency_loss(dataset, spec.seq_len, spec.validation["windows"])
        self.rule = DivergenceRule(spec.divergence, spec.vocab_size, spec.steps, known)
        self.step = 0  # steps done
        self.inherited = 0  # the first so many of them were another trial's
        self.train_s = 0.0  # seconds inside training steps, over all attempts
        self.earlier_s = 0.0  # wall seconds of earlier attempts, up to the checkpoint
        self.skipped_in_a_row = 0
        self.unreported: list[StepRecord] = []  # steps since the last report
        self.history: list[StepRecord] = []  # all steps, where a later trial needs them
        self.noted: list[tuple[int, str, float]] = []  # and so are these rows
        self.val_losses: dict[int, float] = {}  # by step
        self.ended: tuple[str, str] | None = None  # status and reason of a trial that stops before its last step
        self.rows: list[tuple[int, str, float]] = []
        self.stepper = Stepper(engine, spec, dataset, ranks)
        self.eval_steps = eval_steps(spec)
        self.branch = branch_step(spec) if trunk else None
        # Where a later trial of the trunk is validated, this one must be: the later one does not train these steps.
        self.also_eval = {step for one in (trunk.later if trunk else ()) for step in eval_steps(one)}
        self.folder = store.checkpoint_dir(spec.hash)
        checkpoint.load(engine, self.folder, self._restore, ranks)
        if trunk and self.step == 0:
            checkpoint.load(engine, trunk.folder, self._inherit, ranks)
        self.ended = ranks.agreed(self.ended)

    def to_its_end(self) -> dict[str, Any]:
        while self.step < self.spec.steps and self.ended is None:
            self._interval()
            # One decision for all: only the first prunes, clocks differ, and so could the last bits of what is seen.
            self.ended, due = self.ranks.agreed((self.ended, self.cadence.due()))
            if self.ended is not None:
                break
            if self.trunk and self.trunk.later and self.step == self.branch:
                checkpoint.save(self.engine, self.trunk.folder, self.step, self._state(), self.ranks)
            if due:
                self._checkpoint()
        self._flush()
        if self.keep and self.ended is None:  # before the row: a trial that has one is not run again
            export_trial(self.engine.module, self.spec, self.dataset, self.store, self.ranks.first)
        row = self._trial_row()
        if self.lease:
            self.lease.confirm()
            self.store.write_trial(row)
            if self.attempt > 0 or self.lease.parts > 1:
                self.store.compact(self.spec.hash)
            checkpoint.delete(self.folder)
            self.report({"step": self.step, "status": row["status"]})
        return row

    def _interval(self) -> None:
        """Steps up to the next that is more than a step, and what happens there."""
        if self.lease:
            self.lease.check()
        losses: list[torch.Tensor] = []
        others: list[tuple[float, int]] = []
        began = time.perf_counter()
        first = self.step
        while True:
            loss, norm, skipped = self.stepper.train(self.step)
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
            losses.append(loss)
            others.append((norm, self.skipped_in_a_row))
            self.step += 1
            if self.stepper.layer_stats:
                self._note((self.step, name, value) for name, value in self.stepper.layer_stats)
                self.watch(self.step, dict(self.stepper.layer_stats))
            if self._reports_at(self.step) or self._validates_at(self.step) or self.step == self.branch:
                break
        values = self.stepper.mean(losses)
        self.train_s += time.perf_counter() - began
        if self.lease:
            self.lease.progress(self.step, self._wall_s())
        for done, (value, other) in enumerate(zip(values, others, strict=True), first + 1):
            self._record(done, StepRecord(value, *other))
        if self._reports_at(self.step):
            self._report(self.step)
            self.ended = self.ranks.agreed(self.ended)  # all of them validate, or none
        if self.ended is None and self._validates_at(self.step):
            self.val_losses[self.step] = self.stepper.validate()
            self._validated(self.step)

    def _reports_at(self, step: int) -> bool:
        return step % self.spec.log_every == 0 or step in self.eval_steps or step == self.spec.steps

    def _validates_at(self, step: int) -> bool:
        return step in self.eval_steps or (self.branch is not None and step <= self.branch and step in self.also_eval)

    def _note(self, rows: Iterable[tuple[int, str, float]]) -> None:
        """Rows that a later trial of the trunk cannot make from the records of the steps."""
        noted = list(rows)
        self.rows += noted
        if self.trunk and self.trunk.later and self.step <= (self.branch or 0):
            self.noted += noted

    def _record(self, done: int, record: StepRecord) -> None:
        self.unreported.append(record)
        if self.trunk and self.trunk.later and done <= (self.branch or 0):
            self.history.append(record)
        self.rows += [
            (done, "train_loss", record.loss),
            (done, "grad_norm", record.grad_norm),
            (done, "lr", rate(self.spec, done - 1)),
        ]

    def _report(self, step: int) -> None:
        records, self.unreported = self.unreported, []
        self.mean_loss = sum(r.loss for r in records) / len(records)
        worst = max((r.grad_norm for r in records), key=lambda x: math.inf if math.isnan(x) else x)
        lr = rate(self.spec, step - 1)
        self.watch(step, {"train_loss": self.mean_loss, "grad_norm": records[-1].grad_norm, "lr": lr})
        reason = self.rule.report(step, self.mean_loss, worst, max(r.skipped_in_a_row for r in records))
        if reason is not None:
            self.ended = ("diverged", reason)

    def _validated(self, step: int) -> None:
        """What follows from a validation; nothing from one that only a later trial asked for."""
        if step not in self.eval_steps:
            return
        val_loss = self.val_losses[step]
        self.rows.append((step, "val_loss", val_loss))
        self.report({"step": step, "val_loss": val_loss, "train_loss": self.mean_loss})
        self.watch(step, {"val_loss": val_loss})
        if reason := self.rule.validated(step, val_loss):
            self.ended = ("diverged", reason)
        elif step < self.spec.steps and (reason := self.judge(step, val_loss)):
            self.ended = ("pruned", reason)

    def _flush(self) -> None:
        if self.rows and self.lease:
            spec, part = self.spec, self.lease.parts
            self.lease.confirm()
            self.store.write_steps(spec.experiment, spec.topology, spec.hash, self.attempt, part, self.rows)
            self.lease.parts += 1
        self.rows = []

    def _checkpoint(self) -> None:
        """Rows first: what a checkpoint has behind it is in the store, what follows it will be computed again."""
        self.cadence.started()
        self._flush()
        checkpoint.save(self.engine, self.folder, self.step, self._state(), self.ranks)
        self.cadence.ended()

    def _state(self) -> dict[str, Any]:
        return {
            "depthlaw": {
                "trial": self.spec.hash,
                "step": self.step,
                "inherited": self.inherited,
                "rule": self.rule.state(),
                "train_s": self.train_s,
                "wall_s": self._wall_s(),
                "skipped_in_a_row": self.skipped_in_a_row,
                "unreported": [tuple(record) for record in self.unreported],
                "history": [tuple(record) for record in self.history],
                "noted": self.noted,
                "val_losses": self.val_losses,
            }
        }

    def _restore(self, state: dict[str, Any]) -> None:
        kept = state["depthlaw"]
        self.step, self.inherited = kept["step"], kept["inherited"]
        self.train_s, self.earlier_s = kept["train_s"], kept["wall_s"]
        self.skipped_in_a_row, self.val_losses = kept["skipped_in_a_row"], kept["val_losses"]
        self.unreported = [StepRecord(*values) for values in kept["unreported"]]
        self.history = [StepRecord(*values) for values in kept["history"]]
        self.noted = kept["noted"]
        self.rule.restore(kept["rule"])

    def _inherit(self, state: dict[str, Any]) -> None:
        """Goes through what the trunk recorded as if it had been trained here: rows, reports, validations."""
        kept = state["depthlaw"]
        missing = [s for s in self.eval_steps if s <= kept["step"] and s not in kept["val_losses"]]
        if missing or kept["step"] > self.branch:
            raise ValueError(f"the trunk at step {kept['step']} was left for other trials than {self.spec.hash}")
        self.val_losses = kept["val_losses"]
        if kept["trial"] == self.spec.hash:  # its own, from before it was interrupted
            self.inherited, self.train_s, self.earlier_s = kept["inherited"], kept["train_s"], kept["wall_s"]
        else:
            self.inherited = kept["step"]
        self._note(row for row in kept["noted"])
        for record in (StepRecord(*values) for values in kept["history"]):
            self.step += 1
            self.skipped_in_a_row = record.skipped_in_a_row
            self._record(self.step, record)
            if self._reports_at(self.step):
                self._report(self.step)
            if self.ended is None and self.step in self.eval_steps:
                self._validated(self.step)
            if self.ended is not None:
                return

    def _wall_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.clock

    def _trial_row(self) -> dict[str, Any]:
        spec, (status, reason) = self.spec, self.ended or ("finished", None)
        last_val_loss = self.val_losses[max(own)] if (own := self.val_losses.keys() & self.eval_steps) else None
        val_loss = last_val_loss if status == "finished" else None
        _, targets = self.stepper.windows
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
            train_flops=float(spec.flops_of(spec.steps - self.inherited)),
            wall_s=self._wall_s(),
            train_s=self.train_s,
            peak_memory_bytes=peak_memory_bytes(),
            val_loss=val_loss,
            bits_per_byte=bits_per_byte,
            last_val_loss=last_val_loss,
            val_tokens=int(targets.size),
            epochs=self.dataset.epochs(spec.tokens, spec.seq_len),
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            started_at=self.started_at,
        )
