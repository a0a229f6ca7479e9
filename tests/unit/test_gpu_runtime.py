"""Code that the CUDA and ROCm backends share, over hip-python on tests/shims/hip.

The conformance suites test what every device does; the tests here cover what only GPUs have: streams and memory of users,
several devices, graphs, pinned memory, pools, and errors on initialisation.
"""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
from enum import IntEnum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from xvcomm.backends import cuda, rocm
from xvcomm.backends.gpu.device import choose
from xvcomm.backends.gpu.guard import told
from xvcomm.backends.gpu.vendor import VendorError
from xvcomm.config import Config
from xvcomm.errors import ArgumentError, BackendUnavailable, ConfigError, ResourceError

FILES = [Path(__file__).with_name(name) for name in ("gpu_checks.py", "gpu_launch_checks.py")]
CHECKS = {check: file for file in FILES for check in runpy.run_path(str(file))["CHECKS"]}


@pytest.mark.parametrize("name", CHECKS)
def test_check(root: Path, rocm_path: Path, name: str) -> None:
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install 'xvcomm[rocm]'")
    environment = {**os.environ, "ROCM_PATH": str(rocm_path), "PYTHONPATH": str(root)}
    if name == "no_device":
        environment["HIPHOST_DEVICES"] = "0"
    command = [sys.executable, str(CHECKS[name]), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_compiled_code_enqueues(root: Path, rocm_path: Path) -> None:
    """The suite for devices that support it; ROCm jobs cover most of the other device suites."""
    pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install 'xvcomm[rocm]'")
    command = [sys.executable, "-m", "pytest", "-q", "-k", "rocm", str(root / "xvcomm/testing/test_launch.py")]
    environment = {**os.environ, "ROCM_PATH": str(rocm_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=root)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("asked", "local", "current", "index"),
    [(3, 1, 2, 3), (None, 1, 2, 2), (None, 5, 0, 1), (None, 5, -1, 1), (None, None, 0, 0), (None, None, -1, 0)],
)
def test_choice_of_the_device(asked: int | None, local: int | None, current: int, index: int) -> None:
    assert choose(Config(device_index=asked, local_rank=local), 4, current) == index


def test_choice_of_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="XVCOMM_DEVICE_INDEX=4: this process sees 4 devices"):
        choose(Config(device_index=4), 4, 0)


@pytest.mark.parametrize(
    ("installed", "library", "reason", "remedy"),
    [
        (False, None, "CuPy is not installed", "xvcomm[cuda]"),
        (True, OSError("libcuda.so.1: no such file"), "libcuda.so.1: no such file", "driver"),
        (True, (100, 0, 0), "no NVIDIA GPU is visible", "CUDA_VISIBLE_DEVICES"),
        (True, (0, 0, 0), "no NVIDIA GPU is visible", "CUDA_VISIBLE_DEVICES"),
        (True, (0, 804, 0), "the driver returns error 804", "nvidia-smi"),
        (True, (0, 0, 2), None, None),
    ],
)
def test_refusals_of_cuda(
    monkeypatch: pytest.MonkeyPatch, installed: bool, library: Any, reason: str | None, remedy: str | None
) -> None:
    def load(name: str) -> Any:
        if isinstance(library, OSError):
            raise library
        start, count, devices = library

        def get_count(place: Any) -> int:
            place._obj.value = devices
            return int(count)

        return SimpleNamespace(cuInit=lambda flags: start, cuDeviceGetCount=get_count)

    monkeypatch.setattr(cuda, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    monkeypatch.setattr(cuda.ctypes, "CDLL", load)
    refused = cuda.CudaBackend().refusal()
    if reason is None:
        assert refused is None
    else:
        assert refused is not None and remedy is not None
        assert refused[0] == reason and remedy in refused[1]


def test_codes_that_nccl4py_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors are members of an enumeration, which raises ValueError for codes of a newer NCCL; the
    error states the number.
    """
    nccl: Any = MagicMock(Comm=int)
    nccl.Result = IntEnum("Result", ["Success", "UnhandledCudaError", "SystemError"], start=0)
    nccl.NCCLError = type(
        "NCCLError", (Exception,), {"__init__": lambda self, code: setattr(self, "status", nccl.Result(code))}
    )
    nccl.get_error_string.return_value = "a system call failed"
    nccl.get_last_error.return_value = ""

    def answers(code: int) -> Any:
        def call(*arguments: object) -> None:
            raise nccl.NCCLError(code)

        return call

    nccl.all_reduce, nccl.reduce, nccl.group_end, nccl.get_version = answers(99), answers(2), answers(99), answers(99)
    internal = MagicMock()
    monkeypatch.setitem(sys.modules, "nccl", MagicMock())
    monkeypatch.setitem(sys.modules, "nccl.bindings", SimpleNamespace(nccl=nccl))
    monkeypatch.setitem(sys.modules, "nccl.bindings._internal", internal)
    monkeypatch.setitem(sys.modules, "nccl.bindings._internal.nccl", internal)
    monkeypatch.delitem(sys.modules, "xvcomm.backends.cuda.library", raising=False)
    library = importlib.import_module("xvcomm.backends.cuda.library").NcclLibrary("sm_90")
    monkeypatch.delitem(sys.modules, "xvcomm.backends.cuda.library")
    assert library.explain(99, 0) == "unknown error 99"
    assert library.explain(2, 0) == "SystemError (2): a system call failed"
    assert (library.all_reduce(0, 0, 1, 0, 0, 0, 0), library.group_end()) == (99, 99)
    assert library.reduce(0, 0, 1, 0, 0, 0, 0, 0) == 2
    with pytest.raises(VendorError, match=r"ncclGetVersion: unknown error \(99\)"):
        library.version()


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'nccl'"), VendorError("ncclGetVersion", -1, "missing", "libnccl")]
)
def test_a_library_that_is_missing_is_no_refusal(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A single GPU beside other islands does not need it; doctor reports it."""
    backend = cuda.CudaBackend()
    monkeypatch.setattr(cuda.CudaBackend, "runtime", lambda self: SimpleNamespace(architecture=lambda index: "sm_90"))
    library = MagicMock(version=lambda: 22809)
    monkeypatch.setattr(cuda.CudaBackend, "library", lambda self, architecture: library)
    assert backend.lacks() is None
    library.version = MagicMock(side_effect=error)
    reason, remedy = backend.lacks() or ("", "")
    assert str(error) in reason and remedy == "reinstall xvcomm[cuda]"


def test_rocm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm, "find_spec", lambda name: None)
    refused = rocm.RocmBackend().refusal()
    assert refused == ("hip-python is not installed", "pip install 'xvcomm[rocm]'")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (2, ResourceError), (900, ArgumentError), (400, ArgumentError), (35, BackendUnavailable), (-1, BackendUnavailable),
        (700, ResourceError),
    ],
)  # fmt: skip
def test_errors_are_told_in_our_words(code: int, kind: type[Exception]) -> None:
    error = told(VendorError("cudaSomething", code, "cudaErrorSomething", "the vendor's words"), "cuda", 3)
    assert type(error) is kind
    assert str(error).startswith(f"cuda device 3: cudaSomething: cudaErrorSomething ({code}): the vendor's words; ")
