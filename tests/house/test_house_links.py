"""The two links that make top-level folders subpackages, and the refusal of their bare names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LINKS = ("backends", "adapters")


@pytest.mark.parametrize("name", LINKS)
def test_link_points_to_the_folder(root: Path, name: str) -> None:
    link = root / "xvcomm" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").samefile(root / name / "__init__.py")
    assert not (root / name).is_symlink()


def test_links_are_committed_as_links(root: Path) -> None:
    if shutil.which("git") is None or not (root / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "--stage", *(f"xvcomm/{name}" for name in LINKS)]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    modes = {line.split("\t")[1]: line.split()[0] for line in listed.splitlines()}
    assert modes == {f"xvcomm/{name}": "120000" for name in LINKS}


@pytest.mark.parametrize("name", LINKS)
def test_bare_name_is_refused(root: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"ImportError: import xvcomm.{name}, not {name}" in done.stderr


@pytest.mark.parametrize("name", LINKS)
def test_package_name_is_accepted(root: Path, name: str) -> None:
    subprocess.run([sys.executable, "-c", f"import xvcomm.{name}"], cwd=root, check=True, timeout=60)
