"""One process at a time on a trial, and what is left when it ends or is killed."""

import os
import signal
import subprocess
import sys
import threading

from depthlaw.platform import checkpoint

HOLD = """
import sys, time
from pathlib import Path
from depthlaw.platform import checkpoint
with checkpoint.held(Path(sys.argv[1]), waiting=lambda: None):
    (Path(sys.argv[1]) / "work").touch()
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_waits_for_the_first_and_goes_on_when_that_is_killed(tmp_path):
    first = holder(tmp_path / "trial")
    waited = threading.Event()
    entered = threading.Event()

    def enter():
        with checkpoint.held(tmp_path / "trial", waiting=waited.set):
            entered.set()

    second = threading.Thread(target=enter)
    second.start()
    assert waited.wait(10)
    assert not entered.wait(0.3)
    os.kill(first.pid, signal.SIGKILL)
    first.wait(10)
    assert entered.wait(10)
    second.join(10)
    assert (tmp_path / "trial" / "work").exists()  # what the first left is the second's to resume from


def test_one_that_waited_while_the_trial_ended_holds_a_lock_of_its_own(tmp_path):
    folder, order = tmp_path / "trial", []
    waited = threading.Event()

    def enter():
        with checkpoint.held(folder, waiting=waited.set):
            order.append("second")
            with open(folder / checkpoint.LOCK) as lock:
                order.append(checkpoint._is_at(lock, folder / checkpoint.LOCK))

    with checkpoint.held(folder, waiting=lambda: None):
        second = threading.Thread(target=enter)
        second.start()
        assert waited.wait(10)
        checkpoint.delete(folder)
        order.append("first")
    second.join(10)
    assert order == ["first", "second", True]
    assert not folder.exists()  # nothing but the lock was in it
