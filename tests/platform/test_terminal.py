"""A sweep as most people start it: on a terminal."""

import os
import pty
import subprocess
import sys

import pytest
import yaml

from depthlaw.platform.store import Store

pytestmark = pytest.mark.engine

CONFIG = {
    "name": "terminal",
    "data": {"source": "pydoc", "vocab_size": 300},
    "seq_len": 32,
    "batch_tokens": 512,
    "micro_batch_seqs": 8,
    "shape_rule": "small",
    "validation": {"times": 2, "windows": 16},
    "grid": [{"topologies": ["pre_ln"], "shapes": [[1, 16]], "tokens_per_backbone_param": [2], "lr": [5e-3]}],
}


def test_a_sweep_on_a_terminal_trains_and_shows_whole_tables(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    ours, theirs = pty.openpty()
    environment = os.environ | {"DEPTHLAW_DATA": str(tmp_path / "data"), "COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "depthlaw", "sweep", "c.yaml", "--storage", "store"]
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux says EIO when the last writer is gone
            break
        if not chunk:
            break
        seen += chunk
    text = seen.decode(errors="replace")
    assert run.wait() == 0, text
    assert list(Store(tmp_path / "store").statuses().values()) == ["finished"]
    assert "Traceback" not in text
    assert f"{int(Store(tmp_path / 'store').cells()['backbone_params'][0]):,}" in text
    assert "…" not in text.rsplit("topology", 1)[1]
