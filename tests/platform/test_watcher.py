"""What a failed trial's reason says."""

import pickle
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from depthlaw.platform.watcher import _reason

DEFECT = RayTaskError("f", "Traceback ...", ValueError("a defect\nof two lines"))
LOST = RayActorError("01", "half a page\nof causes")


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        (pickle.dumps(DEFECT), "ValueError: a defect of two lines"),
        (pickle.dumps(LOST), "its worker process died: killed, or out of memory"),
        (pickle.dumps(LOST)[:50], "Ray kept no reason: is the disk of its temporary folder full?"),
        (b"", "Ray kept no reason: is the disk of its temporary folder full?"),
    ],
)
def test_a_reason_is_one_line_of_kind_and_message(tmp_path, kept, reason):
    (tmp_path / "error.pkl").write_bytes(kept)
    assert _reason(SimpleNamespace(pickled_error_file=str(tmp_path / "error.pkl"))) == reason
