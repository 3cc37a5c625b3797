"""The folder `platform/` at the root must never hide the standard library's module."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_standard_platform_module_and_torch_import_from_the_root():
    code = "import platform; print(platform.system()); import numpy, torch; print(torch.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "torch"
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_rooms_under_src_are_links_to_the_folders_at_the_root():
    for room in ("archs", "scaling", "platform", "tune_configs", "bundled"):
        link = ROOT / "src" / "depthlaw" / room
        assert link.is_symlink()
        assert link.resolve() == ROOT / room
