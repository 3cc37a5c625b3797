"""Every command that a document shows is a command: the quick test parses it, the slow ones run the README's and the
tutorial's in order, as somebody new would. What is run elsewhere is named with the test that does."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from depthlaw.platform.cli import app

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = {"cli.md"}  # its usage lines are patterns, not commands

# Not run by the slow tests here: what runs them, and what needs a cluster or a person.
ELSEWHERE = {
    "make install": "the environment that runs this test",
    "source .venv/bin/activate": "the same",
    "make demo": "`depthlaw demo` below, in the environment of this test",
    "make test": "what runs the quick tests of this file",
    "depthlaw explore law.json": "tests/platform/test_explore_browser.py",
    "depthlaw explore runs/demo/law.json": "the same",
    "depthlaw diagnose TRIAL --storage runs/mine --out diagnosis": "tests/platform/test_diagnose.py, and the tutorial",
    "depthlaw evaluate TRIAL --storage runs/mine --out evaluation": "tests/platform/test_evaluate_offline.py",
    "depthlaw sweep tune_configs/depthbench_400m.yaml --address auto --storage /shared/runs/depthbench_400m": (
        "tests/platform/test_cluster.py joins a running Ray; this suite takes 800 GPU hours"
    ),
}


def blocks(text: str, *languages: str) -> Iterator[str]:
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        if language in languages:
            yield body


def commands(path: Path) -> list[str]:
    """The lines of shell blocks that a person would type, continued lines joined, prompts and comments left out."""
    found = []
    for body in blocks(path.read_text(), "", "console", "sh", "bash"):
        for line in body.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#\s.*$", "", line.removeprefix("$ ")).strip()
            if re.match(r"(depthlaw|make|source|pip|python) ", line):
                found.append(line)
    return found


SHOWN = [(path.name, line) for path in DOCUMENTS if path.name not in GENERATED for line in commands(path)]


def test_the_documents_show_commands():
    assert len([line for _, line in SHOWN if line.startswith("depthlaw ")]) > 25


@pytest.mark.parametrize(("name", "line"), [one for one in SHOWN if one[1].startswith("depthlaw ")])
def test_a_command_that_is_shown_parses(name, line):
    words = shlex.split(line.partition(" | ")[0])[1:]
    words = [word for word in words if word != "[--dry-run]"]
    group = typer.main.get_command(app)
    context = group.make_context("depthlaw", words, resilient_parsing="--version" in words)
    while not context.resilient_parsing and hasattr(context.command, "resolve_command"):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize(("name", "line"), [one for one in SHOWN if one[1].startswith("make ")])
def test_a_make_target_that_is_shown_exists(name, line):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert line.split()[1] in targets


def test_every_link_between_the_documents_leads_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def run(folder: Path, lines: list[str]) -> dict[str, list[str]]:
    """What each command printed, each time that it was run; all of them in order, as somebody new would."""
    if not (folder / "tune_configs").exists():
        (folder / "tune_configs").symlink_to(ROOT / "tune_configs")
    data = os.environ.get("DEPTHLAW_DATA") or ROOT / "data"
    environment = os.environ | {"DEPTHLAW_DATA": str(data), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    said: dict[str, list[str]] = {}
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        said.setdefault(line, []).append(done.stdout + done.stderr)
    return said


@pytest.mark.slow
@pytest.mark.engine
def test_the_demo_and_each_command_and_script_of_the_readme_do_what_it_shows(tmp_path):
    text = (ROOT / "README.md").read_text()
    lines = [line for line in commands(ROOT / "README.md") if line not in ELSEWHERE]
    assert len(lines) > 8
    said = run(tmp_path, ["depthlaw demo", *lines])
    assert "49 of 49 trials run now" in said["depthlaw demo"][0]
    assert "trials to run" not in said["depthlaw sweep tune_configs/demo.yaml --storage runs/demo"][0]
    shown = [body for body in blocks(text, "") if body.startswith("$ ")]
    assert len(shown) == 2
    for body in shown:
        command, *expected = body.splitlines()
        printed = said[command.removeprefix("$ ")][0]
        # Rounding differs between processors, and shares of draws with it.
        expected = [line for line in expected if line != "..." and not re.search(r"loss|draws|nats|%|: \d", line)]
        assert len(expected) > 5
        for line in expected:
            assert line in printed
    for body, design in zip(blocks(text, "python"), ("hc, 1 x 80: loss 3.", "hc, 1 x 72: loss 3."), strict=True):
        (tmp_path / "script.py").write_text(body)
        assert run(tmp_path, ["python script.py"])["python script.py"][0].startswith(design)


@pytest.mark.slow
@pytest.mark.engine
def test_the_tutorial_does_what_it_says_in_a_clean_folder(tmp_path):
    text = (ROOT / "docs" / "tutorial.md").read_text()
    for file, body in re.findall(r"`(\w+\.yaml)`:\n\n```yaml\n(.*?)^```$", text, re.M | re.S):
        (tmp_path / file).write_text(body)
    lines = [line for line in commands(ROOT / "docs" / "tutorial.md") if line not in ELSEWHERE]
    assert len(lines) > 15
    said = run(tmp_path, lines)
    plain, fast, long = (said[line][0] for line in lines if line.startswith("depthlaw optimum --data published-400m"))
    assert "hc, 110 layers of width 512" in plain
    assert "hc, 56 layers of width 704" in fast
    assert "11 layers of width 1408" in long
    first, second = said["depthlaw sweep first.yaml --storage runs/first"]
    assert "24 trials to run" in first
    assert "trials to run" not in second
    assert (tmp_path / "next.yaml").exists()
    assert list((tmp_path / "diagnosis").glob("*.parquet"))


def test_the_page_of_all_commands_is_that_of_the_code():
    target = re.search(r"^docs:.*\n\t\$\(BIN\)/(typer .*) --output (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    words = shlex.split(target[1])
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == (ROOT / target[2]).read_text().strip(), "run `make docs`"


def test_what_is_not_run_here_is_shown_somewhere_and_its_test_exists():
    shown = {line for _, line in SHOWN}
    for line, why in ELSEWHERE.items():
        assert line in shown, line
        for test in re.findall(r"tests/\S+\.py", why):
            assert (ROOT / test).exists(), test
