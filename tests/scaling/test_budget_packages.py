"""Budgets that installed packages offer: the worked example of docs/adding.md, built, installed and asked about."""

import json
import os
import re
import subprocess
import sys

import pytest

from depthlaw.scaling import budgets
from depthlaw.scaling.budgets import BudgetError, find_budget, parse_budget


@pytest.fixture
def nothing_registered(monkeypatch):
    monkeypatch.setattr(budgets, "BUDGETS", {"params": budgets.BUDGETS["params"]})


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes an installed package of one module that offers one budget."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name, code, value=None):
        (tmp_path / f"{name}_module.py").write_text(code)
        info = tmp_path / f"{name}_dist-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[depthlaw.budgets]\n{name} = {value or f'{name}_module'}\n")

    return make


GOOD = """from depthlaw.scaling.budgets import budget
@budget("{}", unit="bytes")
def one(design, workload, hardware): return 1
"""


def test_a_package_is_imported_only_when_its_budget_is_asked_for(nothing_registered, package):
    package("lazy_one", GOOD.format("lazy_one"))
    package("lazy_two", "raise RuntimeError('nobody asked')")
    assert parse_budget("params<=4M").limit == 4e6
    assert "lazy_one_module" not in sys.modules
    assert parse_budget("lazy_one<=2KiB").limit == 2048
    assert "lazy_one_module" in sys.modules
    with pytest.raises(
        BudgetError, match=r"unknown budget 'other'; choose one of params \(count\), lazy_one \(bytes\), lazy_two$"
    ):
        find_budget("other")


def test_a_package_that_breaks_or_does_not_register_is_named_in_one_line(nothing_registered, package):
    package("broken", "raise RuntimeError('no luck')")
    package("silent", "def silent(design, workload, hardware): return 1", "silent_module:silent")
    with pytest.raises(
        BudgetError, match=r"'broken' of the package broken-dist does not load \(RuntimeError: no luck\)"
    ):
        find_budget("broken")
    with pytest.raises(
        BudgetError, match=r"'silent' of the package silent-dist is not registered by silent_module:silent: dec"
    ):
        find_budget("silent")


def test_the_example_package_of_the_documentation_installs_and_answers_on_the_command_line(
    request, tmp_path, noisy_law
):
    text = (request.config.rootpath / "docs" / "adding.md").read_text()
    files = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", text, re.M | re.S))
    assert set(files) == {"pyproject.toml", "serving_bill.py"}
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name, content in files.items():
        (source / name).write_text(content)
    install = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, cwd=tmp_path, capture_output=True, timeout=120)

    noisy_law.save(tmp_path / "law.json")
    limit = re.search(r'depthlaw optimum law.json "params<=400M" "serving_bill<=([\d.]+)"', text)[1]
    ask = [sys.executable, "-m", "depthlaw", "optimum", "law.json", "params<=400M", f"serving_bill<={limit}", "--json"]
    path = os.pathsep.join(p for p in (str(target), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(ask, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    best, use = answer["best"], answer["budgets"][1]
    assert (use["name"], use["unit"], use["limit"]) == ("serving_bill", "dollars", float(limit))
    assert best["uses"]["serving_bill"] == pytest.approx(1e6 * best["tpot_s"] / 3600 * 2.0)
    assert best["uses"]["serving_bill"] <= float(limit)
    # Without the package the name is unknown, and the error lists what there is.
    bare = subprocess.run(ask, cwd=tmp_path, capture_output=True, text=True)
    assert bare.returncode == 2
    assert "unknown budget 'serving_bill'; choose one of params (count)" in bare.stderr
