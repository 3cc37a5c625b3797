"""A finished data build: memory-mapped uint16 tokens in an order that is a pure function of seed, step and rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from depthlaw.platform.data_config import DataError

SCHEMA_VERSION = 1
SPLITS = ("train", "validation")
INDEX = "index.json"
TOKEN_BYTES = "token_bytes.i32"
TOKENIZER = "tokenizer.json"

# Multipliers of splitmix64, as in every implementation of it.
_MIX_A, _MIX_B = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ROUNDS = 6


class Dataset:
    """Tokens of one build. Windows of a split are `seq_len` apart and `seq_len + 1` long: each target occurs once."""

    def __init__(self, path: Path) -> None:
        """Open the build at `path`. Raises DataError when a file is missing, or not as long as the index says."""
        self.path = Path(path)
        again = f"delete {self.path} and build the data again"
        try:
            self.index: dict[str, Any] = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
            sizes = {name: (self.path / name).stat().st_size for name in self.index["files"]}
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"data build {self.path} is damaged ({type(error).__name__}: {error}); {again}") from None
        if self.index["schema_version"] != SCHEMA_VERSION:
            found = self.index["schema_version"]
            raise DataError(f"data build {self.path} has schema_version {found}, not {SCHEMA_VERSION}; {again}")
        for name, size in sizes.items():
            if size != self.index["files"][name]:
                raise DataError(
                    f"data build {self.path} is damaged: {name} has {size} bytes, the index says "
                    f"{self.index['files'][name]}; {again}"
                )
        self.fingerprint: str = self.index["fingerprint"]
        self.vocab_size: int = self.index["tokenizer"]["vocab_size"]
        self.token_bytes = np.fromfile(self.path / TOKEN_BYTES, "<i4")
        # Plain arrays over the mapped file: np.memmap's own type would stick to every batch.
        self._tokens = {
            split: np.memmap(self.path / f"{split}.u16", "<u2", mode="r").view(np.ndarray) for split in SPLITS
        }

    def __reduce__(self) -> tuple[type[Dataset], tuple[Path]]:
        return Dataset, (self.path,)  # a worker opens the files; a pickled memmap would carry every token

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}, {self.n_tokens('train')} training tokens, vocab_size={self.vocab_size})"

    def tokens(self, split: str) -> np.ndarray:
        """All tokens of "train" or "validation", uint16, mapped from disk."""
        if split not in self._tokens:
            raise DataError(f"split={split!r}: allowed are {', '.join(SPLITS)}")
        return self._tokens[split]

    def n_tokens(self, split: str) -> int:
        """Tokens in the split, separators included."""
        return len(self.tokens(split))

    def n_windows(self, split: str, seq_len: int) -> int:
        """Windows of `seq_len` targets in the split. Raises DataError when there is none."""
        if seq_len < 1:
            raise DataError(f"seq_len={seq_len}: allowed is 1 or more")
        count = (self.n_tokens(split) - 1) // seq_len
        if count < 1:
            raise DataError(
                f"the {split} split has {self.n_tokens(split)} tokens, too few for one window of seq_len={seq_len} "
                f"(needs {seq_len + 1}); use a shorter seq_len or more text"
            )
        return count

    def epochs(self, tokens: int, seq_len: int) -> float:
        """Passes over the training windows that a budget of `tokens` training targets makes."""
        return tokens / (self.n_windows("train", seq_len) * seq_len)

    def train_batch(
        self, step: int, *, seq_len: int, batch_seqs: int, seed: int, rank: int = 0, world: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of one rank, int64 (batch_seqs / world, seq_len), for 0-based `step`.

        The global batch is the same at any world size; ranks hold consecutive parts of it. An epoch takes each window
        once, in an order drawn from (seed, epoch), and may end inside a batch. Nothing is remembered between calls.
        """
        if step < 0 or batch_seqs < 1 or world < 1 or batch_seqs % world or not 0 <= rank < world:
            raise DataError(
                f"step={step}, batch_seqs={batch_seqs}, rank={rank}, world={world}: allowed are step >= 0, batch_seqs "
                "a positive multiple of world, 0 <= rank < world"
            )
        count = self.n_windows("train", seq_len)
        share = batch_seqs // world
        places = step * batch_seqs + rank * share + np.arange(share, dtype=np.int64)
        epochs = places // count
        windows = np.empty(share, np.int64)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            windows[mine] = permuted(places[mine] % count, count, seed, int(epoch))
        return self._read("train", windows, seq_len)

    def validation_windows(self, seq_len: int, n_windows: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of `n_windows` windows spread evenly over the validation split; all if it has fewer.

        int64 (windows, seq_len), the same at every call.
        """
        if n_windows < 1:
            raise DataError(f"n_windows={n_windows}: allowed is 1 or more")
        count = self.n_windows("validation", seq_len)
        wanted = min(n_windows, count)
        return self._read("validation", np.arange(wanted, dtype=np.int64) * count // wanted, seq_len)

    def target_bytes(self, targets: np.ndarray) -> int:
        """Bytes of UTF-8 text that these target ids stand for; separators count 0. For bits per byte."""
        return int(self.token_bytes[np.asarray(targets)].sum(dtype=np.int64))

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of this build."""
        from depthlaw.platform.vocabulary import load_tokenizer

        return load_tokenizer(self.path / TOKENIZER)

    def _read(self, split: str, windows: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        places = windows[:, None] * seq_len + np.arange(seq_len + 1)
        read = self._tokens[split][places].astype(np.int64)
        return read[:, :-1], read[:, 1:]


def permuted(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(count) sends `places`: O(1) each, no state, no library's generator.

    A Feistel network permutes the next power of four; places that leave range(count) walk on until they are back.
    """
    bits = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(bits)
    rounds = np.arange(_ROUNDS, dtype=np.uint64) << np.uint64(32)
    keys = _mix(_mix(_mix(np.uint64(seed % 2**64)) ^ np.uint64(epoch)) ^ rounds)  # (0, 1) is not (1, 0)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        moving = values[outside]
        left, right = moving >> shift, moving & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = (left << shift) | right
        outside[outside] = values[outside] >= count
    return values.astype(np.int64)


def _mix(values: Any) -> Any:
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * _MIX_A
        values = (values ^ (values >> np.uint64(27))) * _MIX_B
        return values ^ (values >> np.uint64(31))
