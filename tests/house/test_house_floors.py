"""A file imports only lower floors, checked by import-linter, also for the packages behind the two links."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the tree in `folder`."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.fixture
def copy(root: Path, tmp_path: Path) -> Path:
    """A copy of the repository, with links kept as links, to be modified."""
    for folder in ("xvcomm", "backends", "adapters"):
        shutil.copytree(root / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", tmp_path)
    return tmp_path


def test_import_contracts_are_kept(root: Path) -> None:
    done = lint(root)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("xvcomm/errors.py", "import xvcomm.types.topology", "Floors"),
        ("xvcomm/types/topology.py", "import torch", "The core imports no framework"),
        ("backends/host/__init__.py", "import xvcomm.engine.planner", "Backends see only the lower floors"),
        ("backends/host/__init__.py", "import xvcomm.backends.shm", "Backends do not import each other"),
        ("xvcomm/stray.py", "", "Floors"),
    ],
)
def test_linter_detects_violations(copy: Path, file: str, line: str, contract: str) -> None:
    with (copy / file).open("a") as stream:
        stream.write(line + "\n")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout
