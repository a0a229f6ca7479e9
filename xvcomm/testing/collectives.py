"""Checks of collectives, called on every rank of a communicator: `world.run(check_all_reduce, "float32", "sum", 1000)`.

Each computes the expected result without communication, and raises AssertionError if the actual one differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.testing.arrays import Array, Room, arrays
from xvcomm.testing.cases import Reducing, assert_equal, assert_same_bits, distinct, uneven
from xvcomm.testing.signals import Signals
from xvcomm.types.dtype import BY_NAME, premul_sum

_WIDTH = 3


def check_all_reduce(comm: Communicator, dtype: str, op: str, count: int) -> None:
    """In place, into another array, and asynchronously."""
    case, a, what = Reducing.of(comm, dtype, op, count), arrays(comm), f"all_reduce({op}) of {count} x {dtype}"
    mine = case.inputs[comm.rank]
    x = a.put(mine)
    assert comm.all_reduce(x, case.how) is x
    assert_equal(a.get(x), case.result, f"{what} in place")
    x, room = a.put(mine), Room(a, BY_NAME[dtype], count)
    out = room.array
    assert comm.all_reduce(x, case.how, out=out) is out
    assert_equal(a.get(out), case.result, f"{what} into out")
    assert_equal(a.get(x), mine, f"input of {what}")
    assert comm.all_reduce(x, case.how, async_op=True).wait() is x
    assert_equal(a.get(x), case.result, f"{what}, asynchronous")
    room.check()


def check_reduce(comm: Communicator, dtype: str, op: str, count: int) -> None:
    """To the first and the last rank; other ranks' arrays are unchanged."""
    case, a = Reducing.of(comm, dtype, op, count), arrays(comm)
    mine = case.inputs[comm.rank]
    for root in {0, comm.size - 1}:
        what = f"reduce({op}) of {count} x {dtype} to rank {root}"
        here = comm.rank == root
        for async_op in (False, True):
            x = a.put(mine)
            y = comm.reduce(x, root, case.how, async_op=async_op)
            assert (y.wait() if async_op else y) is x
            assert_equal(a.get(x), case.result if here else mine, what)
        x, room = a.put(mine), Room(a, BY_NAME[dtype], count)
        out = room.array if here else None
        assert comm.reduce(x, root, case.how, out=out) is (out if here else x)
        if here:
            assert_equal(a.get(out), case.result, f"{what} into out")
        assert_equal(a.get(x), mine, f"input of {what}")
        room.check()


def check_reduce_scatter(comm: Communicator, dtype: str, op: str, count: int) -> None:
    """Equal and unequal blocks, of one and of several columns; in place too."""
    a = arrays(comm)
    for rows in (None, uneven(count, comm.size)):
        counts = rows or (count,) * comm.size
        for columns in ((), (_WIDTH,)) if count < 1000 else ((),):
            case = Reducing.of(comm, dtype, op, (sum(counts), *columns))
            what = f"reduce_scatter({op}) of {counts} rows of {dtype}"
            mine, block = case.inputs[comm.rank], _block(counts, comm.rank)
            x = a.put(mine)
            assert_equal(a.get(comm.reduce_scatter(x, case.how, counts=rows)), case.result[block], what)
            room = Room(a, BY_NAME[dtype], (counts[comm.rank], *columns))
            out = room.array
            assert comm.reduce_scatter(x, case.how, out=out, counts=rows, async_op=True).wait() is out
            assert_equal(a.get(out), case.result[block], f"{what} into out")
            assert_equal(a.get(x), mine, f"input of {what}")
            inside = x[block]
            comm.reduce_scatter(x, case.how, out=inside, counts=rows)
            assert_equal(a.get(inside), case.result[block], f"{what} in place")
            room.check()


def check_broadcast(comm: Communicator, dtype: str, count: int) -> None:
    """From the first and the last rank."""
    a = arrays(comm)
    for root in {0, comm.size - 1}:
        want = distinct(BY_NAME[dtype], count, seed=root)
        for async_op in (False, True):
            room = Room(a, BY_NAME[dtype], count)
            room.fill(want if comm.rank == root else np.zeros_like(want))
            x = room.array
            y = comm.broadcast(x, root, async_op=async_op)
            assert (y.wait() if async_op else y) is x
            assert_same_bits(a.get(x), want, f"broadcast of {count} x {dtype} from rank {root}")
            room.check()


def check_all_gather(comm: Communicator, dtype: str, count: int) -> None:
    """Equal and unequal blocks; in place, where the input is this rank's part of the output."""
    a = arrays(comm)
    for rows in (None, uneven(count, comm.size)):
        counts = rows or (count,) * comm.size
        what = f"all_gather of {counts} rows of {dtype}"
        want, block = distinct(BY_NAME[dtype], (sum(counts), _WIDTH), seed=count), _block(counts, comm.rank)
        x = a.put(want[block])
        assert_same_bits(a.get(comm.all_gather(x, counts=rows)), want, what)
        room = Room(a, BY_NAME[dtype], want.shape)
        out = room.array
        assert comm.all_gather(x, out=out, counts=rows, async_op=True).wait() is out
        assert_same_bits(a.get(out), want, f"{what} into out")
        whole = a.put(_only(want, block))
        comm.all_gather(whole[block], out=whole, counts=rows)
        assert_same_bits(a.get(whole), want, f"{what} in place")
        room.check()


def check_gather(comm: Communicator, dtype: str, count: int) -> None:
    """Equal and unequal blocks to the first and the last rank; in place at the root."""
    a = arrays(comm)
    for root in {0, comm.size - 1}:
        here = comm.rank == root
        for rows in (None, uneven(count, comm.size)):
            counts = rows or (count,) * comm.size
            what = f"gather of {counts} rows of {dtype} to rank {root}"
            want, block = distinct(BY_NAME[dtype], (sum(counts), _WIDTH), seed=count), _block(counts, comm.rank)
            x = a.put(want[block])
            y = comm.gather(x, root, counts=rows)
            assert (y is None) != here
            if here:
                assert_same_bits(a.get(y), want, what)
            room = Room(a, BY_NAME[dtype], want.shape)
            out = room.array if here else None
            assert comm.gather(x, root, out=out, counts=rows, async_op=True).wait() is out
            if here:
                assert_same_bits(a.get(out), want, f"{what} into out")
            whole = a.put(_only(want, block))
            comm.gather(whole[block], root, out=whole if here else None, counts=rows)
            if here:
                assert_same_bits(a.get(whole), want, f"{what} in place")
            room.check()


def check_scatter(comm: Communicator, dtype: str, count: int) -> None:
    """Equal and unequal blocks from the first and the last rank; in place at the root."""
    a = arrays(comm)
    for root in {0, comm.size - 1}:
        here = comm.rank == root
        for rows in (None, uneven(count, comm.size)):
            counts = rows or (count,) * comm.size
            what = f"scatter of {counts} rows of {dtype} from rank {root}"
            everything = distinct(BY_NAME[dtype], (sum(counts), _WIDTH), seed=count)
            block = _block(counts, comm.rank)
            x = a.put(everything if here else np.zeros_like(everything))
            assert_same_bits(a.get(comm.scatter(x, root, counts=rows)), everything[block], what)
            room = Room(a, BY_NAME[dtype], everything[block].shape)
            out = room.array
            assert comm.scatter(x if here else None, root, out=out, counts=rows, async_op=True).wait() is out
            assert_same_bits(a.get(out), everything[block], f"{what} into out")
            inside = x[block]
            comm.scatter(x if here else None, root, out=inside, counts=rows)
            assert_same_bits(a.get(inside), everything[block], f"{what} in place")
            room.check()


def check_all_to_all(comm: Communicator, dtype: str, count: int) -> None:
    """Equal and unequal blocks; some empty, one rank that sends nothing and one that receives nothing."""
    a, size = arrays(comm), comm.size
    equal = np.full((size, size), count)
    unequal = np.array([[count * ((3 * s + 5 * r + count) % 4) // 3 for r in range(size)] for s in range(size)])
    silent = equal.copy()
    silent[0, :] = 0
    deaf = equal.copy()
    deaf[:, -1] = 0
    for table in (equal, unequal, silent, deaf):
        blocks = {
            (s, r): distinct(BY_NAME[dtype], (int(table[s, r]), 2), seed=s * size + r)
            for s in range(size)
            for r in range(size)
            if comm.rank in (s, r)
        }
        x = a.put(np.concatenate([blocks[comm.rank, r] for r in range(size)]))
        want = np.concatenate([blocks[s, comm.rank] for s in range(size)])
        counts: dict[str, Any] = {}
        if table is not equal:
            counts = {"send_counts": table[comm.rank], "recv_counts": table[:, comm.rank].tolist()}
        what = f"all_to_all of {table.tolist()} rows of {dtype}"
        assert_same_bits(a.get(comm.all_to_all(x, **counts)), want, what)
        room = Room(a, BY_NAME[dtype], want.shape)
        out = room.array
        assert comm.all_to_all(x, out=out, async_op=True, **counts).wait() is out
        assert_same_bits(a.get(out), want, f"{what} into out")
        room.check()


def check_reductions(comm: Communicator, dtype: str, ops: Sequence[str]) -> None:
    """Several reductions of a dtype, with every reducing collective, in one segment and in several."""
    for op in ops:
        for count in (5, 20_011):
            check_all_reduce(comm, dtype, op, count)
        check_reduce(comm, dtype, op, 999)
        check_reduce_scatter(comm, dtype, op, 333)


def check_reproducible(comm: Communicator, dtype: str, op: str, count: int) -> None:
    """Random numbers: bitwise equal results on all ranks and in a second run, and close to the exact result."""
    a, kind = arrays(comm), BY_NAME[dtype]
    draws = [np.random.default_rng(rank).normal(1.0, 0.25, count) for rank in range(comm.size)]
    inputs = [draw.astype(kind.numpy) for draw in draws]
    seen = []
    for _ in range(2):
        y = a.get(comm.all_reduce(a.put(inputs[comm.rank]), op))
        bits = np.ascontiguousarray(y).view(np.uint8)
        everybody = a.get(comm.all_gather(a.put(bits))).reshape(comm.size, -1)
        assert (everybody == bits).all(), f"all_reduce({op}) of {dtype}: ranks got different bits"
        seen.append(bits.tobytes())
    assert seen[0] == seen[1], f"all_reduce({op}) of {dtype}: another result the second time"
    exact = np.prod if op == "prod" else np.mean if op == "avg" else np.sum
    want = exact(np.stack([x.astype(np.float64) for x in inputs]), axis=0)
    step = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}.get(dtype, 2.0**-2)
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=comm.size * step)


def check_async(comm: Communicator, many: int) -> None:
    """Many operations in progress, waited for from last to first, followed by blocking ones."""
    a = arrays(comm)
    inputs = [Reducing.of(comm, "int64", "sum", 7 * i) for i in range(many)]
    mine = [a.put(case.inputs[comm.rank]) for case in inputs]
    works = [comm.all_reduce(x, async_op=True) for x in mine]
    gathers = [comm.all_gather(a.put(np.full(i, comm.rank)), async_op=True) for i in range(many)]
    blocking = comm.all_reduce(a.put(np.ones(4)))
    if not a.asynchronous:
        for x, case in zip(mine, inputs, strict=True):
            assert_equal(a.get(x), case.result, "asynchronous all_reduce before a blocking one")
    assert_equal(a.get(blocking), np.full(4, float(comm.size)), "all_reduce behind asynchronous ones")
    for i in reversed(range(many)):
        assert_equal(a.get(works[i].wait()), inputs[i].result, f"asynchronous all_reduce {i}")
        gathered = a.get(gathers[i].result())
        assert_equal(gathered, np.repeat(np.arange(comm.size), i), f"asynchronous all_gather {i}")
    work = comm.barrier(async_op=True)
    assert work is not None
    assert work.wait() is None
    work = comm.barrier(async_op=True)
    assert work is not None
    work.synchronize()
    assert work.done()
    assert work.exception() is None


def check_barrier(comm: Communicator) -> None:
    """No rank leaves before the last one has entered."""
    signals = Signals(comm)
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(0.02)
            signals.tell(f"entered {late}")
        comm.barrier()
        assert signals.told(f"entered {late}", late), f"rank {comm.rank} left the barrier before rank {late} came"


def check_objects(comm: Communicator) -> None:
    """Objects of every size, including None and empty ones."""
    mine = {"rank": comm.rank, "data": list(range(comm.rank * 1000)), "array": np.arange(comm.rank)}
    gathered = comm.all_gather_object(mine)
    assert [g["rank"] for g in gathered] == list(range(comm.size))
    assert [len(g["data"]) for g in gathered] == [1000 * r for r in range(comm.size)]
    for root in range(comm.size):
        here = comm.rank == root
        assert comm.broadcast_object(("from", root, b"x" * 300_000) if here else None, root)[:2] == ("from", root)
        assert comm.broadcast_object(None, root) is None
        found = comm.gather_object(str(comm.rank) * comm.rank, root)
        assert found == ([str(r) * r for r in range(comm.size)] if here else None)
        parts = [{r, "part"} for r in range(comm.size)] if here else None
        assert comm.scatter_object(parts, root) == {comm.rank, "part"}


def check_split(comm: Communicator) -> None:
    """Groups of odd and even ranks, in reverse order, of halves, and without the last rank; all collectives work in each."""
    last = comm.size - 1
    colors: list[tuple[Any, int]] = [
        (comm.rank % 2, 0), (f"half {2 * comm.rank // comm.size}", -comm.rank),
        (None if comm.rank == last else 7, 0), (comm.rank, 0),
    ]  # fmt: skip
    for color, key in colors:
        members = comm.all_gather_object((color, key, comm.rank))
        group = comm.split(color, key)
        if color is None:
            assert group is None
            continue
        assert group is not None
        order = [rank for _, rank in sorted((k, r) for c, k, r in members if c == color)]
        assert (group.rank, group.size) == (order.index(comm.rank), len(order))
        labels = [comm.topology.island_of(rank).label for rank in order]
        assert [group.topology.island_of(r).label for r in range(group.size)] == labels
        check_all_reduce(group, "float32", "sum", 3001)
        check_reduce_scatter(group, "int32", "max", 10)
        check_all_gather(group, "float64", 77)
        check_all_to_all(group, "int16", 50)
        check_broadcast(group, "uint8", 300_000)
        group.close()
    comm.barrier()


def check_subgroup(comm: Communicator) -> None:
    """Groups that only their members create, repeatedly with the same name, while other ranks create the next ones."""
    last = comm.size - 1
    for _ in range(2):
        for ranks in ((comm.rank,), range(last), (last, 0), range(last, -1, -1)):
            if comm.rank not in ranks or len(set(ranks)) != len(ranks):
                continue
            with comm.subgroup(ranks, "check") as group:
                assert (group.rank, group.size) == (list(ranks).index(comm.rank), len(ranks))
                labels = [comm.topology.island_of(rank).label for rank in ranks]
                assert [group.topology.island_of(r).label for r in range(group.size)] == labels
                assert group.all_gather_object(comm.rank) == list(ranks)
                check_all_reduce(group, "float32", "sum", 3001)
                check_broadcast(group, "uint8", 300_000)
    comm.barrier()


def check_premul_factors(comm: Communicator) -> None:
    """Fractions for floats and complex numbers, negative integers for integers."""
    a = arrays(comm)
    x = comm.all_reduce(a.put(np.full(9, 8.0, np.float32)), premul_sum(0.5 if comm.rank == 0 else 2.0))
    assert_equal(a.get(x), np.full(9, 4.0 + 16.0 * (comm.size - 1), np.float32), "premul_sum of float32")
    z = comm.all_reduce(a.put(np.full(3, 2 + 4j)), premul_sum(0.25))
    assert_equal(a.get(z), np.full(3, (0.5 + 1j) * comm.size), "premul_sum of complex128")
    n = comm.all_reduce(a.put(np.full(5, 3)), premul_sum(-2))
    assert_equal(a.get(n), np.full(5, -6 * comm.size), "premul_sum of int64")


def check_averages(comm: Communicator) -> None:
    """Averages over islands of up to two ranks in low precision: rounded once after the sum over islands, also in repeated
    calls.
    """
    a = arrays(comm)
    for name, most in (("float16", 1024), ("bfloat16", 128), ("float8_e5m2", 4)):
        dtype, size, count = BY_NAME[name], comm.size, 1000 * comm.size
        for number in range(5):
            draws = [np.random.default_rng(100 * number + r).integers(0, most, count) for r in range(size)]
            want = (np.sum(draws, axis=0) / size).astype(np.float32).astype(dtype.numpy)
            mine, block = draws[comm.rank].astype(dtype.numpy), slice(1000 * comm.rank, 1000 * (comm.rank + 1))
            assert_equal(a.get(comm.all_reduce(a.put(mine), "avg")), want, f"all_reduce(avg) of {name}")
            assert_equal(a.get(comm.reduce_scatter(a.put(mine), "avg")), want[block], f"reduce_scatter(avg) of {name}")
            found = comm.reduce(a.put(mine), size - 1, "avg")
            if comm.rank == size - 1:
                assert_equal(a.get(found), want, f"reduce(avg) of {name}")
    if len(comm.topology.islands) == comm.size:
        half = np.full(100_003, 60_000, np.float16)
        for _ in range(3):
            assert_equal(a.get(comm.all_reduce(a.put(half), "avg")), half, "all_reduce(avg) whose sum overflows")


def _block(counts: tuple[int, ...], rank: int) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])


def _only(everything: Array, block: slice) -> Array:
    """A copy in which all blocks but one are zero."""
    kept = np.zeros_like(everything)
    kept[block] = everything[block]
    return kept
