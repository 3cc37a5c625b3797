"""Teacher-forced negative log-likelihood of completions: texts to token ids, ids to batches, batches to nats.

**Ids.** Start of text (the separator the model was trained with), context, completion. The two texts are encoded as
one, as training text is; the completion's ids are those behind the ids of the context alone. A tokenizer that would
join characters of both into one token (Llama 3 does, a quote and the line end behind it) gets them one by one instead.

**Windows.** What fits into the model's `seq_len` is one window. Of a longer text, only the completion is kept whole:
it is cut into pieces of half a window, each scored behind the tokens before it that fit. Every token is scored once,
with at least half a window of text before it, or all there is.

**Batches.** Windows of like length together, padded on the right: attention is causal, so no padding is ever seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from depthlaw.archs.backbone import Model
from depthlaw.archs.ops import widened
from depthlaw.platform.tasks import Example

HEAD_ROWS = 1024  # tokens whose logits are held at once: 200 MB at a vocabulary of 50 280


class Encoded(NamedTuple):
    """Ids of start, context and completion; the completion's begin at `first`."""

    ids: list[int]
    first: int

    def too_long(self, seq_len: int) -> bool:
        """Whether the model cannot read all of it at once: its inputs are all ids but the last."""
        return len(self.ids) - 1 > seq_len


class Window(NamedTuple):
    """ids[start:stop] of an example, of which the last `scored` are targets."""

    example: int
    start: int
    stop: int
    scored: int


def encode(tokenizer: Any, examples: Sequence[Example], start_id: int) -> list[Encoded]:
    def ids(texts: list[str]) -> list[list[int]]:
        return [item.ids for item in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    found = []
    contexts = ids([one.context for one in examples])
    wholes = ids([one.context + one.completion for one in examples])
    for one, context, whole in zip(examples, contexts, wholes, strict=True):
        if whole[: len(context)] != context:
            whole = context + ids([one.completion])[0]
        found.append(Encoded([start_id, *whole], 1 + len(context)))
    return found


def windows(encoded: Sequence[Encoded], seq_len: int) -> Iterator[Window]:
    for number, one in enumerate(encoded):
        end = len(one.ids)
        step = (seq_len + 1) // 2 if one.too_long(seq_len) else end
        for first in range(one.first, end, step):
            stop = min(first + step, end)
            yield Window(number, max(0, stop - 1 - seq_len), stop, stop - first)


def batches(given: Sequence[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Longest first, so that what does not fit into memory fails at once; at least one window a batch."""
    order = sorted(given, key=lambda w: w.start - w.stop)
    at = 0
    while at < len(order):
        rows = max(1, batch_tokens // (order[at].stop - order[at].start - 1))
        yield order[at : at + rows]
        at += rows


@torch.no_grad()
def nll(
    model: Model,
    encoded: Sequence[Encoded],
    seq_len: int,
    batch_tokens: int,
    progress: Callable[[float], None] = lambda done: None,
) -> np.ndarray:
    """Nats of each example's completion, summed over its tokens: (examples,), fp64 sums of fp32 terms."""
    device = model.head.device
    total = np.zeros(len(encoded))
    cut = list(windows(encoded, seq_len))
    done, whole = 0, sum(w.stop - w.start for w in cut)
    for batch in batches(cut, batch_tokens):
        longest = max(w.stop - w.start for w in batch)
        ids = np.zeros((len(batch), longest), np.int64)
        for row, w in enumerate(batch):
            ids[row, : w.stop - w.start] = encoded[w.example].ids[w.start : w.stop]
        scored = np.array([w.scored for w in batch])
        rows = np.repeat(np.arange(len(batch)), scored)
        columns = np.concatenate([np.arange(w.stop - w.start - w.scored, w.stop - w.start) for w in batch])
        hidden = model.hidden(torch.from_numpy(ids[:, :-1]).to(device))
        # The head, the larger part of a small model's work, sees only what is scored.
        read = hidden[torch.from_numpy(rows).to(device), torch.from_numpy(columns - 1).to(device)]
        targets = torch.from_numpy(ids[rows, columns]).to(device)
        nats = torch.cat(
            [
                F.cross_entropy(widened(F.linear(x, model.head)), t, reduction="none")
                for x, t in zip(read.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True)
            ]
        )
        np.add.at(total, np.array([w.example for w in batch])[rows], nats.double().cpu().numpy())
        done += sum(w.stop - w.start for w in batch)
        progress(done / whole)
    return total


def ratio_error(nats: np.ndarray, tokens: np.ndarray) -> float:
    """Standard error of sum(nats) / sum(tokens) over examples as clusters, NaN for one example.

    Linearised (Cochran, Sampling Techniques, 1977, 6.4): with r the ratio, residuals nats - r tokens, m examples,
    sqrt(m / (m - 1) sum residual^2) / sum(tokens). Tokens of an example go together, so it is larger than one over
    tokens would be.
    """
    m = len(nats)
    if m < 2:
        return float("nan")
    residual = nats - nats.sum() / tokens.sum() * tokens
    return float(np.sqrt(m / (m - 1) * (residual**2).sum()) / tokens.sum())
