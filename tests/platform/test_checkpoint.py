"""A resume checkpoint is its owner's alone, and nothing that another user could have written is unpickled."""

import errno
import json
import os
import pickle
import stat
from pathlib import Path

import pytest

from depthlaw.platform import checkpoint
from depthlaw.platform.checkpoint import CheckpointError, ForeignCheckpointError, UnwrittenCheckpointError
from depthlaw.platform.ranks import Ranks
from depthlaw.platform.universal import fit_to


class Engine:
    """As much of DeepSpeed's engine as a checkpoint needs; it writes and unpickles as that does."""

    def save_checkpoint(self, folder, tag, client_state, save_latest):
        below = Path(folder) / tag
        below.mkdir(parents=True)
        below.chmod(0o775)
        (below / "state.pt").write_bytes(pickle.dumps(client_state))
        (below / "state.pt").chmod(0o664)  # whatever the user's umask is

    def load_checkpoint(self, folder, tag):
        return folder, pickle.loads((Path(folder) / tag / "state.pt").read_bytes())

    def zero_optimization_stage(self):
        return 0


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "store" / "checkpoints" / "t"
    checkpoint.save(Engine(), folder, 7, {"step": 7}, Ranks())
    return folder


def load(folder):
    states = []
    checkpoint.load(Engine(), folder, states.append, Ranks())
    return states


def test_its_folders_have_mode_700_and_its_files_600_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = tmp_path / "store" / "checkpoints" / "t"
        checkpoint.save(Engine(), folder, 7, {"step": 7}, Ranks())
        checkpoint.save(Engine(), folder, 8, {"step": 8}, Ranks())
    finally:
        os.umask(before)
    modes = {path.relative_to(folder).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert modes == {"latest.json": 0o600, "step8": 0o700, "step8/state.pt": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert load(folder) == [{"step": 8}]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("which", [".", "latest.json", "step7", "step7/state.pt"])
def test_one_of_another_user_is_refused_in_a_line_and_left_alone(saved, which):
    os.chown(saved / which, 12345, -1)
    with pytest.raises(ForeignCheckpointError) as refused:
        load(saved)
    line = str(refused.value)
    assert "\n" not in line
    assert "belongs to user 12345, not to user 0 who runs this" in line
    assert line.endswith(f"Delete {saved} to start the trial over")
    assert (saved / "step7" / "state.pt").exists()
    with pytest.raises(ForeignCheckpointError):  # nor is a new one put beside it
        checkpoint.save(Engine(), saved, 8, {}, Ranks())


def test_one_whose_folder_others_may_write_to_or_that_leads_elsewhere_is_refused(saved, tmp_path):
    saved.chmod(0o770)
    with pytest.raises(ForeignCheckpointError, match="may be changed by others"):
        load(saved)
    saved.chmod(0o700)
    os.rename(saved / "step7", tmp_path / "elsewhere")
    (saved / "step7").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignCheckpointError, match="step7 is a link"):
        load(saved)
    assert not list(saved.glob(".*"))  # of the look at whose it is nothing stays


def test_one_that_others_may_write_to_is_not_converted_for_another_number_of_ranks_either(saved):
    pointer = checkpoint.pointer_of(saved)
    (saved / checkpoint.POINTER).write_text(json.dumps(pointer | {"zero_stage": 1, "world": 1}))
    saved.chmod(0o770)
    with pytest.raises(ForeignCheckpointError, match="may be changed by others"):
        fit_to(saved, 2, 1)
    assert (saved / "step7" / "state.pt").exists()


def test_one_that_is_damaged_is_deleted_and_said_to_be(saved):
    (saved / "step7" / "state.pt").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"state.pt has 4 of \d+ bytes.*it was deleted"):
        load(saved)
    assert not saved.exists()
    assert load(saved) == []


def test_the_last_one_to_go_takes_the_folder_of_all_with_it(saved):
    other = saved.with_name("u")
    checkpoint.save(Engine(), other, 1, {}, Ranks())
    checkpoint.delete(saved)
    assert other.exists()
    checkpoint.delete(other)
    assert not saved.parent.exists()


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (
            RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1"),
            "the disk is full, or refuses it",
        ),
    ],
)
def test_one_that_the_disk_refuses_is_named_and_takes_no_room_and_the_one_before_stays(saved, refused, reason):
    class Full(Engine):
        def save_checkpoint(self, folder, tag, client_state, save_latest):
            super().save_checkpoint(folder, tag, client_state, save_latest)
            raise refused

    with pytest.raises(UnwrittenCheckpointError) as told:
        checkpoint.save(Full(), saved, 8, {"step": 8}, Ranks())
    assert str(told.value) == f"cannot write checkpoint {saved / 'step8'}: {reason}"
    assert not (saved / "step8").exists()
    assert load(saved) == [{"step": 7}]


def test_an_error_that_is_not_the_disks_is_left_as_it_is(saved):
    class Broken(Engine):
        def save_checkpoint(self, folder, tag, client_state, save_latest):
            raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="connection closed by peer"):
        checkpoint.save(Broken(), saved, 8, {"step": 8}, Ranks())
