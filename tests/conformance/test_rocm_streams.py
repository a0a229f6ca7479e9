"""ROCm ranks as in test_rocm: asynchronous work on streams that the user creates and destroys, and in threads."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import repeated_calls

from xvcomm.comm.communicator import Communicator
from xvcomm.testing import World
from xvcomm.testing.arrays import DeviceArrays, arrays, on_device
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.inside import context

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")


@pytest.fixture(scope="module", params=["a:2", "a,b"])
def alone(rocm_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks, in one island and in two."""
    env = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "2", **SMALL_GPU_RINGS}
    with World(devices="rocm:2", islands=request.param, env=env) as ranks:
        yield ranks


def test_different_timeouts(alone: World) -> None:
    alone.run(repeated_calls.check_unlike_deadlines)


def dropped(comm: Communicator) -> None:
    """Operations on streams that have not run yet."""
    a = arrays(comm)
    x = a.put(np.ones(1000))
    sub = comm.split(0)
    for _ in range(4):
        sub.all_reduce(x)
    caller = weakref.ref(sub.collectives)
    del sub
    gc.collect()
    assert caller() is not None, "its memory would be somebody else's while they use it"
    a.synchronize()


def test_a_communicator_that_is_garbage_collected(alone: World) -> None:
    alone.run(dropped)


def threads_that_receive(comm: Communicator) -> None:
    """Several threads receive from one rank, each on its own stream, beside a thread that keeps the GIL busy."""
    a, count, rounds = arrays(comm), 4, 8
    parts = [a.put(np.zeros(1000)) for _ in range(count)]
    mine = [DeviceArrays(context(comm).device) for _ in range(count)]
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            sum(range(100))

    def receive(number: int) -> None:
        with on_device(comm):
            comm.recv(parts[number], 1, stream=mine[number].handle)

    a.synchronize()
    with ThreadPoolExecutor(count + 1) as pool:
        pool.submit(busy)
        try:
            for number in range(rounds):
                if comm.rank == 0:
                    list(pool.map(receive, range(count)))
                for index in range(count):
                    if comm.rank == 1:
                        time.sleep(0.2 if number and index == count - 1 else 0)
                        comm.send(parts[index], 0)
                for stream in mine:
                    stream.synchronize()
                comm.check()
                comm.barrier()
        finally:
            stop.set()


def test_threads_that_receive(alone: World) -> None:
    """No thread receives another thread's message."""
    alone.run(threads_that_receive)


@contextlib.contextmanager
def hip_stream() -> Iterator[int]:
    """A stream of the user, destroyed at the end."""
    from rocm.bindings import hip

    _, made = hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking)
    yield int(made)
    assert [hip.hipStreamSynchronize(made), hip.hipStreamDestroy(made)] == [(hip.hipError_t.hipSuccess,)] * 2


def streams_that_end(comm: Communicator) -> None:
    repeated_calls.check_streams_that_end(comm, hip_stream)
    if comm.size > 1:
        repeated_calls.check_late_messages_on_a_stream(comm, hip_stream)


def test_destroyed_streams_are_not_used(alone: World) -> None:
    """xvcomm does not access streams that the user may have destroyed."""
    alone.run(streams_that_end)
