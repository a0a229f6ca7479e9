"""Fixtures of the tests with ranks: small folders for shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "shims" / "links")]  # for the modules there, here and on the ranks


@pytest.fixture
def small_folder(tmp_path):
    """Mounts a tmpfs of a given size in kilobytes for shared memory; files that are left in it fail the test."""
    made = []

    def mount(kilobytes):
        folder = tmp_path / "shm"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"cannot mount a small tmpfs here: {done.stderr.strip()}")
        made.append(folder)
        return folder

    yield mount
    try:
        assert [name for path in made for name in os.listdir(path)] == []
    finally:
        for path in made:
            subprocess.run(["umount", "-l", str(path)], check=True)
