"""Fixtures of the tests on GPUs: availability and number of GPUs, and ranks on them."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.testing import World
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.types.topology import parse_islands

# For checks that these have for the ROCm backend, here and on the ranks.
sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("conformance", "faults")]

Job = Callable[..., World]
SHARE = "SHARE_GPUS"
"""If set, islands of ranks share GPUs if there are too few: time slices are about two milliseconds long."""
SPREAD = "SPREAD_RANKS"
"""If set, each rank of a job that names no hosts is labelled as on a host of its own, so that rings go over TCP."""
JAX = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Otherwise JAX would allocate most of the memory of all GPUs that a rank sees, including other ranks'."""


@pytest.fixture(scope="session")
def vendor() -> str:
    """Type of this machine's GPUs: `cuda`, or `rocm` if there are no NVIDIA GPUs."""
    found = {backend.name: backend for backend in plugins.backends()}
    for name in ("cuda", "rocm"):
        if found[name].usable:
            return name
    pytest.skip("; ".join(f"{name}: {found[name].reason}; {found[name].remedy}" for name in ("cuda", "rocm")))


@pytest.fixture(scope="session")
def gpus(vendor: str) -> int:
    """Number of GPUs that the vendor's runtime sees."""
    count: int = plugins.backend(vendor).device(Config()).runtime.count()  # type: ignore[attr-defined]
    return count


@pytest.fixture(scope="session")
def spread() -> bool:
    """Whether each rank is labelled as on a host of its own."""
    return bool(os.environ.get(SPREAD))


@pytest.fixture
def one_host(spread: bool) -> None:
    """Skips where ranks are on several hosts."""
    if spread:
        pytest.skip("GPUs of two hosts do not reach each other's memory")


@pytest.fixture(scope="session")
def rocm_on_cuda(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of ranks whose ROCm libraries forward to CUDA."""
    builder = runpy.run_path(str(root / "tests" / "shims" / "hip_on_cuda" / "build.py"))
    try:
        return dict(builder["environment"](builder["build"](tmp_path_factory.mktemp("rocm"))))
    except builder["CannotBuild"] as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def places(vendor: str, gpus: int) -> Callable[[str], tuple[str, ...]]:
    """Returns each rank's device type; skips if the machine lacks a device.

    Jobs are written for NVIDIA's GPUs. On AMD's, `cuda` means those; jobs with ranks of both vendors only run on NVIDIA's,
    where ROCm's libraries forward to CUDA's.
    """

    def place(devices: str) -> tuple[str, ...]:
        kinds = parse_islands(devices)
        if vendor == "rocm" and {"cuda", "rocm"} <= set(kinds):
            pytest.skip("ranks on CUDA beside ranks on ROCm: only by ROCm's libraries over CUDA's, on NVIDIA GPUs")
        wanted = sum(kind != "host" for kind in kinds)
        if wanted > gpus and not os.environ.get(SHARE):
            pytest.skip(f"{wanted} ranks on GPUs, and {gpus} GPUs (with {SHARE}=1 islands share them, slowly)")
        return tuple(vendor if kind == "cuda" else kind for kind in kinds)

    return place


@pytest.fixture(scope="session")
def libraries(vendor: str, request: pytest.FixtureRequest) -> Callable[[str], dict[str, str]]:
    """Returns the variables by which ranks on a device type find its libraries."""

    def of(kind: str) -> dict[str, str]:
        forwarded = kind == "rocm" and vendor == "cuda"
        return dict(request.getfixturevalue("rocm_on_cuda")) if forwarded else {}

    return of


@pytest.fixture(scope="session")
def job(
    places: Callable[[str], tuple[str, ...]], gpus: int, libraries: Callable[[str], dict[str, str]],
) -> Job:  # fmt: skip
    """Starts ranks on device types, each on its own GPU; skips if there are too few."""

    def start(
        devices: str, islands: str | None = None, env: Mapping[str, str] | None = None, hosts: str | None = None
    ) -> World:
        kinds = places(devices)
        if hosts is None and os.environ.get(SPREAD):
            hosts = ",".join(f"host{rank}" for rank in range(len(kinds)))
        indices = _gpus(kinds, parse_islands(islands) if islands else kinds, gpus)
        ranks = World(islands=islands, devices=",".join(kinds), hosts=hosts, env=[
            {**SMALL_GPU_RINGS, **JAX, **libraries(kind), **indices[rank], **(env or {})}
            for rank, kind in enumerate(kinds)
        ], timeout=60)  # fmt: skip
        return ranks

    return start


def _gpus(kinds: Sequence[str], labels: Sequence[str], gpus: int) -> list[dict[str, str]]:
    """Each rank's GPU; ranks of both vendors number the same GPUs.

    If there are too few, the islands share them, since no vendor's library joins two ranks of one GPU.
    """
    on_gpus = [rank for rank, kind in enumerate(kinds) if kind != "host"]
    if len(on_gpus) <= gpus:
        places = {rank: place for place, rank in enumerate(on_gpus)}
    else:
        places = {rank: sum(labels[other] == labels[rank] for other in on_gpus if other < rank) for rank in on_gpus}
    if max(places.values(), default=0) >= gpus:
        pytest.skip(f"an island of {max(places.values()) + 1} ranks, and {gpus} GPUs")
    return [{"XVCOMM_DEVICE_INDEX": str(places[rank])} if rank in places else {} for rank in range(len(kinds))]
