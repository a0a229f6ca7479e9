"""CuPy's arrays on GPUs: streams, memory pool, methods of `cupyx.distributed`, and ranks with numpy and JAX on host memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xvcomm.adapters.cupy import NCCLBackend
from xvcomm.comm.communicator import Communicator
from xvcomm.testing import World, adapter
from xvcomm.testing.cases import assert_same_bits
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals, await_that

pytestmark = pytest.mark.gpu
pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'xvcomm[cuda]'")

LARGE = 8 << 20
"""Elements of float32 that exceed every ring."""

_STOCK = 8
"""Maximum number of such arrays that are allocated between an operation and its end."""

ALONE = {
    "one island of 2": ("cuda:2", "a:2"),
    "1 and 1": ("cuda:2", "a,b"),
    "2 and 2": ("cuda:4", "a:2,b:2"),
}
MEETINGS = {
    "cupy and numpy": ("cuda:1,host:1", ("cupy", "numpy")),
    "numpy and cupy": ("host:1,cuda:1", ("numpy", "cupy")),
    "cupy and jax": ("cuda:1,host:1", ("cupy", "jax")),
    "torch and jax": ("cuda:1,host:1", ("torch", "jax")),
    "cupy and torch": ("cuda:2", ("cupy", "torch")),
    "torch and cupy": ("cuda:2", ("torch", "cupy")),
}
Job = Callable[..., World]


@pytest.fixture(scope="module", params=ALONE)
def world(job: Job, request: pytest.FixtureRequest) -> Iterator[World]:
    """Ranks on CUDA."""
    with job(*ALONE[request.param]) as ranks:
        yield ranks


@pytest.mark.parametrize("name", MEETINGS)
def test_arrays_meet(job: Job, name: str) -> None:
    """Arrays of two frameworks in one communicator: the conformance suite of adapters."""
    devices, frameworks = MEETINGS[name]
    with job(devices) as ranks:
        why = ranks.run(adapter.missing, frameworks)[0]
        if why:
            pytest.skip(why)
        for check in adapter.CHECKS:
            ranks.run(check, frameworks)


def at_home(comm: Communicator) -> Any:
    """CuPy on this rank's GPU."""
    import cupy

    cupy.cuda.Device(comm.device_index).use()
    return cupy


def dense(comm: Communicator) -> None:
    """Every method, on CuPy's current stream, on another one that is current, and on an explicit one."""
    cupy, group = at_home(comm), NCCLBackend.over(comm)
    side = cupy.cuda.Stream(non_blocking=True)
    _dense(cupy, group, None)
    with side:
        _dense(cupy, group, None)
    side.synchronize()
    with side:  # so that what the methods are given is made where they work
        _dense(cupy, group, side)
        _dense(cupy, group, side.ptr)
    side.synchronize()


def _dense(cupy: Any, group: NCCLBackend, stream: Any) -> None:
    rank, size = group.rank, group.communicator.size
    last, partner = size - 1, rank ^ 1
    for kind in ("int8", "int32", "uint64", "float16", "float32", "float64", "complex64", "complex128"):
        base, ones = np.arange(1000), np.ones(1000)
        x, out = cupy.asarray((base % 7 + rank).astype(kind)), cupy.zeros(1000, kind)
        total = (size * (base % 7) + sum(range(size))).astype(kind)
        group.all_reduce(x, out, "sum", stream)
        _same(cupy, out, total, "all_reduce")
        group.all_reduce(x, x, stream=stream)
        _same(cupy, x, total, "all_reduce in place")
        x, out = cupy.full(1000, 2, kind), cupy.zeros(1000, kind)
        group.reduce(x, out, last, "prod", stream)
        _same(cupy, out, (ones * 2**size if rank == last else 0 * ones).astype(kind), "reduce")
        y = cupy.full(1000, rank, kind)
        group.broadcast(y, last, stream)
        _same(cupy, y, (ones * last).astype(kind), "broadcast")
        part = cupy.zeros(10, kind)
        group.reduce_scatter(cupy.arange(10 * size).astype(kind), part, 10, stream=stream)
        _same(cupy, part, (size * np.arange(10 * rank, 10 * rank + 10)).astype(kind), "reduce_scatter")
        rows, ranks = cupy.zeros((size, 10), kind), np.repeat(np.arange(size), 10).reshape(size, 10).astype(kind)
        group.all_gather(cupy.full(10, rank, kind), rows, 10, stream)
        _same(cupy, rows, ranks, "all_gather")
        rows = cupy.zeros((size, 10), kind)
        group.gather(cupy.full(10, rank, kind), rows, last, stream)
        _same(cupy, rows, ranks if rank == last else 0 * ranks, "gather")
        y = cupy.zeros(10, kind)
        group.scatter(cupy.asarray(ranks), y, 0, stream)
        _same(cupy, y, ranks[rank], "scatter")
        rows = cupy.zeros((size, 10), kind)
        group.all_to_all(cupy.full((size, 10), rank, kind), rows, stream)
        _same(cupy, rows, ranks, "all_to_all")
        if partner < size:
            y = cupy.zeros(10, kind)
            group.send_recv(cupy.full(10, rank, kind), y, partner, stream)
            _same(cupy, y, ranks[partner], "send_recv")
            if rank < partner:
                group.send(cupy.full(10, 9, kind), partner, stream)
            else:
                group.recv(y, partner, stream)
                _same(cupy, y, np.full(10, 9).astype(kind), "recv")
    fortran, out = cupy.asfortranarray(cupy.arange(12.0).reshape(3, 4) + rank), cupy.zeros((3, 4), order="F")
    group.all_reduce(fortran, out, "max", stream)
    _same(cupy, out, np.arange(12.0).reshape(3, 4) + last, "all_reduce in Fortran's order")


def _same(cupy: Any, got: Any, want: Any, what: str) -> None:
    """Compare on the current stream, after the enqueued work."""
    assert_same_bits(np.ascontiguousarray(cupy.asnumpy(got)), np.ascontiguousarray(want), what)


def thin(comm: Communicator) -> None:
    """Sparse matrices of cupyx with every method."""
    cupy, group = at_home(comm), NCCLBackend.over(comm)
    from cupyx.scipy import sparse

    rank, size = comm.rank, comm.size
    tables = []
    for r in range(size):
        table = np.zeros((5, 5), "f")
        table[r % 5, : r + 1] = np.arange(1, r + 2)[:5]
        tables.append(table)
    total = sum(tables)
    for kind in ("csr", "csc", "coo"):
        made = getattr(sparse, f"{kind}_matrix")
        mine = made(cupy.asarray(tables[rank]))

        def empty(made: Any = made) -> Any:
            return made(cupy.zeros((5, 5), "f"))

        out = empty()
        group.all_reduce(mine, out)
        assert (out.toarray().get() == total).all(), kind
        out = made(cupy.asarray(tables[rank]))
        group.broadcast(out, size - 1)
        assert (out.toarray().get() == tables[-1]).all(), kind
        found: list[Any] = []
        group.all_gather(mine, found, 0)
        assert all((a.toarray().get() == b).all() for a, b in zip(found, tables, strict=True)), kind
        out = empty()
        group.scatter([made(cupy.asarray(t)) for t in tables] if rank == 0 else None, out)
        assert (out.toarray().get() == tables[rank]).all(), kind
        found = []
        group.all_to_all([made(cupy.asarray(tables[rank] * (r + 1))) for r in range(size)], found)
        assert all((a.toarray().get() == b * (rank + 1)).all() for a, b in zip(found, tables, strict=True)), kind
        out, partner = empty(), rank ^ 1
        if partner < size:
            group.send_recv(mine, out, partner)
            assert (out.toarray().get() == tables[partner]).all(), kind
        out = empty()
        group.reduce_scatter([made(cupy.asarray(tables[rank])) for _ in range(size)], out, 0)
        assert (out.toarray().get() == total).all(), kind


def freed_while_under_way(comm: Communicator) -> None:
    """The memory of a freed array is not reused until no operation on the GPU uses it.

    Rank 0's operations wait for the others, which come late. Meanwhile rank 0 frees its arrays, and allocates memory of the
    same size from the pool on the same stream repeatedly.
    """
    cupy, signals = at_home(comm), Signals(comm)
    group, side = NCCLBackend.over(comm), cupy.cuda.Stream(non_blocking=True)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    calls: dict[str, Callable[[Any], Any]] = {
        "isend": lambda x: comm.isend(x, after),
        "asynchronous all_reduce": lambda x: comm.all_reduce(x, async_op=True),
        "asynchronous all_gather": lambda x: comm.all_gather(x, async_op=True),
        "send on a stream that is given": lambda x: group.send(x, after, side),
        "all_reduce on a stream that is given": lambda x: group.all_reduce(x, x, "sum", side),
    }
    for what, call in calls.items():  # once, so that nothing is done for the first time when it matters
        _step(comm, cupy, what, call, before)
    stock = [cupy.empty(LARGE, "float32") for _ in range(_STOCK)]  # to be had later without asking the driver
    del stock
    cupy.cuda.Device().synchronize()
    for what, call in calls.items():
        if comm.rank != 0:
            signals.hear(what, [0])
            _step(comm, cupy, what, call, before)
            cupy.cuda.Device().synchronize()
            continue
        x = cupy.full(LARGE, 1.0, "float32")
        cupy.cuda.get_current_stream().synchronize()
        place = x.data.ptr
        result = call(x)
        del x, result
        gc.collect()
        litter = [cupy.full(LARGE, -7.0, "float32") for _ in range(4)]
        assert place not in [y.data.ptr for y in litter], f"{what}: the pool has given its memory away"
        signals.tell(what)
        if "send" in what:
            _receive(comm, cupy, before)
        cupy.cuda.Device().synchronize()
        del litter

        everything = cupy.get_default_memory_pool().total_bytes() // (4 * LARGE) + 1

        def given_back(place: int = place, everything: int = everything) -> bool:
            group._kept.add(None)
            context(comm).tracker.poll()
            gc.collect()
            return place in [y.data.ptr for y in [cupy.empty(LARGE, "float32") for _ in range(everything)]]

        await_that(given_back)


def _step(comm: Communicator, cupy: Any, what: str, call: Callable[[Any], Any], before: int) -> None:
    """A rank's part in an operation; checks the received data."""
    x = cupy.full(LARGE, 1.0, "float32")
    cupy.cuda.get_current_stream().synchronize()  # for the streams that are given
    result = call(x)
    del x
    if "send" in what:
        _receive(comm, cupy, before)
    if hasattr(result, "synchronize"):
        found = cupy.asnumpy(result.synchronize())
        want = comm.size if "all_reduce" in what else 1.0
        assert (found == want).all(), f"{what}: other values came out"


def _receive(comm: Communicator, cupy: Any, before: int) -> None:
    y = cupy.zeros(LARGE, "float32")
    comm.recv(y, before)
    assert (cupy.asnumpy(y) == 1).all(), "other values came in than were sent"


def reused_behind(comm: Communicator) -> None:
    """Memory freed on a stream after a blocking operation may be reused at once, because the stream is ordered."""
    cupy = at_home(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(20):
        x, y = cupy.full(LARGE, float(turn), "float32"), cupy.zeros(LARGE, "float32")
        comm.sendrecv(x, after, y, before)
        del x
        junk = cupy.full(LARGE, -1.0, "float32")
        total = comm.all_reduce(y)
        del junk
        assert float(total.min()) == float(total.max()) == turn * comm.size


def pool_empties(comm: Communicator) -> None:
    """Nothing is kept alive: the pool's used size returns to its initial value."""
    cupy = at_home(comm)
    pool, after, before = cupy.get_default_memory_pool(), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def work() -> None:
        for _ in range(50):
            sending = comm.isend(cupy.ones(100_000), after)
            comm.recv(cupy.zeros(100_000), before)
            comm.all_reduce(cupy.ones(100_000), async_op=True).synchronize()
            sending.synchronize()

    def settle() -> int:
        context(comm).tracker.poll()
        gc.collect()
        used: int = pool.used_bytes()
        return used

    work()
    comm.barrier()
    used = settle()
    work()
    comm.barrier()
    await_that(lambda: settle() <= used)


@pytest.mark.parametrize(
    "check", [dense, thin, freed_while_under_way, reused_behind, pool_empties], ids=lambda c: c.__name__
)
def test_cupy(world: World, check: Callable[[Communicator], None]) -> None:
    """Within an island, between islands, and both."""
    world.run(check, timeout=120)


PROGRAM = """
import sys
import cupy
{IMPORT}

rank, size = int(sys.argv[1]), 2
cupy.cuda.Device(rank).use()
comm = init_process_group(size, rank)
x = cupy.arange(1000, dtype="f") + rank
out = cupy.empty_like(x)
comm.all_reduce(x, out)
print("all_reduce", float(out.sum()))
comm.reduce(x, out, root=1, op="max")
print("reduce", float(out.sum()) if rank else None)
y = cupy.full(5, rank, "l")
comm.broadcast(y, root=1)
print("broadcast", y.tolist())
part = cupy.empty(500, "f")
comm.reduce_scatter(x, part, 500)
print("reduce_scatter", float(part.sum()))
rows = cupy.empty((2, 5), "l")
comm.all_gather(cupy.full(5, rank, "l"), rows, 5)
print("all_gather", rows.tolist())
comm.all_to_all(cupy.arange(10).reshape(2, 5) + 100 * rank, rows)
print("all_to_all", rows.tolist())
comm.send_recv(cupy.full(3, rank, "d"), part[:3].astype("d"), 1 - rank)
stream = cupy.cuda.Stream()
with stream:
    z = cupy.full(4, rank + 1.0)
    comm.all_reduce(z, z, "prod", stream)
    print("stream", z.tolist())
comm.barrier()
comm.stop()
"""


def test_same_program_as_with_cupyx(gpus: int, tmp_path: Path) -> None:
    """A program of cupyx.distributed, with its own import and with the adapter's."""
    if gpus < 2:
        pytest.skip("2 ranks on GPUs, and fewer GPUs")
    outputs = []
    for module, port in (("xvcomm.adapters.cupy", 21_333), ("cupyx.distributed", 21_334)):
        script = tmp_path / f"{module.replace('.', '_')}.py"
        script.write_text(PROGRAM.replace("{IMPORT}", f"from {module} import init_process_group"))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("XVCOMM_")}
        environment |= {"CUPYX_DISTRIBUTED_PORT": str(port), "XVCOMM_SECRET": "of this test"}
        ranks = [
            subprocess.Popen(
                [sys.executable, script, str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            found = [rank.communicate(timeout=100) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if module.startswith("cupyx") and any("nccl" in err.lower() and not out for out, err in found):
            pytest.skip("CuPy finds no NCCL of its own to compare with: pip install nvidia-nccl-cu13")
        assert all(rank.returncode == 0 for rank in ranks), found
        outputs.append([out for out, _ in found])
    assert outputs[0] == outputs[1]
