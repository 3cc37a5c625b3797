import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from depthlaw.platform import baselines as module
from depthlaw.platform.baselines import baselines


class Tiny:
    """What `baselines` needs of a dataset, with tokens from a generator."""

    vocab_size = 40

    def __init__(self, seed, n_train=700):
        generator = np.random.default_rng(seed)
        self.train = generator.zipf(1.5, n_train).clip(1, 35).astype(np.uint16)
        self.held = generator.zipf(1.5, 131).clip(1, 39).astype(np.int64)

    def tokens(self, split):
        assert split == "train"
        return self.train

    def validation_windows(self, seq_len, n_windows):
        rows = self.held[: n_windows * seq_len].reshape(n_windows, seq_len)
        return rows, self.held[1 : n_windows * seq_len + 1].reshape(n_windows, seq_len)


def _by_hand(data, seq_len, n_windows):
    inputs, targets = data.validation_windows(seq_len, n_windows)
    train = data.train.tolist()
    count, pairs = Counter(train), Counter(pairwise(train))
    loss = 0.0
    for a, b in zip(inputs.ravel().tolist(), targets.ravel().tolist(), strict=True):
        followers = {y for x, y in pairs if x == a}
        unigram = (count[b] + 1) / (len(train) + data.vocab_size)
        seen = sum(n for (x, _), n in pairs.items() if x == a)
        p = (pairs[a, b] + len(followers) * unigram) / (seen + len(followers)) if seen else unigram
        loss -= math.log(p)
    own = Counter(targets.ravel().tolist())
    entropy = -sum(n / targets.size * math.log(n / targets.size) for n in own.values())
    return {"uniform": math.log(data.vocab_size), "unigram": entropy, "bigram": loss / targets.size}


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_baselines_are_those_counted_by_hand(monkeypatch, dense, seed):
    monkeypatch.setattr(module, "_CHUNK", 97)  # several chunks, the last one short
    monkeypatch.setattr(module, "_DENSE_VOCAB", 4096 if dense else 0)
    data = Tiny(seed)
    assert baselines(data, 10, 13) == pytest.approx(_by_hand(data, 10, 13))


@pytest.mark.parametrize("chunk", [100, 350, 349, 700])
def test_a_chunk_that_ends_with_the_tokens_loses_no_pair(monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    data = Tiny(2)
    assert baselines(data, 13, 10) == pytest.approx(_by_hand(data, 13, 10))


def test_bigram_probabilities_add_up_to_one():
    data = Tiny(3)
    data.held = np.arange(0)
    for before in (1, 2, 34, 39):  # the last one never occurs in training
        total = 0.0
        for after in range(data.vocab_size):
            data.validation_windows = lambda *_, b=before, a=after: (np.array([[b]]), np.array([[a]]))
            total += math.exp(-baselines(data, 1, 1)["bigram"])
        assert total == pytest.approx(1.0)


def test_on_real_text_context_beats_frequencies_and_frequencies_beat_uniform(tmp_path):
    from depthlaw.platform.data_build import build
    from depthlaw.platform.data_config import DataConfig

    found = baselines(build(DataConfig(source="pydoc", vocab_size=512), tmp_path), 64, 50)
    assert found["bigram"] < found["unigram"] < found["uniform"] == math.log(512)
