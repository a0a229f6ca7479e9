"""Ranks on which Python launches every operation, XVCOMM_COMPILED_LAUNCH=0: the same results, to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import repeated_calls

from xvcomm.comm.communicator import Communicator
from xvcomm.testing import World, asynchronous, channels, collectives, pointtopoint
from xvcomm.testing.arrays import arrays, on_device
from xvcomm.testing.cases import SMALL_GPU_RINGS

JOBS: dict[str, dict[str, Any]] = {
    "host, one island": {"islands": "a:2"},
    "host, two islands": {"islands": "a:2,b:1"},
    "host, two hosts": {"islands": "a,b", "hosts": "x,y"},
    "rocm, one island": {"devices": "rocm:2"},
    "rocm, two islands": {"devices": "rocm:2", "islands": "a,b"},
    "rocm and host": {"devices": "rocm:1,host:1"},
}


def start(name: str, compiled: int, rocm_path: Path) -> World:
    libraries = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "4", **SMALL_GPU_RINGS} if "rocm" in name else {}
    return World(**JOBS[name], env={**libraries, "XVCOMM_COMPILED_LAUNCH": str(compiled)})


@pytest.fixture(scope="module", params=JOBS)
def name(request: pytest.FixtureRequest) -> str:
    if "rocm" in request.param:
        pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")
    return str(request.param)


@pytest.fixture(scope="module")
def plain(name: str, rocm_path: Path) -> Iterator[World]:
    """Ranks without compiled launches."""
    with start(name, 0, rocm_path) as world:
        yield world


def repeatedly(comm: Communicator) -> str:
    """Digest of what operations of the same shapes give, each called often enough to be launched by compiled code."""
    a, found, other = arrays(comm), hashlib.sha256(), (comm.rank + 1) % comm.size
    random = np.random.default_rng(comm.rank)
    with on_device(comm):
        for _ in range(5):
            for dtype in (np.float32, np.float16, np.int32):
                for count in (2, 3000, 70_000):
                    x = a.put((random.standard_normal(count) * 100).astype(dtype))
                    y = a.put(np.empty(count, dtype))
                    results = [
                        comm.all_reduce(x, out=y), comm.all_gather(x), comm.broadcast(x, 0),
                        comm.sendrecv(x, other, y, (comm.rank - 1) % comm.size),
                        comm.all_reduce(x, "avg", async_op=True).wait(),
                    ]  # fmt: skip
                    for result in results:
                        found.update(a.get(result).tobytes())
    return found.hexdigest()


def test_the_bits_are_the_same(name: str, plain: World, rocm_path: Path) -> None:
    with start(name, 1, rocm_path) as compiled:
        assert plain.run(repeatedly) == compiled.run(repeatedly)


def begun_by_python(comm: Communicator) -> int:
    """How many of ten equal all-reduces and messages each way Python has begun."""
    a, other, last = arrays(comm), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = a.put(np.ones(100)), a.put(np.empty(100))
    with repeated_calls.begun_by_python(comm) as begun:
        for _ in range(10):
            comm.all_reduce(x, "max")
            comm.sendrecv(x, other, y, last)
    return begun.call_count


def test_python_launches_everything(plain: World) -> None:
    """Otherwise the tests here would prove nothing."""
    assert plain.run(begun_by_python) == [30] * plain.size


@pytest.mark.parametrize("count", [0, 1, 1000, 65_537])
def test_collectives(plain: World, count: int) -> None:
    plain.run(collectives.check_all_reduce, "float32", "sum", count)
    plain.run(collectives.check_reduce_scatter, "float32", "sum", count // 3)
    for check in (collectives.check_broadcast, collectives.check_all_gather, collectives.check_all_to_all):
        plain.run(check, "float32", count // 3)


def test_messages(plain: World) -> None:
    plain.run(pointtopoint.check_blocking, "float32", 5000)
    plain.run(pointtopoint.check_exchange, "float32", 5000)
    plain.run(pointtopoint.check_order, 20)
    plain.run(channels.check_probe)


def test_asynchronous(plain: World) -> None:
    plain.run(collectives.check_async, 20)
    plain.run(asynchronous.check_many_under_way)
    plain.run(pointtopoint.check_many_in_flight, 20)
