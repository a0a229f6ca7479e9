"""The libraries of tests/shims/hip behave as AMD's for hip-python: each check is a separate process."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def builder(root: Path) -> dict[str, Any]:
    """tests/shims/hip/build.py as a module."""
    return runpy.run_path(str(root / "tests" / "shims" / "hip" / "build.py"))


@pytest.fixture(scope="module")
def run(root: Path, builder: dict[str, Any]) -> Run:
    """Runs a check of a file of tests/shims/hip with additional environment variables."""
    try:
        rocm_path = builder["build"]()
    except builder["NoCompiler"] as missing:
        pytest.skip(str(missing))

    def run(file: str, check: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(root / "tests" / "shims" / "hip" / file), check]
        environment = {**os.environ, "ROCM_PATH": str(rocm_path), **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_processes_may_build_at_the_same_time(run: Run, root: Path, tmp_path: Path) -> None:
    code = "import pathlib, runpy, sys; print(runpy.run_path(sys.argv[1])['build'](pathlib.Path(sys.argv[2])))"
    command = [sys.executable, "-c", code, str(root / "tests" / "shims" / "hip" / "build.py"), str(tmp_path)]
    builds = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {build.communicate(timeout=60)[0].strip() for build in builds}
    assert printed == {str(folder) for folder in tmp_path.iterdir()}
    assert len(printed) == 1


def test_without_a_compiler_says_what_to_do(builder: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(builder["NoCompiler"], match="apt-get install g\\+\\+"):
        builder["build"]()


@pytest.mark.parametrize(
    "check",
    [
        "devices", "memory", "pinned", "order", "default_stream", "blocks", "compiler", "graph", "bad_captures", "peers",
    ],
)  # fmt: skip
def test_hip(run: Run, check: str) -> None:
    done = run("hip_checks.py", check)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("check", ["order", "pinned", "graph"])
def test_hip_that_lags(run: Run, check: str) -> None:
    done = run("hip_checks.py", check, HIPHOST_DELAY_US="20000")
    assert done.returncode == 0, done.stderr


def test_delay(run: Run) -> None:
    done = run("hip_checks.py", "delay", HIPHOST_DELAY_US="1000000")
    assert done.returncode == 0, done.stderr


def test_one_hardware_queue(run: Run) -> None:
    done = run("hip_checks.py", "one_queue", GPU_MAX_HW_QUEUES="1")
    assert done.returncode == 0, done.stderr


def test_no_devices(run: Run) -> None:
    done = run("hip_checks.py", "no_devices", HIPHOST_DEVICES="0")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("check", "number"),
    [
        ("touch_device_memory", signal.SIGSEGV),
        ("touch_pinned_memory", signal.SIGSEGV),
        ("run_past_the_end", signal.SIGBUS),
    ],
)
def test_what_a_gpu_would_not_allow_crashes(run: Run, check: str, number: int) -> None:
    done = run("hip_checks.py", check)
    assert (done.stdout, done.returncode) == ("alive\n", -number), done.stderr


@pytest.mark.parametrize("check", ["operations", "ordered", "death", "death_before_all_came", "abort"])
def test_rccl(run: Run, check: str) -> None:
    done = run("rccl_checks.py", check)
    assert done.returncode == 0, done.stderr


def test_rccl_that_lags(run: Run) -> None:
    done = run("rccl_checks.py", "ordered", HIPHOST_DELAY_US="2000")
    assert done.returncode == 0, done.stderr


def test_rccl_that_does_not_block(run: Run) -> None:
    done = run("rccl_checks.py", "behind", HIPHOST_BEHIND_US="500000")
    assert done.returncode == 0, done.stderr


def test_memory_left_open(run: Run) -> None:
    done = run("hip_checks.py", "touch_device_memory", HIPHOST_STRICT="0")
    assert done.returncode == 0, done.stderr
