"""Losses that a model must beat before it counts as having learnt: uniform, unigram and bigram, in nats per token."""

from __future__ import annotations

import math

import numpy as np

from depthlaw.platform.dataset import Dataset

_CHUNK = 4_000_000  # tokens a pass: bounds memory
_DENSE_VOCAB = 4096  # up to here a table of all pairs is small (128 MB)


def baselines(dataset: Dataset, seq_len: int, n_windows: int) -> dict[str, float]:
    """Nats per token on `dataset.validation_windows(seq_len, n_windows)`.

    "uniform" is ln(vocab_size). "unigram" is the entropy of these targets under their own frequencies: no model
    without context does better. "bigram" is fitted on all training tokens with Witten-Bell interpolation,
    p(b|a) = (c(a,b) + T(a) u(b)) / (c(a) + T(a)), where c counts, T(a) is the number of different followers of a, and
    u(b) = (c(b) + 1) / (c + vocab_size); nothing is tuned, and every pair has a probability above 0.
    """
    vocab = dataset.vocab_size
    inputs, targets = dataset.validation_windows(seq_len, n_windows)
    before, after = inputs.ravel(), targets.ravel()
    shares = np.bincount(after, minlength=vocab) / after.size
    shares = shares[shares > 0]
    pair_counts, follower_kinds, prefix_counts, counts = _training_counts(dataset, before * vocab + after)
    unigram = (counts[after] + 1.0) / (counts.sum() + vocab)
    kinds = follower_kinds[before]
    weight = prefix_counts[before] + kinds
    # A token that training never saw before another (weight 0) has no followers to go by: the unigram alone.
    bigram = np.where(weight > 0, (pair_counts + kinds * unigram) / np.maximum(weight, 1), unigram)
    return {
        "uniform": math.log(vocab),
        "unigram": float(-(shares * np.log(shares)).sum()),
        "bigram": float(-np.log(bigram).mean()),
    }


def frequency_loss(dataset: Dataset, seq_len: int, n_windows: int) -> float:
    """Nats per token, on the validation windows, of a model that knows only how frequent each training token is.

    Frequencies from the first million training tokens at most, each counted once more than it occurs.
    """
    _, targets = dataset.validation_windows(seq_len, n_windows)
    counts = np.bincount(dataset.tokens("train")[:1_000_000], minlength=dataset.vocab_size) + 1.0
    return float(-np.log(counts / counts.sum())[targets].mean())


def _training_counts(dataset: Dataset, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Counts of the `wanted` pairs (a * vocab + b), of a's followers' kinds, of a as a prefix, and of each token."""
    vocab = dataset.vocab_size
    tokens = dataset.tokens("train")
    counts = np.zeros(vocab, np.int64)
    prefix_counts = np.zeros(vocab, np.int64)
    dense = vocab <= _DENSE_VOCAB
    table = np.zeros(vocab * vocab if dense else 0, np.int64)
    parts = []
    for start in range(0, max(len(tokens), 1), _CHUNK):
        chunk = tokens[start : start + _CHUNK + 1].astype(np.int64)  # one more: the pair across the border
        counts += np.bincount(chunk[:_CHUNK], minlength=vocab)
        prefix_counts += np.bincount(chunk[:-1], minlength=vocab)
        pairs = chunk[:-1] * vocab + chunk[1:]
        if dense:
            table += np.bincount(pairs, minlength=vocab * vocab)
        else:
            parts.append(np.unique(pairs, return_counts=True))
    if dense:
        return table[wanted], (table.reshape(vocab, vocab) > 0).sum(axis=1), prefix_counts, counts
    keys, where = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    totals = np.bincount(where, weights=np.concatenate([part[1] for part in parts]))
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found = np.where(keys[places] == wanted, totals[places], 0.0)
    return found, np.bincount(keys // vocab, minlength=vocab), prefix_counts, counts
