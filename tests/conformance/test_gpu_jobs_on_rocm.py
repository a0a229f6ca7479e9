"""`tests/hardware` on a machine with AMD GPUs only: its CUDA jobs run on ROCm, here with libraries that use host memory."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from xvcomm.engine.session import plugins

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")

MAPPED, LEFT = ("1 and 1", "cuda and host"), "cuda and rocm"


def test_jobs_run_on_rocm(root: Path) -> None:
    if any(found.usable for found in plugins.backends() if found.name == "cuda"):
        pytest.skip("where CUDA works these tests take it")
    builder = runpy.run_path(str(root / "tests" / "shims" / "hip" / "build.py"))
    try:
        variables = {"ROCM_PATH": str(builder["build"]()), "HIPHOST_DEVICES": "2"}
    except builder["NoCompiler"] as missing:
        pytest.skip(str(missing))
    tests = [f"tests/hardware/test_cuda.py::test_messages[{name}-1]" for name in (*MAPPED, LEFT)]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *tests]
    done = subprocess.run(command, cwd=root, env=os.environ | variables, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in MAPPED:
        assert f"PASSED tests/hardware/test_cuda.py::test_messages[{name}-1]" in done.stdout, done.stdout
    assert "2 passed, 1 skipped" in done.stdout and "only by ROCm's libraries over CUDA's" in done.stdout
