"""MPI's collectives over a Communicator: all kinds of buffers, all reductions, blocking and nonblocking, and groups."""

from __future__ import annotations

import array
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from xvcomm.adapters.mpi import MPI, Comm
from xvcomm.comm.communicator import Communicator
from xvcomm.errors import ArgumentError, DTypeError, MismatchError
from xvcomm.testing import World
from xvcomm.trace import recorder

TYPES = ("b", "B", "h", "i", "l", "Q", "f", "d", "g", "F", "D")
"""numpy's type codes; xvcomm has no `g`."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks of one island and one of another."""
    with World(islands="a:2,b:1", env={"XVCOMM_DEVICE": "host"}) as ranks:
        for check in (in_background, objects):
            ranks.run(check)  # opens rings that no sender may ever use, whose names stay as long as the ranks
        yield ranks


def rows(comm: Comm, kind: str, n: int) -> np.ndarray[Any, Any]:
    """One row per rank, the same on all ranks."""
    values = np.random.default_rng(5).integers(0, 4, (comm.size, n))
    return (values * (1 + 1j) if kind in "FD" else values).astype(kind)


def moving(communicator: Communicator) -> None:
    comm = Comm(communicator)
    rank, size, last = comm.rank, comm.size, comm.size - 1
    for kind in TYPES:
        table = rows(comm, kind, 6)
        mine, out = table[rank], np.zeros_like(table)
        x = mine.copy() if rank == last else np.zeros_like(mine)
        comm.Bcast(x, last)
        assert (x == table[last]).all()
        comm.Gather(mine, out if rank == last else None, root=last)
        assert (out == (table if rank == last else 0)).all()
        y = np.zeros_like(mine)
        comm.Scatter(table if rank == last else None, y, root=last)
        assert (y == mine).all()
        comm.Allgather(mine, out)
        assert (out == table).all()
        out[:] = 0
        out[rank] = mine
        comm.Allgather(MPI.IN_PLACE, out)
        assert (out == table).all()
        blocks = np.arange(2 * size).reshape(size, 2).astype(kind) + rank
        received = np.zeros_like(blocks)
        comm.Alltoall(blocks, received)
        want = np.array([[2 * rank + source, 2 * rank + 1 + source] for source in range(size)]).astype(kind)
        assert (received == want).all()
        comm.Alltoall(MPI.IN_PLACE, blocks)
        assert (blocks == want).all()
        whole = np.zeros_like(table)
        whole[rank] = mine
        comm.Gather(MPI.IN_PLACE if rank == 0 else mine, whole)
        assert rank or (whole == table).all()
        part = np.full_like(mine, 9)
        comm.Scatter(table if rank == 0 else None, part if rank else MPI.IN_PLACE)
        assert (part == (mine if rank else 9)).all()


def vectors(communicator: Communicator) -> None:
    """Counts and displacements per rank; only the root knows those of Gatherv and Scatterv."""
    comm = Comm(communicator)
    rank, size, root = comm.rank, comm.size, 1
    for kind in ("i", "d", "g"):
        counts = [r + 1 for r in range(size)]
        places = [7 * (size - 1 - r) for r in range(size)]  # in reverse, with gaps
        mine = np.full(rank + 1, rank + 1).astype(kind)
        spread = np.zeros(7 * size, kind)
        for r in range(size):
            spread[places[r] : places[r] + counts[r]] = r + 1
        packed = np.repeat(np.arange(1, size + 1), counts).astype(kind)
        out, flat = np.zeros_like(spread), np.zeros_like(packed)
        comm.Gatherv(mine, [out, counts, places, MPI.Datatype.fromcode(kind)] if rank == root else None, root=root)
        assert (out == (spread if rank == root else 0)).all()
        comm.Gatherv(mine, [flat, (counts, None)] if rank == root else None, root=root)
        assert (flat == (packed if rank == root else 0)).all()
        y = np.zeros_like(mine)
        comm.Scatterv([spread, (counts, places)] if rank == root else None, y, root=root)
        assert (y == mine).all()
        comm.Scatterv([packed, counts] if rank == root else None, MPI.IN_PLACE if rank == root else y, root=root)
        out[:] = 0
        comm.Allgatherv(mine, [out, counts, places, kind])
        assert (out == spread).all()
        out[:] = 0
        out[places[rank] : places[rank] + counts[rank]] = mine
        comm.Allgatherv(MPI.IN_PLACE, [out, (counts, places)])
        assert (out == spread).all()
        flat[:] = 0
        comm.Allgatherv(mine, [flat, counts])
        assert (flat == packed).all()
        sent = np.concatenate([np.full(r + 1, 10 * rank + r) for r in range(size)]).astype(kind)
        got = np.zeros((rank + 1) * size + 5, kind)
        comm.Alltoallv([sent, counts], [got, ([rank + 1] * size, [(rank + 1) * (size - 1 - r) for r in range(size)])])
        want = np.repeat([10 * r + rank for r in reversed(range(size))], rank + 1)
        assert (got[: want.size] == want).all() and not got[want.size :].any()
        table = np.arange(size * 2).astype(kind) + rank
        comm.Alltoallv(MPI.IN_PLACE, [table, [2] * size])
        assert (table == np.concatenate([[2 * rank + r, 2 * rank + 1 + r] for r in range(size)])).all()


def folded(op: Any, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The result computed by numpy."""
    functions = {
        "SUM": np.add, "PROD": np.multiply, "MAX": np.maximum, "MIN": np.minimum, "BAND": np.bitwise_and,
        "BOR": np.bitwise_or, "BXOR": np.bitwise_xor, "LAND": np.logical_and, "LOR": np.logical_or,
        "LXOR": np.logical_xor,
    }  # fmt: skip
    found = table[0]
    for row in table[1:]:
        found = functions[op.name](found, row)
    return np.asarray(found).astype(table.dtype)


def reducing(communicator: Communicator) -> None:
    comm = Comm(communicator)
    rank, size, root = comm.rank, comm.size, comm.size - 1
    arithmetic, bitwise = (MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN), (MPI.BAND, MPI.BOR, MPI.BXOR)
    logical = (MPI.LAND, MPI.LOR, MPI.LXOR)
    for kind in ("b", "Q", "d", "g", "F", "?"):
        ops = (*(arithmetic if kind not in "FD?" else arithmetic[: 2 * (kind != "?")]), *logical)
        for op in (*ops, *(bitwise if np.dtype(kind).kind in "iu" else ())):
            table = rows(comm, kind, 2 * size)
            want, mine, out = folded(op, table), table[rank], np.zeros_like(table[rank])
            comm.Allreduce(mine, out, op)
            assert (out == want).all(), (op, kind, out, want)
            if op not in (MPI.SUM, MPI.MAX, MPI.LXOR):
                continue
            out[:] = mine
            comm.Allreduce(MPI.IN_PLACE, out, op=op)
            assert (out == want).all()
            out[:] = 0
            comm.Reduce(mine, out if rank == root else None, op, root)
            assert (out == (want if rank == root else 0)).all()
            out[:] = mine
            comm.Reduce(MPI.IN_PLACE if rank == root else out, out if rank == root else None, op, root)
            assert (out == (want if rank == root else mine)).all()
            part = np.zeros(2, kind)
            comm.Reduce_scatter_block(mine, part, op)
            assert (part == want[2 * rank : 2 * rank + 2]).all()
            counts = [2 * size - (size - 1), *[1] * (size - 1)]
            start = sum(counts[:rank])
            for given in (None, counts):
                part = np.zeros(counts[rank], kind)
                comm.Reduce_scatter(mine, part, given, op)
                assert (part == want[start : start + counts[rank]]).all()
            out[:] = mine
            comm.Reduce_scatter(MPI.IN_PLACE, out, counts, op)
            assert (out[: counts[rank]] == want[start : start + counts[rank]]).all()
            comm.Scan(mine, out, op)
            assert (out == folded(op, table[: rank + 1])).all()
            out[:] = 5
            comm.Exscan(mine, out, op)
            assert (out == (folded(op, table[:rank]) if rank else np.full_like(out, 5))).all()
    half = np.full(3, 2048 if rank == 0 else 1, "float16")
    comm.Scan(half, prefix := np.zeros_like(half), MPI.SUM)
    assert (prefix == np.float16(2048 + rank)).all(), "rounded more than once"
    with pytest.raises(DTypeError):
        comm.Allreduce(np.zeros(2), np.zeros(2), MPI.BAND)
    with pytest.raises(DTypeError):
        comm.Allreduce(np.zeros(2), np.zeros(2), MPI.MAXLOC)


def own_reductions(communicator: Communicator) -> None:
    """User-defined operations over two buffers; applied in rank order, from the last."""
    comm = Comm(communicator)

    def minus(a: memoryview, b: memoryview, kind: Any) -> None:
        assert kind == MPI.DOUBLE
        y = np.frombuffer(b)
        y[:] = np.frombuffer(a) - y

    op = MPI.Op.Create(minus, commute=False)
    out = np.zeros(3)
    comm.Allreduce(np.full(3, comm.rank + 1.0), out, op)
    want = comm.size * 1.0
    for value in range(comm.size - 1, 0, -1):
        want = value - want
    assert (out == want).all() and not op.Is_commutative()
    a, b = np.arange(3), np.full(3, 2)
    MPI.SUM.Reduce_local(a, b)
    assert (b == [2, 3, 4]).all()
    with pytest.raises(ArgumentError):
        MPI.SUM.Reduce_local(a, np.zeros(2, int))
    assert pickle.loads(pickle.dumps(MPI.LXOR)) is MPI.LXOR


def forms(communicator: Communicator) -> None:
    """All kinds of buffer arguments."""
    comm = Comm(communicator)
    first = comm.rank == 0
    text = bytearray(b"hello" if first else b"     ")
    comm.Bcast([text, MPI.BYTE])
    assert text == b"hello"
    numbers = array.array("d", [1.0, 2.0] if first else [0.0, 0.0])
    comm.Bcast([numbers, 2, MPI.DOUBLE])
    comm.Bcast(memoryview(numbers)[:1])
    assert list(numbers) == [1.0, 2.0]
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3) if first else np.zeros((2, 3)))
    comm.Bcast(fortran)
    assert (fortran == np.arange(6.0).reshape(2, 3)).all()
    table = np.zeros((5, 3), "i")
    comm.Bcast([table, (6, 3), MPI.INT] if not first else [np.full(6, 7, "i"), MPI.INT])
    assert first or ((table.reshape(-1)[3:9] == 7).all() and table.sum() == 42)
    scalar = np.array(3.5 if first else 0.0)
    comm.Bcast([scalar, "d"])
    assert scalar == 3.5
    half = np.full(3, 1.5 if first else 0, MPI.BFLOAT16_T.numpy)
    comm.Bcast(half)
    assert (half == 1.5).all()
    comm.Bcast([None, 0, MPI.INT])
    for spec, error in (
        (np.zeros((4, 4))[:, 1], "not contiguous"), ([np.zeros(3), 4, MPI.DOUBLE], "room for 3"), ([1, 2, 3, 4, 5], "5 parts"),
        ([bytearray(7), MPI.INT], "not a multiple"), ([np.zeros(3), -1, MPI.INT], "negative"),
        ([np.zeros(3), "nonsense"], "not a datatype"), ([np.zeros(3), 1, 9, MPI.DOUBLE], "displacement 9"),
        (np.array([object()]), "lower-case"),
    ):  # fmt: skip
        with pytest.raises(ValueError if "datatype" not in error and "lower" not in error else TypeError, match=error):
            comm.Bcast(spec)
    with pytest.raises(ArgumentError, match="not a multiple"):
        comm.Alltoall(np.zeros(comm.size + 1), np.zeros(comm.size + 1))
    with pytest.raises(ArgumentError, match="both buffers must be equal"):
        comm.Allreduce(np.zeros(3), np.zeros(3, "f"))


def in_background(communicator: Communicator) -> None:
    """All collectives at once, waited for in any order, between blocking ones."""
    comm = Comm(communicator)
    rank, size = comm.rank, comm.size
    counts = [r + 1 for r in range(size)]
    mine, total, table = np.full(4, rank + 1.0), np.zeros(4), np.zeros((size, 4))
    ragged, told, part = np.zeros(sum(counts)), np.full(2, float(rank)), np.zeros(1)
    started = [
        comm.Ibarrier(), comm.Iallreduce(mine, total), comm.Iallgather(mine, table), comm.Ibcast(told, size - 1),
        comm.Igatherv(np.full(rank + 1, float(rank)), [ragged, counts] if rank == 0 else None),
        comm.Iscatterv([np.arange(6.0), counts] if rank == 0 else None, np.zeros(rank + 1)),
        comm.Ireduce_scatter_block(np.arange(float(size)), part),
    ]  # fmt: skip
    blocking = np.zeros(4)
    comm.Allreduce(mine, blocking)
    assert comm.allgather(rank) == list(range(size))
    for request in reversed(started):
        request.Wait()
    everybodys = sum(range(1, size + 1))
    assert (total == everybodys).all() and (blocking == everybodys).all() and (told == size - 1).all()
    assert (table == np.arange(1, size + 1)[:, None]).all() and part[0] == size * rank
    assert rank or (ragged == np.repeat(np.arange(size), counts)).all()
    # One started before a message that the others need: it must not wait for them.
    if rank == 0:
        request = comm.Iallreduce(mine, total)
        comm.send("go", 1)
    else:
        if rank == 1:
            assert comm.recv(source=0) == "go"
        request = comm.Iallreduce(mine, total)
    request.Wait()
    assert (total == everybodys).all()


def objects(communicator: Communicator) -> None:
    comm = Comm(communicator)
    rank, size = comm.rank, comm.size
    assert comm.bcast({"a": 1} if rank == 0 else None) == {"a": 1}
    assert comm.gather(rank, root=1) == (list(range(size)) if rank == 1 else None)
    assert comm.scatter([f"to {r}" for r in range(size)] if rank == 0 else None) == f"to {rank}"
    assert comm.allgather("x" * rank) == ["x" * r for r in range(size)]
    assert comm.alltoall([(rank, r) for r in range(size)]) == [(r, rank) for r in range(size)]
    assert comm.allreduce([rank]) == list(range(size))
    assert comm.allreduce(rank, MPI.MAX) == size - 1 and comm.allreduce(rank, op=lambda a, b: 10 * a + b) == 12
    assert comm.reduce((rank % 2, rank), MPI.MAXLOC, root=0) == ((1, 1) if rank == 0 else None)
    assert comm.allreduce((rank % 2, rank), MPI.MINLOC) == (0, 0)
    assert comm.scan(rank) == sum(range(rank + 1)) and comm.exscan(rank) == (sum(range(rank)) if rank else None)
    assert comm.allreduce(rank > 0, MPI.LAND) is False and comm.allreduce(rank > 0, MPI.LXOR) is (size % 2 == 0)
    assert comm.sendrecv({"from": rank}, (rank + 1) % size, source=(rank - 1) % size) == {"from": (rank - 1) % size}
    with pytest.raises(ArgumentError):
        comm.alltoall([1])


def groups(communicator: Communicator) -> None:
    comm = Comm(communicator)
    rank, size = comm.rank, comm.size
    half = comm.Split(color=rank % 2, key=-rank)
    members = sorted(range(rank % 2, size, 2), reverse=True)
    assert (half.rank, half.size) == (members.index(rank), len(members))
    assert half.allgather(rank) == members
    assert comm.Compare(half) == MPI.UNEQUAL and comm.Compare(Comm(communicator)) == MPI.IDENT
    half.Free()
    assert not half and half == MPI.COMM_NULL
    with pytest.raises(ArgumentError, match="COMM_NULL"):
        half.Barrier()
    nobody = comm.Split(MPI.UNDEFINED if rank else 0)
    assert (nobody == MPI.COMM_NULL) == (rank > 0)
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert host.size == size
    twin = comm.Dup()
    assert twin.Compare(comm) == MPI.CONGRUENT and twin != comm
    twin.send("twin's", (rank + 1) % size, 4)
    comm.send("first's", (rank + 1) % size, 4)
    assert (comm.recv(tag=4), twin.recv(tag=4)) == ("first's", "twin's")
    world = comm.Get_group()
    assert world.Get_size() == size and world.Excl([0]).Translate_ranks([0], world) == [1]
    assert world.Excl([0]).Translate_ranks([0, MPI.PROC_NULL, 0], world) == [1, MPI.PROC_NULL, 1]
    some = world.Incl([2, 0])
    made = comm.Create(some)
    assert (made.allgather(rank) == [2, 0]) if rank != 1 else made == MPI.COMM_NULL
    if rank != 1:
        assert comm.Create_group(some, tag=3).allgather(rank) == [2, 0]
        assert MPI.Group.Union(some, world).ranks == (2, 0, 1) and MPI.Group.Difference(world, some).ranks == (1,)
    for each in (nobody, host, twin, made):
        each.Free()


def grids(communicator: Communicator) -> None:
    comm = MPI.Intracomm(communicator)
    assert (
        MPI.Compute_dims(12, 2) == [4, 3]
        and MPI.Compute_dims(12, [0, 6]) == [2, 6]
        and MPI.Compute_dims(7, 3) == [7, 1, 1]
    )
    ring = comm.Create_cart([comm.size], periods=True)
    before, after = ring.Shift(0, 1)
    assert (before, after) == ((ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size)
    x = np.array([float(ring.rank)])
    ring.Sendrecv_replace(x, after, source=before)
    assert x[0] == before
    line = comm.Create_cart([1, comm.size], [False, False])
    assert line.Shift(0, 1) == (MPI.PROC_NULL, MPI.PROC_NULL) and line.coords == [0, line.rank]
    assert line.Shift(1, 1)[0] == (line.rank - 1 if line.rank else MPI.PROC_NULL)
    assert line.Get_cart_rank([0, 1]) == 1 and line.Get_coords(1) == [0, 1] and line.dim == 2
    with pytest.raises(ArgumentError, match="outside"):
        line.Get_cart_rank([1, 0])
    column = line.Sub([True, False])
    assert (column.size, column.dims) == (1, [1])
    small = comm.Create_cart([2])
    assert (small == MPI.COMM_NULL) == (comm.rank >= 2)
    for each in (ring, line, column, small):
        each.Free()


def disagreement(communicator: Communicator) -> None:
    """Mismatched calls raise on all ranks."""
    comm = Comm(communicator).Dup()
    with pytest.raises(MismatchError):
        comm.Allreduce(MPI.IN_PLACE, np.zeros(3 + comm.rank))
    comm.Free()


CHECKS = (moving, vectors, reducing, own_reductions, forms, in_background, objects, groups, grids, disagreement)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_collectives(world: World, check: Callable[..., Any]) -> None:
    """Each on all ranks, of two islands."""
    world.run(check)


def test_one_rank_alone() -> None:
    """COMM_WORLD of a process without a launcher."""
    with World(1, env={"XVCOMM_DEVICE": "host"}) as ranks:
        for check in (moving, reducing, in_background_alone):
            ranks.run(check)


def in_background_alone(communicator: Communicator) -> None:
    comm, x = Comm(communicator), np.zeros(3)
    comm.Iallreduce(np.ones(3), x).Wait()
    assert (x == 1).all() and comm.alltoall(["me"]) == ["me"]


def started_at(communicator: Communicator) -> tuple[set[str], set[str]]:
    """Call sites of collectives in the flight recorder, and where they were called."""
    comm, records = Comm(communicator), []
    x, first = np.ones(3), inspect.currentframe().f_lineno  # type: ignore[union-attr]
    recorder.hooks.append(records.append)
    try:
        request = comm.Ibcast(x, 0)
        comm.Barrier()
        request.Wait()
    finally:
        recorder.hooks.remove(records.append)
    return {record.call_site for record in records}, {f"test_mpi_collectives.py:{first + n}" for n in (3, 4)}


def test_the_flight_recorder_names_the_line_that_started_a_collective(world: World) -> None:
    for found, expected in world.run(started_at):
        assert found == expected
