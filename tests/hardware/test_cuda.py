"""Ranks on GPUs: alone, in islands, beside host ranks, and on NVIDIA's beside ranks of ROCm, whose libraries stand on CUDA's.

`cuda` stands for AMD's GPUs where there are no others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_checks
import numpy as np
import one_queue
import pytest
import repeated_calls

from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, ArrayError, PeerLost
from xvcomm.testing import (
    World,
    adapter,
    asynchronous,
    collectives,
    failures,
    frameworks,
    graphs,
    pointtopoint,
)
from xvcomm.testing.cases import SMALL_GPU_RINGS, assert_same_bits, reductions
from xvcomm.testing.signals import meet
from xvcomm.types.dtype import DTYPES

pytestmark = pytest.mark.gpu

SOON = 60.0
"""Seconds in which the last rank is waited for and dies, and the other ranks raise; two are expected for the latter."""

ALONE = {
    "one island of 1": ("cuda:1", "a"),
    "one island of 2": ("cuda:2", "a:2"),
    "1 and 1": ("cuda:2", "a,b"),
    "one island of 4": ("cuda:4", "a:4"),
    "2 and 2": ("cuda:4", "a:2,b:2"),
    "1 and 2": ("cuda:3", "a:1,b:2"),
    "2 and 2 in turns": ("cuda:4", "a,b,a,b"),
}
MIXED = {
    "cuda and host": ("cuda:1,host:1", None),
    "cuda and rocm": ("cuda:1,rocm:1", None),
    "2 cuda and 2 host": ("cuda:2,host:2", None),
    "2 cuda and 2 rocm": ("cuda:2,rocm:2", None),
    "cuda, rocm, host": ("cuda:1,rocm:1,host:1", None),
}
TABLE = ALONE | MIXED
COMPARED = (failures.check_mismatch, failures.check_mismatch_repeated)
BORDERS = ("1 and 1", "2 and 2", "cuda and rocm", "2 cuda and 2 rocm")
APART = ("1 and 1", "cuda and host", "cuda and rocm", "cuda, rocm, host")
"""Each rank is an island of its own."""
ONE_QUEUE = {"cuda": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "rocm": {"GPU_MAX_HW_QUEUES": "1"}}
Job = Callable[..., World]


@pytest.fixture(scope="module", params=TABLE)
def world(job: Job, request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks for all tests of one job. As docs/gpus.md asks for, they call each collective before messages wait for their peer."""
    with job(*TABLE[request.param]) as ranks:
        gpu_checks.every_collective(ranks, 3)
        yield ranks


@pytest.fixture(scope="module", params=ALONE)
def alone(job: Job, request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks on one kind of GPU only."""
    with job(*ALONE[request.param]) as ranks:
        yield ranks


@pytest.mark.parametrize("count", [0, 1, 1000, 65_537, 1_000_003])
def test_collectives(world: World, count: int) -> None:
    """From empty arrays to several times a ring."""
    gpu_checks.every_collective(world, count)


@pytest.mark.parametrize("count", [0, 1, 65_537, 1_000_003])
def test_messages(world: World, count: int) -> None:
    """From empty messages to many times a ring."""
    if world.size > 1:
        world.run(pointtopoint.check_blocking, "float32", count)
        world.run(pointtopoint.check_exchange, "float32", count)


@pytest.mark.parametrize(
    ("check", "args"),
    [
        *gpu_checks.others(3_000_001, 200),
        *((check, ()) for check in (*asynchronous.CHECKS, *failures.CHECKS)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_others(
    world: World, request: pytest.FixtureRequest, spread: bool, check: Callable[..., None], args: tuple[Any, ...]
) -> None:  # fmt: skip
    """Checks that are neither a single collective nor a single message."""
    if spread and request.node.callspec.params["world"] not in APART and check in COMPARED:
        pytest.skip("NCCL and RCCL carry out collectives of an island over hosts that only ranks of one host compare")
    if world.size > 1 or check.__module__ == collectives.__name__:
        world.run(check, *args)


@pytest.mark.parametrize("check", gpu_checks.REFUSALS)
def test_refusals(alone: World, check: Callable[..., None]) -> None:
    """Invalid input, including arrays of other devices and invalid stream handles."""
    alone.run(check)


@pytest.mark.parametrize("name", ["one island of 2", "1 and 1", "2 and 2", "2 cuda and 2 rocm"])
def test_dtypes(job: Job, name: str) -> None:
    """Every dtype with all its reductions."""
    with job(*TABLE[name]) as ranks:
        for dtype in DTYPES:
            ranks.run(collectives.check_reductions, dtype.name, [str(op) for op in reductions(dtype)])
            ranks.run(collectives.check_all_gather, dtype.name, 1001)
            ranks.run(pointtopoint.check_exchange, dtype.name, 1001)


@pytest.mark.parametrize(
    "name", ["1 and 1", "1 and 2", "2 and 2", "cuda and host", "cuda and rocm", "cuda, rocm, host"]
)
def test_averages(job: Job, name: str) -> None:
    """In low precision over islands: one rounding, after the division."""
    with job(*TABLE[name]) as ranks:
        ranks.run(collectives.check_averages)


@pytest.mark.usefixtures("one_host")
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("one island of 2", [[1], [0]]),
        ("1 and 1", [[], []]),
        ("2 and 2", [[1], [0], [3], [2]]),
        ("cuda and rocm", [[], []]),
        ("2 cuda and 2 rocm", [[1], [0], [3], [2]]),
    ],
)
def test_rings_in_gpu_memory(job: Job, name: str, wanted: list[list[int]]) -> None:
    """Within an island, between GPUs with peer access."""
    with job(*TABLE[name]) as ranks:
        assert ranks.run(pointtopoint.rings_in_gpu_memory, 1_000_003) == wanted


@pytest.mark.usefixtures("one_host")
def test_rings_in_gpu_memory_of_rocm(job: Job) -> None:
    """With HIP's memory handles, which are CUDA's here."""
    with job("rocm:2") as ranks:
        assert ranks.run(pointtopoint.rings_in_gpu_memory, 1_000_003) == [[1], [0]]


@pytest.mark.usefixtures("one_host")
def test_rings_of_full_size(job: Job) -> None:
    """Messages of many times a ring, with the maximum number of blocks; also with host memory."""
    small = dict.fromkeys(SMALL_GPU_RINGS, "")
    for env, wanted in (({}, [[1], [0]]), ({"XVCOMM_PEER_MEMORY": "0"}, [[], []])):
        with job("cuda:2", "a:2", small | env) as ranks:
            assert ranks.run(pointtopoint.rings_in_gpu_memory, 30_000_001) == wanted
            ranks.run(pointtopoint.check_exchange, "float32", 30_000_001)


@pytest.mark.parametrize("framework", frameworks.ON_GPUS)
def test_frameworks(alone: World, framework: str) -> None:
    """Arrays of torch and CuPy, of every dtype that they have."""
    why = alone.run(frameworks.missing, framework)[0]
    if why:
        pytest.skip(why)
    for check in adapter.CHECKS:
        if alone.size > 1 or check is adapter.check_collectives:
            alone.run(check, [framework])


@contextlib.contextmanager
def cupy_stream() -> Iterator[int]:
    """A stream of the user's, destroyed at the end."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    yield stream.ptr
    stream.synchronize()


def streams_that_end(comm: Communicator) -> None:
    repeated_calls.check_streams_that_end(comm, cupy_stream)
    if comm.size > 1:
        repeated_calls.check_late_messages_on_a_stream(comm, cupy_stream)


def test_different_timeouts(alone: World) -> None:
    if alone.size > 1:
        alone.run(repeated_calls.check_unlike_deadlines)


def test_destroyed_streams_are_not_used(alone: World) -> None:
    """A stream that the user may have destroyed is not used."""
    why = alone.run(frameworks.missing, "cupy")[0]
    if why:
        pytest.skip(why)
    alone.run(streams_that_end)


@pytest.mark.parametrize("check", graphs.CHECKS)
def test_graphs(alone: World, check: Callable[..., None]) -> None:
    """Operations captured in CUDA graphs by CuPy, with the native library and between islands."""
    if alone.size > 1:
        alone.run(check)


def torch_graphs(comm: Communicator) -> None:
    """Captured like a training step: on torch's own stream, in its strictest mode, with torch kernels in between."""
    import torch

    torch.cuda.set_device(comm.device_index)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y, total = (torch.zeros(100_000, device="cuda") for _ in range(3))

    def step() -> None:
        total.copy_(2 * x)
        comm.all_reduce(total)
        comm.sendrecv(total * comm.rank, after, y, before)
        work = comm.all_reduce(x, async_op=True)
        total.add_(1)
        work.wait()

    warming = torch.cuda.Stream()
    warming.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warming):
        step()
        step()
    torch.cuda.current_stream().wait_stream(warming)
    torch.cuda.synchronize()
    comm.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        want = np.full(100_000, value * comm.size, np.float32)
        assert_same_bits(x.cpu().numpy(), want, "asynchronous all_reduce in a graph")
        assert_same_bits(total.cpu().numpy(), 2 * want + 1, "all_reduce in a graph")
        assert_same_bits(y.cpu().numpy(), 2 * want * before, "sendrecv in a graph")
        step()
    assert_same_bits(x.cpu().numpy(), want * comm.size, "all_reduce outside of the graph")


def test_torch_graphs(alone: World) -> None:
    """`torch.cuda.graph` around operations."""
    why = alone.run(frameworks.missing, "torch")[0]
    if why:
        pytest.skip(why)
    if alone.size > 1:
        alone.run(torch_graphs)


def torch_streams(comm: Communicator) -> None:
    """Operations follow torch's current stream, and an explicit one."""
    import torch

    torch.cuda.set_device(comm.device_index)
    want = np.full(1 << 20, 3.0 * comm.size, np.float32)
    matrix = torch.rand(2000, 2000, device="cuda")
    comm.all_reduce(torch.ones(4, device="cuda"))
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 20, device="cuda")
            for _ in range(20):
                matrix = (matrix @ matrix).clamp(0, 1)
            x += 3
            comm.all_reduce(x)
            y = x.clone()
        stream.synchronize()
        assert_same_bits(y.cpu().numpy(), want, f"all_reduce on {stream}")
        torch.cuda.current_stream().wait_stream(stream)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = torch.zeros(1 << 20, device="cuda")
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(0, 1)
        x += 3
    comm.all_reduce(x, stream=side)
    side.synchronize()
    assert_same_bits(x.cpu().numpy(), want, "all_reduce with stream=")


def torch_elsewhere(comm: Communicator) -> None:
    """Tensors on another GPU, on the host, and freed ones, and streams of another GPU are refused; later operations work."""
    import torch

    index = comm.device_index
    torch.cuda.set_device(index)
    other = f"cuda:{1 - index}"
    there, here = torch.ones(4, device=other), torch.ones(4, device="cuda")
    for call, error in (
        (lambda: comm.all_reduce(there), ArrayError),
        (lambda: comm.all_reduce(here, out=there), ArrayError),
        (lambda: comm.send(torch.ones(4), 1 - comm.rank), ArrayError),
        (lambda: comm.all_reduce(here, stream=torch.cuda.Stream(other)), ArgumentError),
    ):
        with pytest.raises(error):
            call()
        assert comm.all_reduce(torch.ones(4, device="cuda")).tolist() == [float(comm.size)] * 4


@pytest.mark.parametrize("check", [torch_streams, torch_elsewhere])
@pytest.mark.parametrize("name", ["one island of 2", "1 and 1"])
def test_torch(job: Job, gpus: int, name: str, check: Callable[..., None]) -> None:
    """Checks that need a framework with streams and several GPUs."""
    if gpus < 2:
        pytest.skip("each rank names the other one's GPU, and there is one")
    with job(*TABLE[name]) as ranks:
        why = ranks.run(frameworks.missing, "torch")[0]
        if why:
            pytest.skip(why)
        ranks.run(check)


@pytest.mark.parametrize("name", BORDERS)
def test_one_hardware_queue(job: Job, vendor: str, name: str) -> None:
    """One hardware queue for all streams, as required by Megatron: no work is queued behind work that waits for it."""
    with job(*TABLE[name], env=ONE_QUEUE[vendor]) as ranks:
        for check, args in one_queue.CHECKS:
            ranks.run(check, *args)


@pytest.mark.parametrize("late", ["recv", "broadcast"])
@pytest.mark.parametrize("name", ["one island of 2"])
def test_loading(job: Job, name: str, late: str) -> None:
    """CUDA waits for the device to load NCCL's kernels, and recording an event waits for that: deadlines are kept."""
    with job(*TABLE[name]) as ranks:
        ranks.run(failures.check_deadline_beside_loading, late)


@pytest.mark.parametrize("name", ["one island of 2", "1 and 1", "cuda and host", "cuda and rocm", "2 and 2"])
def test_death(job: Job, name: str) -> None:
    """Operations that wait for a killed rank end with its name; the streams continue."""
    with job(*TABLE[name]) as ranks:
        ranks.run(meet)
        ranks.run(pointtopoint.rings_in_gpu_memory, 1000)
        victim = ranks.size - 1
        for rank in range(victim):
            ranks.submit(rank, failures.wait_for_last)
        ranks.submit(victim, failures.die_awaited)
        begun = time.monotonic()
        *outcomes, dead = ranks.collect()
        assert time.monotonic() - begun < SOON
        assert isinstance(dead, EOFError)
        for errors in outcomes:
            assert len(errors) == 3 and all(isinstance(e, PeerLost) and e.peer == victim for e in errors), errors
