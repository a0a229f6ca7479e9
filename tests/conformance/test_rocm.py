"""Ranks on ROCm with libraries that simulate AMD's on host memory: alone, in islands, and beside host ranks.

Everything but the GPU is real: hip-python, the kernels' source, and asynchronous streams.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_checks
import msgspec
import numpy as np
import one_queue
import pytest
import repeated_calls

from xvcomm.comm.communicator import Communicator
from xvcomm.errors import BackendUnavailable, PeerLost
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.testing import (
    World,
    asynchronous,
    channels,
    collectives,
    failures,
    graphs,
    pointtopoint,
)
from xvcomm.testing.arrays import DeviceArrays, arrays, on_device
from xvcomm.testing.cases import SMALL_GPU_RINGS, reductions
from xvcomm.testing.inside import context
from xvcomm.testing.signals import SECONDS, meet
from xvcomm.types.dtype import DTYPES
from xvcomm.types.opcode import OpCode

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")

SOON = 60.0
"""Seconds in which a rank is waited for and dies, and survivors notice; two are specified for the latter on an idle machine."""

ALONE = {
    "rocm:2": {"devices": "rocm:2"},
    "rocm:1 and rocm:1": {"devices": "rocm:2", "islands": "a,b"},
}
MIXED = {
    "rocm:2, host:2": {"devices": "rocm:2,host:2"},
    "host:2, rocm:1, host:1": {"devices": "host:2,rocm:1,host:1"},
}
TABLE = ALONE | MIXED
PAIR = {"rocm:1, host:1": {"devices": "rocm:1,host:1"}}
FOUR = {"rocm:4": {"devices": "rocm:4"}, "rocm:2 and rocm:2": {"devices": "rocm:4", "islands": "a:2,b:2"}}
Job = Callable[..., World]


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test with the ranks of these jobs, and not with those of `TABLE`."""
    return pytest.mark.parametrize("world", names, indirect=True)


@pytest.fixture(scope="session")
def environment(rocm_path: Path) -> dict[str, str]:
    """Variables with which ranks find the libraries."""
    return {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "4", **SMALL_GPU_RINGS}


@pytest.fixture(scope="session")
def job(environment: Mapping[str, str]) -> Job:
    """Starts ranks by a name of the table, with additional variables."""
    return lambda name, **further: World(**(TABLE | PAIR | FOUR)[name], env={**environment, **further})


@pytest.fixture(scope="module", params=TABLE)
def world(job: Job, request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks that serve all tests of one job."""
    with job(request.param) as ranks:
        yield ranks


def kinds(comm: Communicator) -> list[str]:
    return list(comm.devices)


def test_ranks_use_the_requested_devices(world: World, request: pytest.FixtureRequest) -> None:
    """Precondition of the tests below."""
    (found, *others) = world.run(kinds)
    assert set(found) <= {"rocm", "host"} and "rocm" in found
    assert ("host" in found) == (request.node.callspec.params["world"] in MIXED)
    assert all(other == found for other in others)


@pytest.mark.parametrize("count", [0, 1, 1000, 65_537])
def test_collectives(world: World, count: int) -> None:
    """From empty arrays to several times a ring."""
    gpu_checks.every_collective(world, count)


@pytest.mark.parametrize("count", [0, 1, 65_537])
def test_messages(world: World, count: int) -> None:
    """From empty messages to many times a ring."""
    world.run(pointtopoint.check_blocking, "float32", count)
    world.run(pointtopoint.check_exchange, "float32", count)


@pytest.mark.parametrize(
    ("check", "args"),
    gpu_checks.others(300_001, 100),
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_others(world: World, check: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Operations that are neither a single collective nor a single message."""
    world.run(check, *args)


@pytest.mark.parametrize("check", asynchronous.CHECKS, ids=lambda check: check.__name__)
def test_order(world: World, check: Callable[..., None]) -> None:
    """Which operations are ordered, and which calls do not block."""
    world.run(check)


@pytest.mark.parametrize("check", failures.CHECKS, ids=lambda check: check.__name__)
def test_errors(world: World, check: Callable[..., None]) -> None:
    """Errors are raised by `synchronize` and by the next operation."""
    world.run(check)


@on("rocm:4")
def test_errors_on_four_ranks(world: World) -> None:
    """If other ranks stop the native library first, a rank's kernels end as on success."""
    for check in failures.CHECKS:
        world.run(check)


@on(*FOUR)
def test_repeated_calls_on_four_ranks(world: World) -> None:
    """With islands of several members, compiled code also starts the steps inside them."""
    world.run(repeated_calls.check_forms_repeated, 480)
    world.run(repeated_calls.check_forms_repeated, 240_000)  # more than a ring holds
    world.run(repeated_calls.check_uneven_repeated)
    world.run(graphs.check_graph_of_few)


def sizes_of_rings(comm: Communicator) -> tuple[list[int], list[str]]:
    """Bytes of shared memory of each ring that a first short sum has opened, and what carries it and a long one."""
    collectives.check_all_reduce(comm, "float32", "sum", 2)
    sizes = [end.layout.size for end in context(comm).rings.ends()]
    collectives.check_all_reduce(comm, "float32", "sum", 1 << 18)
    return sizes, [record.way for record in comm.history() if record.op == OpCode.ALL_REDUCE]


def test_short_sums_take_little_memory(job: Job) -> None:
    """Containers have 64 MB of shared memory, and each rank has rings to and from all others."""
    with job("rocm:2 and rocm:2") as ranks:
        for sizes, ways in ranks.run(sizes_of_rings):
            assert len(sizes) == 6 and max(sizes) < 300 << 10
            assert (ways[0], ways[-1]) == ("shm", "rccl + shm")  # a short sum calls no native library


@pytest.mark.parametrize("check", gpu_checks.REFUSALS)
@on(*ALONE)
def test_refusals(world: World, check: Callable[..., None]) -> None:
    """Invalid input, including arrays on other devices and handles that are not streams."""
    world.run(check)


def test_delayed_streams(job: Job) -> None:
    """Missing ordering shows if each operation of a stream runs late."""
    with job("rocm:2, host:2", HIPHOST_DELAY_US="1000") as ranks:
        ranks.run(collectives.check_all_reduce, "float32", "sum", 10_001)
        ranks.run(collectives.check_all_gather, "int64", 1001)
        ranks.run(collectives.check_all_to_all, "int64", 101)
        ranks.run(pointtopoint.check_exchange, "float32", 10_001)
        for check in (*asynchronous.CHECKS, channels.check_channels_pass, channels.check_probe_behind_receives):
            ranks.run(check)


def join_two_at_once(comm: Communicator) -> None:
    """First operations of two communicators in two threads; the last rank completes the second join first."""
    from xvcomm.backends.rocm.library import RcclLibrary

    groups = [comm.split(0), comm.split(0, -comm.rank)]
    join, calls, held, through = RcclLibrary.join, itertools.count(), threading.Event(), threading.Event()

    def held_back(library: RcclLibrary, unique_id: bytes, members: int, me: int) -> int:
        if next(calls) == 0:
            held.set()
            assert through.wait(SECONDS), "the second could not be joined while the first was"
            return join(library, unique_id, members, me)
        made = join(library, unique_id, members, me)
        through.set()
        return made

    holds = comm.rank == comm.size - 1
    with mock.patch.object(RcclLibrary, "join", held_back if holds else join), ThreadPoolExecutor(2) as threads:
        works = [threads.submit(collectives.check_all_reduce, groups[0], "float32", "sum", 3001)]
        assert not holds or held.wait(SECONDS)
        works.append(threads.submit(collectives.check_all_reduce, groups[1], "float32", "sum", 3001))
        for work in works:
            work.result(SECONDS)
    for group in groups:
        group.close()
    comm.barrier()


@pytest.mark.parametrize("name", ["rocm:2", "rocm:4"])
def test_joining_several_at_once(job: Job, name: str) -> None:
    """While a rank waits in the library for one communicator's members, it can join another communicator."""
    with job(name) as ranks:
        for _ in range(3):
            ranks.run(join_two_at_once)


def has_no_library(comm: Communicator) -> None:
    """Collectives and messages across islands, and doctor's output."""
    collectives.check_all_reduce(comm, "float32", "sum", 3001)
    collectives.check_all_gather(comm, "int64", 101)
    pointtopoint.check_exchange(comm, "float32", 1001)
    reason, remedy = context(comm).session.backend.lacks() or ("", "")
    assert comm.device == "host" or ("VendorError" in reason and "xvcomm[rocm]" in remedy), reason


def test_one_gpu_needs_no_library(job: Job, environment: Mapping[str, str], tmp_path: Path) -> None:
    """An island of one rank never needs RCCL; two GPUs that need it get an error that says what is missing."""
    shutil.copytree(environment["ROCM_PATH"], tmp_path / "rocm")
    (tmp_path / "rocm" / "lib" / "librccl.so").unlink()
    with job("rocm:1, host:1", ROCM_PATH=str(tmp_path / "rocm")) as ranks:
        ranks.run(has_no_library)
    with job("rocm:2", ROCM_PATH=str(tmp_path / "rocm")) as ranks:
        for rank in range(2):
            ranks.submit(rank, collectives.check_all_reduce, "float32", "sum", 10)
        outcomes = ranks.collect()
        assert all("librccl.so: cannot open" in str(outcome) for outcome in outcomes), outcomes
        assert any(isinstance(outcome, BackendUnavailable) for outcome in outcomes), outcomes


@on("rocm:2", *PAIR)
def test_dtypes(world: World) -> None:
    """Every dtype, and every reduction with some of them, by the native library and by the movers."""
    for dtype in DTYPES:
        ops = [str(op) for op in reductions(dtype)]
        some = ops if dtype.name in ("float32", "int32") else ops[dtype.code % len(ops) :][:1]
        world.run(collectives.check_reductions, dtype.name, some)
        world.run(collectives.check_all_gather, dtype.name, 1001)
        world.run(pointtopoint.check_exchange, dtype.name, 1001)


def temporary_results(comm: Communicator) -> list[float]:
    """The contents of a result when it is returned, after its temporary memory has been freed."""
    a, beside, found = arrays(comm), DeviceArrays(context(comm).device), list[float]()
    x, y = a.put(np.full(16, comm.rank + 1.0, np.float32)), a.put(np.zeros(16, np.float32))
    a.synchronize()
    temporary = msgspec.structs.replace(array.view(y), staged=True)

    def finish(view: ArrayView) -> None:
        found.append(float(beside.get(y)[0]))

    with on_device(comm), mock.patch.object(array, "finish", finish):
        for call in (
            lambda: comm.all_reduce(x, out=temporary, stream=a.handle),
            lambda: comm.sendrecv(x, 1 - comm.rank, temporary, 1 - comm.rank, stream=a.handle),
        ):
            for _ in range(4):
                a.fill(y, np.zeros(16, np.float32))
                comm.barrier()
                time.sleep(0.1 * comm.rank)
                call()
    return found


@on(*ALONE)
def test_temporary_results(world: World) -> None:
    """As for JAX's arrays: the host also waits if the user gives a stream."""
    assert world.run(temporary_results) == [[3.0] * 4 + [2.0] * 4, [3.0] * 4 + [1.0] * 4]


def averages_alone(comm: Communicator) -> None:
    """A communicator of one rank whose thread has another current device."""
    from rocm.bindings import hip

    a = arrays(comm)
    x, y = a.put(np.ones(8, np.float32)), a.put(np.zeros(8, np.float32))
    a.synchronize()
    for _ in range(4):
        comm.all_reduce(x, "avg", out=y, stream=0)
    with on_device(comm):
        assert hip.hipStreamSynchronize(0) == (hip.hipError_t.hipSuccess,)
    assert (a.get(y) == 1).all() and comm.device_index == 1


def test_default_stream_of_another_device(environment: Mapping[str, str]) -> None:
    """Its handle equals that of the current device's default stream; cached calls must not use that one."""
    with World(devices="rocm:1", env={**environment, "XVCOMM_DEVICE_INDEX": "1"}) as ranks:
        ranks.run(averages_alone)


@on(*ALONE)
@pytest.mark.parametrize("check", graphs.CHECKS)
def test_graphs(world: World, check: Callable[..., None]) -> None:
    """Operations captured in a HIP graph, by the native library and across islands."""
    world.run(check)


@pytest.mark.parametrize("name", ALONE)
def test_one_queue(job: Job, name: str) -> None:
    """One hardware queue for all streams: no operation is queued behind one that waits for it."""
    with job(name, GPU_MAX_HW_QUEUES="1") as ranks:
        for check, args in one_queue.CHECKS:
            ranks.run(check, *args)


@pytest.mark.parametrize("late", ["recv", "broadcast"])
def test_loading(job: Job, late: str) -> None:
    """Loading waits for the device, and callers wait for loading; deadlines are met all the same."""
    with job("rocm:2", HIPHOST_LAZY="1") as ranks:
        ranks.run(failures.check_deadline_beside_loading, late)


def test_death(world: World) -> None:
    """Operations that wait for a killed rank fail with its number; the streams continue."""
    world.run(meet)
    victim = world.size - 1
    for rank in range(victim):
        world.submit(rank, failures.wait_for_last)
    world.submit(victim, failures.die_awaited)
    begun = time.monotonic()
    *outcomes, dead = world.collect()
    world.retire()
    assert time.monotonic() - begun < SOON
    assert isinstance(dead, EOFError)
    for errors in outcomes:
        assert len(errors) == 3 and all(isinstance(e, PeerLost) and e.peer == victim for e in errors), errors
