"""Checks operations of all kinds in random order: on several streams, blocking and asynchronous, with all kinds of waits."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import Work
from xvcomm.testing.arrays import Array, Arrays, DeviceArrays, arrays
from xvcomm.testing.cases import assert_same_bits

_LENGTHS = 4, 480, 96_000
_MOST = 5
"""Operations in progress when they are waited for."""


class _Begun(NamedTuple):
    """An operation that was called.

    Attributes:
        arrays: the Arrays of its arrays.
        work: its Work, if it is asynchronous.
        found: its output.
        want: the expected result; None if there is none.
    """

    arrays: Arrays
    work: Any
    found: Any
    want: Array | None


_Kind = Callable[[Arrays, int, int, bool], list[_Begun]]
"""Calls an operation with arrays of a length and a value; the last argument makes it asynchronous."""


def check_mixture(comm: Communicator, seed: int, rounds: int) -> None:
    """Operations of all kinds, called in the same order on all ranks, and waited for in a different order on each, give correct
    results.

    Args:
        seed: of the order of the calls.
        rounds: how often all operations in progress are waited for.
    """
    a = arrays(comm)
    places = [a, DeviceArrays(a.device) if isinstance(a, DeviceArrays) else a]
    kinds = list(_kinds(comm).items())
    together, alone = random.Random(seed), random.Random(seed * comm.size + comm.rank)
    for number in range(rounds):
        begun: list[tuple[str, _Begun]] = []
        for _ in range(together.randint(1, _MOST)):
            place, (name, call) = together.choice(places), together.choice(kinds)
            length, value, background = together.choice(_LENGTHS), together.randrange(50), together.random() < 0.6
            what = f"round {number} of mixture {seed}: {name} of {length}{', asynchronous' * background}"
            begun += [(what, each) for each in call(place, length, value, background)]
        alone.shuffle(begun)
        for what, each in begun:
            _wait(each, alone)
            if each.want is not None:
                assert_same_bits(each.arrays.get(each.found), each.want.astype(np.float32), what)
    comm.barrier()


def _wait(begun: _Begun, by: random.Random) -> None:
    """Wait for an operation in a random way, or not at all if nothing depends on it."""
    if not isinstance(begun.work, Work):
        return
    match by.choice(("wait", "wait", "synchronize", "done", "forget")):
        case "synchronize":
            begun.work.synchronize()
        case "done":
            begun.work.done()
            begun.work.wait()
        case "forget" if begun.want is None:
            pass
        case _:
            begun.work.wait()


def _kinds(comm: Communicator) -> dict[str, _Kind]:
    size, rank = comm.size, comm.rank
    after, before = (rank + 1) % size, (rank - 1) % size

    def put(a: Arrays, length: int, value: float) -> Any:
        return a.put(np.full(length, value, np.float32))

    def total(length: int, value: int) -> Array:
        return np.full(length, size * value + sum(range(size)))

    def all_reduce(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x = put(a, length, value + rank)
        return [_Begun(a, comm.all_reduce(x, async_op=background), x, total(length, value))]

    def reduce(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, root = put(a, length, value + rank), value % size
        want = total(length, value) if rank == root else np.full(length, value + rank)
        return [_Begun(a, comm.reduce(x, root, async_op=background), x, want)]

    def broadcast(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, root = put(a, length, value + rank), value % size
        return [_Begun(a, comm.broadcast(x, root, async_op=background), x, np.full(length, value + root))]

    def all_gather(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, y = put(a, length, value + rank), put(a, size * length, 0)
        want = np.repeat(np.arange(size) + value, length)
        return [_Begun(a, comm.all_gather(x, out=y, async_op=background), y, want)]

    def reduce_scatter(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, y = put(a, size * length, value + rank), put(a, length, 0)
        return [_Begun(a, comm.reduce_scatter(x, out=y, async_op=background), y, total(length, value))]

    def gather(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, root = put(a, length, value + rank), value % size
        y = put(a, size * length, 0) if rank == root else None
        want = np.repeat(np.arange(size) + value, length) if rank == root else None
        return [_Begun(a, comm.gather(x, root, out=y, async_op=background), y, want)]

    def scatter(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, y, root = (
            a.put(np.repeat(np.arange(size, dtype=np.float32) + value, length)),
            put(a, length, 0),
            value % size,
        )
        return [_Begun(a, comm.scatter(x, root, out=y, async_op=background), y, np.full(length, value + rank))]

    def all_to_all(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, y = put(a, size * length, value + rank), put(a, size * length, 0)
        want = np.repeat(np.arange(size) + value, length)
        return [_Begun(a, comm.all_to_all(x, out=y, async_op=background), y, want)]

    def barrier(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        return [_Begun(a, comm.barrier(async_op=background), None, None)]

    def exchange(a: Arrays, length: int, value: int, background: bool) -> list[_Begun]:
        x, y, want = put(a, length, value + rank), put(a, length, 0), np.full(length, value + before)
        if not background:
            return [_Begun(a, comm.sendrecv(x, after, y, before, value, value), y, want)]
        with comm.group() if value % 2 else contextlib.nullcontext():
            sending, receiving = comm.isend(x, after, value), comm.irecv(y, before, value)
        return [_Begun(a, sending, None, None), _Begun(a, receiving, y, want)]

    messages = {"exchange": exchange, "exchange again": exchange} if size > 1 else {}
    return messages | {
        "all_reduce": all_reduce, "reduce": reduce, "broadcast": broadcast, "all_gather": all_gather,
        "reduce_scatter": reduce_scatter, "gather": gather, "scatter": scatter, "all_to_all": all_to_all,
        "barrier": barrier,
    }  # fmt: skip
