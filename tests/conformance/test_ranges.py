"""Operations as ranges in a profiler: ranks on ROCm over tests/shims/hip, whose ROCTx is a stand-in that writes to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.stream_collectives import StreamCollectives
from xvcomm.engine.stream_messages import StreamMessages
from xvcomm.testing import World
from xvcomm.testing.arrays import arrays
from xvcomm.testing.cases import SMALL_GPU_RINGS

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")


@pytest.fixture
def ranges(tmp_path: Path) -> Path:
    """The file that rank 0's ranges come to."""
    return tmp_path / "ranges"


def start(rocm_path: Path, ranges: Path, **further: str) -> World:
    """A rank on ROCm, whose ranges are written, and one on host memory; in islands, so that messages go over rings."""
    common = {"ROCM_PATH": str(rocm_path), **SMALL_GPU_RINGS, **further}
    return World(devices="rocm:1,host:1", env=[{**common, "HIPHOST_RANGES": str(ranges)}, common])


@pytest.fixture
def world(rocm_path: Path, ranges: Path) -> Iterator[World]:
    with start(rocm_path, ranges, XVCOMM_RANGES="1") as ranks:
        yield ranks


def operations(comm: Communicator) -> None:
    a = arrays(comm)
    x, y = a.put(np.ones(6, np.float32)), a.put(np.ones(3, np.int64))
    for _ in range(4):  # from the third time on compiled code launches it
        comm.all_reduce(x)
    comm.broadcast(y, 0, async_op=True).wait()
    comm.barrier()
    other = 1 - comm.rank
    if comm.rank == 0:
        comm.send(y, other)
        comm.irecv(y, other).synchronize()
    else:
        comm.recv(y, other)
        comm.isend(y, other).synchronize()
    comm.sendrecv(x, other, a.put(np.ones(6, np.float32)), other)


def test_every_operation_is_a_range(world: World, ranges: Path) -> None:
    world.run(operations)
    assert ranges.read_text().splitlines() == [
        *["xvcomm:all_reduce 6 x float32"] * 4, "xvcomm:broadcast 3 x int64", "xvcomm:barrier",
        "xvcomm:send 3 x int64 to rank 1", "xvcomm:recv 3 x int64 from rank 1", "xvcomm:2 messages, 48 bytes",
    ]  # fmt: skip


def kinds(comm: Communicator) -> list[type]:
    return [type(comm.collectives), type(comm.messages)]


def test_ranges_are_off_by_default(rocm_path: Path, ranges: Path) -> None:
    with start(rocm_path, ranges) as world:
        world.run(operations)
        first, _ = world.run(kinds)
    assert not ranges.exists() and first == [StreamCollectives, StreamMessages]
