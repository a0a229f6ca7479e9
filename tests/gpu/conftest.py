"""Shared by the tests on GPUs: why there are none, how many there are, and ranks on them."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from xvcomm import registry
from xvcomm.config import Config
from xvcomm.testing import World
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.topology import parse_islands

Job = Callable[..., World]
JAX = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""It would take most of the memory of all GPUs that a rank sees, other ranks' too."""


@pytest.fixture(scope="session")
def gpus() -> int:
    """Number of GPUs that CUDA sees."""
    found = {backend.name: backend for backend in registry.backends()}["cuda"]
    if not found.usable:
        pytest.skip(f"{found.reason}; {found.remedy}")
    count: int = registry.backend("cuda").device(Config()).runtime.count()  # type: ignore[attr-defined]
    return count


@pytest.fixture(scope="session")
def rocm_on_cuda(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of ranks whose ROCm is CUDA."""
    builder = runpy.run_path(str(root / "tests" / "hip_on_cuda" / "build.py"))
    try:
        return dict(builder["environment"](builder["build"](tmp_path_factory.mktemp("rocm"))))
    except builder["CannotBuild"] as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def job(gpus: int, request: pytest.FixtureRequest) -> Job:
    """Starts ranks on kinds of device, each on a GPU of its own; skips where there are too few."""

    def start(devices: str, islands: str | None = None, env: Mapping[str, str] | None = None) -> World:
        kinds = parse_islands(devices)
        wanted = sum(kind != "host" for kind in kinds)
        if wanted > gpus:
            pytest.skip(f"{wanted} ranks on GPUs, and {gpus} GPUs")
        rocm = request.getfixturevalue("rocm_on_cuda") if "rocm" in kinds else {}
        ranks = World(islands=islands, devices=devices, env=[
            {**SMALL_GPU_RINGS, **JAX, **(rocm if kind == "rocm" else {}), **_gpu(kinds, rank), **(env or {})}
            for rank, kind in enumerate(kinds)
        ], timeout=60)  # fmt: skip
        return ranks

    return start


def _gpu(kinds: Sequence[str], rank: int) -> dict[str, str]:
    """The GPU of a rank: both vendors' ranks number the same ones."""
    if kinds[rank] == "host":
        return {}
    return {"XVCOMM_DEVICE_INDEX": str(sum(kind != "host" for kind in kinds[:rank]))}
