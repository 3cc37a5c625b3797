"""What a failed trial's reason says."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from depthlaw.platform.watcher import _reason


def raised(error):
    def get():
        if isinstance(error, EOFError):
            raise error
        return error

    return SimpleNamespace(get_pickled_error=get)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RayTaskError("f", "Traceback ...", ValueError("a defect\nof two lines")), "ValueError: a defect of two lines"),
        (RayActorError("01", "half a page\nof causes"), "its worker process died: killed, or out of memory"),
        (None, "Ray kept no reason: is the disk full?"),
        (EOFError("Ran out of input"), "Ray kept no reason: is the disk full?"),
    ],
)
def test_a_reason_is_one_line_of_kind_and_message(error, reason):
    assert _reason(raised(error)) == reason
