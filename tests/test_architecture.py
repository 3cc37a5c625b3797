"""docs/architecture.md against the imports of every file: the drawings show all arrows and no others."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("archs", "scaling", "platform")
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def modules(room: str) -> dict[str, Path]:
    """{dotted name inside depthlaw: file}"""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in sorted((ROOT / room).rglob("*.py"))
    }


def imported(path: Path) -> Iterator[str]:
    """Names inside depthlaw that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("depthlaw"):
            base = (node.module or "").removeprefix("depthlaw").removeprefix(".")
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("depthlaw.") for a in node.names if a.name.startswith("depthlaw."))


def drawn(number: int) -> set[tuple[str, str]]:
    block = re.findall(r"^```mermaid\n(.*?)^```$", PAGE, re.M | re.S)[number]
    return {(a, b) for a, b in re.findall(r"^\s*(\w+) --> (\w+)$", block, re.M)}


def parts() -> dict[str, str]:
    """{file or folder of platform/: the part that the table puts it in}; a name ending in * stands for all that fit."""
    names = sorted({name.split(".")[1] for name in modules("platform") if "." in name})
    found: dict[str, str] = {}
    for part, files in re.findall(r"^\| (\w+) \| [^|]+ \| (`[^|]+) \|$", PAGE, re.M):
        for pattern in re.findall(r"`([\w*]+)`", files):
            fitting = [n for n in names if re.fullmatch(pattern.replace("*", r"\w+"), n)]
            assert fitting, f"{pattern} of {part} is no file of platform/"
            for name in fitting:
                assert name not in found, f"{name} is in {found[name]} and in {part}"
                found[name] = part
    assert set(names) - set(found) == set(), "files that the table of docs/architecture.md lacks"
    return found


def test_rooms_import_one_another_as_drawn():
    arrows = {
        (room, name.split(".")[0])
        for room in ROOMS
        for path in modules(room).values()
        for name in imported(path)
        if name.split(".")[0] in ROOMS and name.split(".")[0] != room
    }
    assert arrows == drawn(0)


def test_parts_of_platform_import_one_another_as_drawn():
    part = parts()
    arrows = set()
    for name, path in modules("platform").items():
        if "." not in name:
            continue
        here = part[name.split(".")[1]]
        for target in imported(path):
            room, *rest = target.split(".")
            if room == "platform" and rest and rest[0] in part and part[rest[0]] != here:
                arrows.add((here, part[rest[0]]))
    assert arrows == drawn(1)


@pytest.mark.parametrize("room", ["archs", "scaling"])
def test_what_counts_and_fits_imports_neither_ray_nor_deepspeed(room):
    for path in modules(room).values():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            banned = {"ray", "deepspeed"} | ({"torch"} if room == "scaling" else set())
            assert not {name.split(".")[0] for name in names} & banned, path
