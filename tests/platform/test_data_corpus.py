import json

import numpy as np
import pytest

from depthlaw.platform import corpus
from depthlaw.platform.data_build import build
from depthlaw.platform.data_config import DataConfig, DataError


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("<p>One <code>two</code>.</p> <p>Three.</p>", "One two.\n\nThree."),
        (
            "<p>Pick:</p> <ul> <li> <p>a</p> </li> <li> <p> <b>b</b> c</p> </li> </ul> <p>End</p>",
            "Pick:\n- a\n- b c\n\nEnd",
        ),
        ('See <a href="there?a=1&amp;b=2">the\n guide</a>; x &lt; 3 &amp; y', "See the\nguide; x < 3 & y"),
        ("arn:<account-id>:<region> and <p-value>", "arn:<account-id>:<region> and <p-value>"),
        ("if a < b and c > d", "if a < b and c > d"),
        ("<note><p>Mind.</p></note>after<br/>line", "Mind.\n\nafter\nline"),
        ("", ""),
    ],
)
def test_html_markup_goes_and_placeholders_stay(markup, text):
    assert corpus.strip_html(markup) == text


def test_a_paragraph_is_kept_once_in_the_whole_corpus():
    documents = [
        corpus.Document("prose/a", "first\n\nshared\r\n\r\nsecond  \n"),
        corpus.Document("prose/b", "shared\n\n\n   \n\n    indented\n\nthird"),
        corpus.Document("prose/c", "second\n\nthird"),
    ]
    dedup = corpus.Dedup()
    kept = list(corpus.deduplicated(documents, dedup))
    assert [document.text for document in kept] == ["first\n\nshared\n\nsecond\n", "    indented\n\nthird\n"]
    assert (dedup.paragraphs, len(dedup.seen)) == (8, 5)


def test_indentation_tells_paragraphs_apart():
    kept = list(corpus.deduplicated([corpus.Document("code/a", "x = 1\n\n    x = 1")], corpus.Dedup()))
    assert kept[0].text == "x = 1\n\n    x = 1\n"


def test_split_takes_whole_groups_near_the_fraction_of_each_kind():
    generator = np.random.default_rng(0)
    sizes = {
        f"{kind}/{i}": int(size)
        for kind in ("prose", "code")
        for i, size in enumerate(generator.pareto(1.2, 300) * 1000)
    }
    held = corpus.validation_groups(sizes, 0.05)
    assert held < set(sizes)
    for kind in ("prose", "code"):
        total = sum(size for group, size in sizes.items() if group.startswith(kind))
        inside = [sizes[group] for group in held if group.startswith(kind)]
        assert 0.045 * total < sum(inside) <= 0.05 * total
        assert len(inside) >= 4
    assert held == corpus.validation_groups(dict(reversed(sizes.items())), 0.05)


def test_split_of_few_groups_holds_one_out_and_of_one_group_none():
    assert corpus.validation_groups({"prose/a": 10, "prose/b": 7}, 0.02) == {"prose/b"}
    assert corpus.validation_groups({"prose/a": 10}, 0.5) == set()


def test_no_group_of_a_build_is_on_both_sides(tmp_path):
    dataset = build(DataConfig(source="pydoc", vocab_size=300, validation_fraction=0.2), tmp_path)
    held = set(dataset.index["validation_groups"])
    sides = {True: [], False: []}
    for document in corpus.deduplicated(corpus.pydoc_documents(), corpus.Dedup()):
        sides[document.group in held].append(document.text)
    tokenizer = dataset.tokenizer()
    for split, validation in (("train", False), ("validation", True)):
        ends = np.flatnonzero(dataset.tokens(split) == 0)
        starts = np.concatenate([[0], ends[:-1] + 1])
        texts = [tokenizer.decode(dataset.tokens(split)[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
        assert texts == sides[validation]


def _write_folder(folder, texts, kind):
    folder.mkdir()
    if kind == "jsonl":
        (folder / "train.jsonl").write_text(
            "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
        )
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), folder / "train.parquet")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_local_folder_through_the_hub_path_gives_the_tokens_of_the_same_text_by_another_path(tmp_path, kind):
    _write_folder(tmp_path / "rows", [document.text for document in corpus.pydoc_documents()], kind)
    config = DataConfig(source="hub", dataset=str(tmp_path / "rows"), vocab_size=300, max_documents=10_000)
    hub = build(config, tmp_path / "data")
    other = build(DataConfig(source="pydoc", vocab_size=300), tmp_path / "data")
    assert np.array_equal(hub.tokens("train"), other.tokens("train"))
    assert hub.fingerprint == other.fingerprint
    assert hub.path != other.path


def test_hub_limits_end_the_stream(tmp_path):
    _write_folder(tmp_path / "rows", [f"text number {i}, " * 20 for i in range(200)], "jsonl")
    base = {"source": "hub", "dataset": str(tmp_path / "rows"), "vocab_size": 260, "validation_fraction": 0.1}
    documents = build(DataConfig(**base, max_documents=50), tmp_path / "data").index["splits"]
    assert documents["train"]["documents"] + documents["validation"]["documents"] == 50
    tokens = build(DataConfig(**base, max_tokens=5000), tmp_path / "data").index["splits"]
    assert (tokens["train"]["tokens"], tokens["validation"]["tokens"]) == (4500, 500)


def test_a_hub_row_without_text_is_skipped(tmp_path):
    for name, texts in (("with", ["one", None, "two"]), ("without", ["one", "two"])):
        _write_folder(tmp_path / name, texts, "parquet")
    with_null, without = (
        build(
            DataConfig(source="hub", dataset=str(tmp_path / name), vocab_size=260, max_documents=5), tmp_path / "data"
        )
        for name in ("with", "without")
    )
    assert with_null.fingerprint == without.fingerprint


def test_hub_mistakes_are_one_line(tmp_path):
    _write_folder(tmp_path / "rows", ["a", "b"], "jsonl")
    base = {"source": "hub", "vocab_size": 260, "max_documents": 5}
    with pytest.raises(DataError, match=r"text_field='body' holds no text; text is in \['text'\]") as error:
        build(DataConfig(**base, dataset=str(tmp_path / "rows"), text_field="body"), tmp_path / "data")
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match="cannot be read") as error:
        build(DataConfig(**base, dataset=str(tmp_path / "rows"), split="dev"), tmp_path / "data")
    assert "\n" not in str(error.value)
    assert [path.name for path in (tmp_path / "data").iterdir()] == []  # a failed build leaves nothing
