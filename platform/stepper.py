"""What a trial does with its engine: one optimiser step at a time, and a validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from depthlaw.platform.dataset import Dataset
from depthlaw.platform.engine import final_step
from depthlaw.platform.layer_stats import Stats, norms, over_ranks, watched_forward
from depthlaw.platform.plan import TrialSpec
from depthlaw.platform.ranks import Ranks
from depthlaw.platform.schedules import rate


class Stepper:
    """The engine of one trial with this rank's part of its text. What it keeps between steps is only for looking at."""

    def __init__(self, engine: Any, spec: TrialSpec, dataset: Dataset, ranks: Ranks) -> None:
        self.engine, self.spec, self.dataset, self.ranks = engine, spec, dataset, ranks
        self.layer_stats: Stats = []  # of the last step, where the trial asks for them there
        self.windows = dataset.validation_windows(spec.seq_len, spec.validation["windows"])

    def train(self, step: int) -> tuple[torch.Tensor, float, bool]:
        """Step 0 .. steps - 1 over this rank's micro-batches: their mean loss, and two things that are of all ranks.

        These are the gradient norm before clipping and whether the step was skipped.
        """
        engine, lr = self.engine, rate(self.spec, step)
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        skipped = engine.skipped_steps
        losses: list[torch.Tensor] = []
        *earlier, last = self._micro_batches(step)
        for inputs, targets in earlier:
            losses.append(self._backward(engine(inputs, targets)))
            engine.step()  # only counts the micro-batch
        if self.spec.layer_stats_every and (step + 1) % self.spec.layer_stats_every == 0:
            with watched_forward(engine.module) as seen:
                loss = engine(*last)
            losses.append(self._backward(loss))  # outside: it may go through blocks again
            seen = over_ranks(seen, self.ranks, engine.device)
            self.layer_stats = seen + norms(engine.module, self.spec.zero_stage)
        else:
            losses.append(self._backward(engine(*last)))
            self.layer_stats = []
        norm = final_step(engine)
        return torch.stack(losses).mean(), norm, engine.skipped_steps > skipped

    @torch.no_grad()
    def validate(self) -> float:
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

    def mean(self, losses: list[torch.Tensor]) -> list[float]:
        """Of each step the mean over ranks; NaN if it is on any of them."""
        return (self.ranks.total(torch.stack(losses)) / self.ranks.world).tolist()

    def _backward(self, loss: torch.Tensor) -> torch.Tensor:
        self.engine.backward(loss)
        return loss.detach()

    def _micro_batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        spec = self.spec
        inputs, targets = self.dataset.train_batch(
            step,
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
