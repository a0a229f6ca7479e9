"""`make test-gpu` runs all tests in `tests/hardware`, whatever their names."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path


def test_nothing_is_deselected(root: Path) -> None:
    recipe = subprocess.run(
        ["make", "--dry-run", "test-gpu"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    (arguments,) = re.findall(r"-m pytest ([^|;\n]*\btests/hardware\b[^|;\n]*)", recipe)
    command = [sys.executable, "-m", "pytest", *shlex.split(arguments), "--collect-only", "-q"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_cuda.py::" in done.stdout
    assert "deselected" not in done.stdout, done.stdout[-500:]
