import random

import numpy as np
import pytest

from depthlaw.platform import corpus, vocabulary


@pytest.fixture(scope="module")
def texts():
    return [document.text for document in corpus.pydoc_documents()]


@pytest.fixture(scope="module")
def tokenizer(texts):
    return vocabulary.train_bpe(texts, 600)


PIECES = [
    *"aZ09_'.,-()<>= \n\t",
    *("'s", "'ll", "'sam", "don't", "  ", "    ", "\n\n", "\r\n", "<|endoftext|>"),
    *("\x00", "\x0b", "\x1c", "\x7f", "\x85", "\u00a0", "\u2003", "\u2028", "\u200b", "\ufeff"),
    *("é", "naïve", "²", "½", "—", "“q”", "語", "e\u0301", "🙂", "x³y", "٣"),
]


def test_words_looked_up_give_the_librarys_tokens_on_any_text(tokenizer):
    generator = random.Random(0)
    fuzz = ["".join(generator.choices(PIECES, k=generator.randint(0, 12))) for _ in range(6000)]
    encoder = vocabulary.Encoder(tokenizer)
    fast = encoder.encode(fuzz)
    plain = [np.array([*tokenizer.encode(text, add_special_tokens=False).ids, 0]) for text in fuzz]
    assert np.array_equal(fast, np.concatenate(plain))


def test_words_looked_up_give_the_librarys_tokens_across_batches(tokenizer, texts):
    encoder = vocabulary.Encoder(tokenizer)
    fast = np.concatenate([encoder.encode(texts[i : i + 7]) for i in range(0, len(texts), 7)])
    assert np.array_equal(fast, vocabulary.Encoder(tokenizer, by_word=False).encode(texts))


def test_a_full_word_table_starts_again(tokenizer, texts, monkeypatch):
    whole = vocabulary.Encoder(tokenizer).encode(texts)
    monkeypatch.setattr(vocabulary, "_CACHED_WORDS", 50)
    encoder = vocabulary.Encoder(tokenizer)
    assert np.array_equal(np.concatenate([encoder.encode([text]) for text in texts]), whole)


def test_every_document_ends_with_one_separator_and_a_literal_one_is_text(tokenizer):
    ids = vocabulary.Encoder(tokenizer).encode(["a<|endoftext|>b", "", "c"])
    assert (ids == vocabulary.EOS_ID).sum() == 3
    assert tokenizer.decode(ids[: np.flatnonzero(ids == 0)[0]].tolist()) == "a<|endoftext|>b"


@pytest.mark.parametrize("text", ["plain", "naïve — 語🙂 \x00\x1c\u00a0", "def f():\n    return '\\t'\n", "\r\n\t "])
def test_decoding_gives_the_text_back_and_token_bytes_its_length(tokenizer, text):
    ids = vocabulary.Encoder(tokenizer).encode([text])
    assert tokenizer.decode(ids[:-1].tolist()) == text
    assert vocabulary.token_bytes(tokenizer.to_str(), 600)[ids].sum() == len(text.encode())


def test_training_is_deterministic_and_independent_of_threads(texts, monkeypatch, tokenizer):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert vocabulary.train_bpe(texts, 600).to_str() == tokenizer.to_str()


def test_smallest_vocabulary_is_bytes_and_separator(texts):
    tokenizer = vocabulary.train_bpe(texts, 257)
    text = "any bytes: ÿ\x00"
    assert tokenizer.get_vocab_size() == 257
    assert len(vocabulary.Encoder(tokenizer).encode([text])) == len(text.encode()) + 1
