"""The vendors' libraries for ranges, each with a stand-in: NVTX of a CuPy that is not there, ROCTx of tests/shims/hip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from xvcomm.backends.cuda.ranges import nvtx
from xvcomm.backends.rocm.ranges import roctx
from xvcomm.errors import BackendUnavailable


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for `cupy.cuda`."""
    package, found = ModuleType("cupy"), ModuleType("cupy.cuda")
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", found)
    return found


def test_ranges_of_cupy(cupy: ModuleType) -> None:
    said: list[str] = []
    cupy.nvtx = SimpleNamespace(RangePush=said.append, RangePop=lambda: said.append("end"))  # type: ignore[attr-defined]
    ranges = nvtx()
    ranges.push("xvcomm:send 3 x int8 to rank 1")
    ranges.pop()
    assert said == ["xvcomm:send 3 x int8 to rank 1", "end"]


def test_a_cupy_without_nvtx(cupy: ModuleType) -> None:
    cupy.nvtx = SimpleNamespace(available=False)  # type: ignore[attr-defined]
    with pytest.raises(BackendUnavailable, match="this CuPy has no NVTX"):
        nvtx()


def test_ranges_of_rocm(rocm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "ranges"
    monkeypatch.setenv("HIPHOST_RANGES", str(written))
    ranges = roctx(rocm_path / "lib")
    ranges.push("outer")
    ranges.push("inner")
    ranges.pop()
    ranges.pop()
    ranges.push("next")
    ranges.pop()
    assert written.read_text().splitlines() == ["outer", "  inner", "next"]


def test_a_rocm_without_roctx(root: Path, tmp_path: Path) -> None:
    """In a process of its own: one that has loaded the library finds it without the folder."""
    code = f"from pathlib import Path; from xvcomm.backends.rocm.ranges import roctx; roctx(Path({str(tmp_path)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert f"XVCOMM_RANGES=1: there is no librocprofiler-sdk-roctx.so in {tmp_path}; install" in done.stderr
