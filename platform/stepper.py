"""What a trial does with its engine: one optimiser step at a time, and a validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from depthlaw.platform.dataset import Dataset
from depthlaw.platform.engine import final_step
from depthlaw.platform.layer_stats import Stats, norms, watched_forward
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.schedules import rate


class Stepper:
    """The engine of one trial with its text. What it keeps between steps is only for looking at."""

    def __init__(self, engine: Any, spec: TrialSpec, dataset: Dataset) -> None:
        self.engine, self.spec, self.dataset = engine, spec, dataset
        self.layer_stats: Stats = []  # of the last step, where the trial asks for them there
        self.windows = dataset.validation_windows(spec.seq_len, spec.validation["windows"])

    def train(self, step: int) -> tuple[torch.Tensor, float, bool]:
        """Step 0 .. steps - 1 over all its micro-batches: mean loss, gradient norm before clipping, was it skipped."""
        engine, lr = self.engine, rate(self.spec, step)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        skipped = engine.skipped_steps
        losses: list[torch.Tensor] = []
        *earlier, last = self._micro_batches(step)
        for inputs, targets in earlier:
            losses.append(self._forward_backward(inputs, targets))
            engine.step()  # only counts the micro-batch
        if self.spec.layer_stats_every and (step + 1) % self.spec.layer_stats_every == 0:
            with watched_forward(engine.module) as seen:
                losses.append(self._forward_backward(*last))
            self.layer_stats = seen + norms(engine.module, self.spec.zero_stage)
        else:
            losses.append(self._forward_backward(*last))
            self.layer_stats = []
        norm = final_step(engine)
        return torch.stack(losses).mean(), norm, engine.skipped_steps > skipped

    @torch.no_grad()
    def validate(self) -> float:
        """Nats per token over the fixed validation windows."""
        inputs, targets = self.windows
        total = 0.0
        self.engine.eval()
        for k in range(0, len(inputs), self.spec.micro_batch_seqs):
            chunk = slice(k, k + self.spec.micro_batch_seqs)
            loss = self.engine(self._tensor(inputs[chunk]), self._tensor(targets[chunk]))
            total += float(loss) * targets[chunk].size
        self.engine.train()
        return total / float(targets.size)

    def _forward_backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = self.engine(inputs, targets)
        self.engine.backward(loss)
        return loss.detach()

    def _micro_batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        spec = self.spec
        inputs, targets = self.dataset.train_batch(
            step, seq_len=spec.seq_len, batch_seqs=spec.batch_tokens // spec.seq_len, seed=spec.seed
        )
        for k in range(0, len(inputs), spec.micro_batch_seqs):
            chunk = slice(k, k + spec.micro_batch_seqs)
            yield self._tensor(inputs[chunk]), self._tensor(targets[chunk])

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.engine.device)
