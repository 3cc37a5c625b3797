"""Folders of killed processes go; those of living ones stay."""

import os
import signal
import subprocess
import sys

from depthlaw.platform.own_folder import own_folder, remove_abandoned

HOLD = """
import sys, time
from pathlib import Path
from depthlaw.platform.own_folder import own_folder
with own_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_the_folder_of_a_killed_process_is_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    remove_abandoned(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # the folder and its lock
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    with own_folder(tmp_path) as mine:
        remove_abandoned(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {mine.name, f"{mine.name}.lock"}
    assert not any(tmp_path.iterdir())
