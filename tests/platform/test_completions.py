"""NLL of completions: where the border of the parts is, what a window sees, and that batches change nothing."""

import math

import numpy as np
import pytest
import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology
from depthlaw.platform.completions import Encoded, batches, encode, nll, ratio_error, windows
from depthlaw.platform.tasks import Example
from depthlaw.platform.vocabulary import train_bpe

VOCAB = 300
TOPOLOGIES = ["pre_ln", "hc(streams=2)", "full_attnres", "moda"]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(["the answer is water and the air is not water"] * 20, VOCAB)


def tiny(name="pre_ln"):
    """A model whose every part does something."""
    model = build(Shape(3, 16, 2, 1, 32, VOCAB), topology(name), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.2)
    return model.eval()


def drawn(count, seed, longest=40):
    """Texts of random ids, all lengths; a context may be empty."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        context, completion = rng.integers(0, longest), rng.integers(1, longest)
        found.append(Encoded([0, *rng.integers(0, VOCAB, context + completion).tolist()], 1 + int(context)))
    return found


def alone(model, one, seq_len):
    """Nats of a completion, from the definition: each token from a pass of its own over what its window holds."""
    total, ids = 0.0, one.ids
    piece = len(ids) if len(ids) - 1 <= seq_len else math.ceil(seq_len / 2)
    for k in range(one.first, len(ids)):
        end = min(one.first + (k - one.first) // piece * piece + piece, len(ids))  # of the piece that k is in
        seen = ids[max(0, end - 1 - seq_len) : k]
        with torch.no_grad():
            total -= float(torch.log_softmax(model.logits(torch.tensor([seen]))[0, -1].double(), -1)[ids[k]])
    return total


def test_the_completion_has_the_ids_it_has_within_the_whole_text(bpe):
    [one] = encode(bpe, [Example("Answer: the", " water is")], 7)
    assert one.ids == [7, *bpe.encode("Answer: the water is").ids]
    assert bpe.decode(one.ids[one.first :]) == " water is"
    assert one.first == 1 + len(bpe.encode("Answer: the").ids)


def test_the_end_of_text_within_a_text_is_text(bpe):
    [one] = encode(bpe, [Example("a", " <|endoftext|>")], 0)
    assert 0 not in one.ids[1:]


def test_a_tokenizer_that_would_join_the_parts_gets_them_one_by_one():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    # Punctuation takes the line ends behind it, as in the pre-tokenizer of Llama 3.
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?[^\s\w]+\n*|\s*\w+|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(['doc"""\ndef f', 'doc"""\ndef g'] * 5, trainer)
    assert '"""\n' in [tokenizer.decode([i]) for i in tokenizer.encode('x"""\ndef').ids]
    [one] = encode(tokenizer, [Example('x"""', "\ndef f")], 0)
    assert tokenizer.decode(one.ids[1 : one.first]) == 'x"""'
    assert tokenizer.decode(one.ids[one.first :]) == "\ndef f"


@pytest.mark.parametrize("seq_len", [1, 7, 16, 200])
def test_every_completion_token_is_scored_once_with_half_a_window_before_it(seq_len):
    given = drawn(60, seed=seq_len)
    scored = [np.zeros(len(one.ids), int) for one in given]
    for w in windows(given, seq_len):
        assert 1 <= w.stop - w.start - 1 <= seq_len
        for k in range(w.stop - w.scored, w.stop):
            scored[w.example][k] += 1
            assert k - w.start >= min(k, max(1, seq_len // 2))
    for one, count in zip(given, scored, strict=True):
        assert not count[: one.first].any()
        assert (count[one.first :] == 1).all()


def test_what_fits_is_one_window_and_a_long_context_loses_its_start():
    fits, cut = Encoded(list(range(9)), 5), Encoded(list(range(30)), 27)
    assert list(windows([fits, cut], 8)) == [(0, 0, 9, 4), (1, 21, 30, 3)]
    assert (fits.too_long(8), cut.too_long(8)) == (False, True)


def test_a_batch_holds_as_many_windows_as_its_tokens_allow_and_one_at_least():
    cut = list(windows(drawn(50, seed=3), 64))
    for budget in (1, 100, 1000):
        made = list(batches(cut, budget))
        assert sorted(w for batch in made for w in batch) == sorted(cut)
        for batch in made:
            assert len(batch) == 1 or len(batch) * max(w.stop - w.start - 1 for w in batch) <= budget
    assert len(list(batches(cut, 10**9))) == 1


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("seq_len", [16, 128])
def test_any_batch_gives_what_each_token_alone_gives(name, seq_len):
    model, given = tiny(name), drawn(7, seed=5)
    expected = np.array([alone(model, one, seq_len) for one in given])
    assert expected.min() > 1
    for batch_tokens in (1, 90, 100_000):
        assert nll(model, given, seq_len, batch_tokens) == pytest.approx(expected, rel=1e-5)


def test_uniform_logits_give_the_log_of_the_vocabulary_and_progress_ends_at_one():
    model, told = tiny(), []
    with torch.no_grad():
        model.head.zero_()
    given = drawn(40, seed=6)
    tokens = np.array([len(one.ids) - one.first for one in given])
    found = nll(model, given, 16, 300, told.append)
    assert found / tokens == pytest.approx(np.full(40, math.log(VOCAB)), rel=1e-6)
    assert told == sorted(told)
    assert told[-1] == 1


def test_the_standard_error_is_that_of_the_mean_where_all_examples_are_equally_long():
    nats = np.random.default_rng(0).normal(30, 4, 50)
    expected = nats.std(ddof=1) / 10 / math.sqrt(50)
    assert ratio_error(nats, np.full(50, 10)) == pytest.approx(expected)
    assert math.isnan(ratio_error(nats[:1], np.array([10])))


def test_the_standard_error_is_the_spread_of_the_figure_over_draws_of_examples():
    """Tokens of an example share its difficulty: an error that took tokens as independent would be a third of it."""
    rng = np.random.default_rng(1)
    figures, errors, naive = [], [], []
    for _ in range(2000):
        tokens = rng.integers(5, 60, 100)
        noise = rng.normal(0, 1, 100) * np.sqrt(tokens)
        nats = tokens * (3 + rng.normal(0, 0.5, 100)) + noise
        figures.append(nats.sum() / tokens.sum())
        errors.append(ratio_error(nats, tokens))
        naive.append(1 / math.sqrt(tokens.sum()))
    assert np.mean(errors) == pytest.approx(np.std(figures), rel=0.05)
    assert np.mean(naive) < 0.4 * np.std(figures)
