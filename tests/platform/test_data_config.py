import subprocess
import sys

import pytest
from pydantic import ValidationError

from depthlaw.platform.data_config import DataConfig, DataError, data_root


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"source": "web"}, ["source='web'", "'offline', 'pydoc' or 'hub'"]),
        ({"vocab_size": 256}, ["vocab_size=256", "257 to 65535"]),
        ({"vocab_size": 65536}, ["vocab_size=65536", "257 to 65535"]),
        ({"tokenizer": "gpt-neox"}, ["vocab_size=4096", "50280"]),
        ({"tokeniser": "bpe"}, ["'tokeniser'", "allowed: source, tokenizer"]),
        ({"source": "hub", "max_tokens": 10}, ["dataset=None", "local folder"]),
        ({"source": "hub", "dataset": "x"}, ["max_documents=None", "at least one limit"]),
        ({"source": "pydoc", "dataset": "x"}, ["dataset='x'", "'pydoc'", "only with source 'hub'"]),
        ({"validation_fraction": 0.9}, ["validation_fraction=0.9", "0.5"]),
    ],
)
def test_a_wrong_config_is_one_line_that_names_value_and_what_is_allowed(values, words):
    with pytest.raises(DataError) as error:
        DataConfig.parse(values)
    message = str(error.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_config_is_frozen():
    config = DataConfig(source="pydoc")
    with pytest.raises(ValidationError):
        config.vocab_size = 300


def test_data_root_is_the_environments_or_a_folder_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DEPTHLAW_DATA", raising=False)
    assert data_root() == tmp_path / "data"
    monkeypatch.setenv("DEPTHLAW_DATA", str(tmp_path / "elsewhere"))
    assert data_root() == tmp_path / "elsewhere"


def test_importing_the_pipeline_imports_no_heavy_library():
    code = (
        "import sys, depthlaw.platform.data_config, depthlaw.platform.data_build, depthlaw.platform.baselines\n"
        "print([name for name in ('datasets', 'tokenizers', 'torch', 'pyarrow', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
