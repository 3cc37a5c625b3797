"""What `doctor` says of a machine that lacks something, and that it leaves nothing behind."""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from depthlaw.platform import doctor
from depthlaw.platform.cli import main
from depthlaw.platform.doctor import Finding


def test_every_required_package_is_looked_at_and_good_here():
    found = {one.what: one for one in doctor.packages()}
    assert {"torch", "ray", "deepspeed", "pyarrow", "numpy"} <= found.keys()
    assert found["torch"].says == metadata.version("torch")
    assert all(one.state == "good" for one in found.values())
    assert not {"botocore", "pytest", "wandb"} & found.keys()  # of extras


def test_a_package_that_is_missing_or_too_old_comes_with_the_command_that_mends_it(monkeypatch):
    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: ["nonesuch-x>=2", "numpy>=99", 'rich; extra == "dev"']
    )
    _, missing, old = doctor.packages()
    assert missing == Finding("nonesuch-x", "bad", "not installed; run: pip install 'nonesuch-x>=2'")
    assert old.state == "bad"
    assert old.says == f"{metadata.version('numpy')}; run: pip install 'numpy>=99'"


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above_it(tmp_path):
    found = doctor.writable("store", tmp_path / "a" / "b")
    assert found.state == "good"
    assert str(tmp_path / "a" / "b") in found.says
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["a file", "proc"])
def test_a_folder_that_takes_no_file_is_bad(tmp_path, what):
    if what == "a file":
        folder = tmp_path / "file" / "store"
        (tmp_path / "file").write_text("")
    else:
        folder = Path("/proc/depthlaw")
        if not Path("/proc").is_dir():
            pytest.skip("no /proc on this system")
    found = doctor.writable("store", folder)
    assert found.state == "bad"
    assert "give a folder that you may write to" in found.says


def test_little_room_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert doctor.writable("data", tmp_path).state == "note"


def test_a_broken_text_is_a_finding_and_not_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr("depthlaw.platform.data_build.open_built", lambda *given: 1 / 0)
    assert doctor.text(tmp_path) == Finding("text", "bad", "ZeroDivisionError: division by zero")


def test_text_that_is_not_built_says_how_to_build_it(tmp_path):
    found = doctor.text(tmp_path)
    assert found.state == "note"
    assert "depthlaw data build" in found.says


def test_an_address_where_no_ray_is_ends_with_code_1_and_the_other_findings(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--address", "127.0.0.1:1", "--json"])
    assert ended.value.code == 1
    *others, ray = json.loads(capsys.readouterr().out)
    assert ray["what"] == "ray"
    assert ray["state"] == "bad"
    assert "nothing answers at the Ray address 127.0.0.1:1" in ray["says"]
    assert [one["what"] for one in others if one["state"] == "bad"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
def test_a_local_ray_runs_a_task():
    found = doctor.ray_runs("local")
    assert found.state == "good", found.says
    assert "local: 1 node, " in found.says
    assert found.says.endswith("a task ran")
