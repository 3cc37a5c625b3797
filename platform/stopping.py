"""When a run has diverged. A diverged run is a censored observation: it is stopped, kept, and its reason is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class DivergenceRule:
    """Watches one run, report by report. A pure function of what it is shown, so a resumed run decides alike.

    >>> rule = DivergenceRule({"factor": 1.3, "patience": 2, "skipped": 5, "learnt_by": 0.5}, vocab_size=512, steps=100)
    >>> [rule.report(step, loss, 1.0, 0) for step, loss in [(10, 5.0), (20, 7.0), (30, 7.1)]]
    [None, None, 'loss 7.1 was above 1.3 x its lowest so far, 5, for 2 reports in a row, at step 30']
    """

    def __init__(self, rule: Mapping[str, Any], vocab_size: int, steps: int, frequency_loss: float = math.inf) -> None:
        """`frequency_loss`: validation loss of knowing only the frequencies of tokens, in nats."""
        self.rule = rule
        self.frequency_loss = frequency_loss
        self.validations: list[tuple[int, float]] = []
        self.uniform = math.log(vocab_size)
        self.steps = steps
        self.lowest = self.uniform  # what a model scores before it has seen anything
        self.above = 0

    def report(self, step: int, loss: float, grad_norm: float, skipped_in_a_row: int) -> str | None:
        """The reason to stop, or None. `loss` is the mean over the steps since the last report, in nats."""
        if not math.isfinite(loss):
            return f"loss {loss} is not finite, at step {step}"
        if not math.isfinite(grad_norm):
            return f"gradient norm {grad_norm} is not finite, at step {step}"
        if skipped_in_a_row >= self.rule["skipped"]:
            return f"the engine skipped {skipped_in_a_row} steps in a row, at step {step}"
        factor, patience = self.rule["factor"], self.rule["patience"]
        self.above = self.above + 1 if loss > factor * self.lowest else 0
        if self.above >= patience:
            return (
                f"loss {loss:.4g} was above {factor:g} x its lowest so far, {self.lowest:.4g}, "
                f"for {patience} reports in a row, at step {step}"
            )
        self.lowest = min(self.lowest, loss)
        if step >= self.rule["learnt_by"] * self.steps and self.lowest >= self.uniform:
            return f"never learnt: no report below ln(vocabulary) = {self.uniform:.4g} by step {step} of {self.steps}"
        return None

    def validated(self, step: int, val_loss: float) -> str | None:
        """The reason to stop at a validation, or None: a loss that is not finite, or a run that is stuck.

        Stuck is to end within 2 % of the frequencies of tokens and not 1 % below the loss at half as many steps. Runs
        at far too high a rate often stay finite there: they have forgotten all but how frequent each token is. A
        short run that still learns is not stuck; and none is judged before its end, for deep narrow models can stay on
        this plateau for half of their steps and then leave it.
        """
        if not math.isfinite(val_loss):
            return f"validation loss {val_loss} is not finite, at step {step}"
        before = min((loss for at, loss in self.validations if 2 * at <= step), default=math.inf)
        self.validations.append((step, val_loss))
        if step == self.steps and val_loss >= 0.98 * self.frequency_loss and val_loss > 0.99 * before:
            return (
                f"never learnt: validation loss {val_loss:.4g} stays at what the frequencies of tokens alone give, "
                f"{self.frequency_loss:.4g}, at step {step} of {self.steps}"
            )
        return None

    def state(self) -> dict[str, Any]:
        return {"lowest": self.lowest, "above": self.above, "validations": self.validations}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.lowest, self.above = float(state["lowest"]), int(state["above"])
        self.validations = [(int(step), float(loss)) for step, loss in state["validations"]]
