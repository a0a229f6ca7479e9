"""One call of each operation, with arrays that exist beforehand, so that what happens around it can be watched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import Work
from xvcomm.testing.arrays import Array, Arrays
from xvcomm.testing.cases import Reducing, assert_same_bits, distinct
from xvcomm.types.dtype import BY_NAME

_ROWS = 3_000


@dataclass(frozen=True, slots=True)
class Trial:
    """One operation, the same on all ranks.

    Attributes:
        source, values: the input, and what it must hold when the operation reads it.
        target, want: the output, which may be `source`, and what it holds afterwards.
        call: calls it; gives a list of Works if it is asynchronous.
    """

    name: str
    source: Any
    values: Array
    target: Any
    want: Array
    call: Callable[[], Any]

    def run(self) -> None:
        """Call it, and let what comes next on the arrays' stream wait for it."""
        result = self.call()
        for work in result if isinstance(result, list) else ():
            work.wait()


def trials(comm: Communicator, a: Arrays) -> list[Trial]:
    """Every collective and every way to send and receive; roots are in the middle."""
    return [*_reducing(comm, a), *_moving(comm, a), *_messages(comm, a)]


def warm(comm: Communicator, a: Arrays) -> list[Trial]:
    """The same after each has run once: the first time, rings are opened and libraries joined, which waits."""
    found = trials(comm, a)
    for trial in found:
        a.fill(trial.source, trial.values)
        trial.run()
        assert_same_bits(a.get(trial.target), trial.want, trial.name)
    return found


def _reducing(comm: Communicator, a: Arrays) -> list[Trial]:
    rows, rank, root = _ROWS * comm.size, comm.rank, comm.size // 2
    case = Reducing.of(comm, "float32", "sum", rows)
    mine, block = case.inputs[rank], case.result[rank * _ROWS : (rank + 1) * _ROWS]
    x = a.put(np.zeros_like(mine))
    whole, part = a.put(np.zeros_like(mine)), a.put(np.zeros_like(block))
    here = rank == root
    return [
        Trial("all_reduce", x, mine, whole, case.result, lambda: comm.all_reduce(x, out=whole)),
        Trial("all_reduce in place", x, mine, x, case.result, lambda: comm.all_reduce(x)),
        Trial("asynchronous all_reduce", x, mine, x, case.result, lambda: [comm.all_reduce(x, async_op=True)]),
        Trial("reduce", x, mine, x, case.result if here else mine, lambda: comm.reduce(x, root)),
        Trial("reduce_scatter", x, mine, part, block, lambda: comm.reduce_scatter(x, out=part)),
    ]


def _moving(comm: Communicator, a: Arrays) -> list[Trial]:
    size, rank, root = comm.size, comm.rank, comm.size // 2
    kind, here = BY_NAME["float32"], rank == root
    everything, own = distinct(kind, _ROWS * size, seed=1), slice(rank * _ROWS, (rank + 1) * _ROWS)
    block = everything[own]
    part, whole, nothing = a.put(np.zeros_like(block)), a.put(np.zeros_like(everything)), np.zeros_like(everything)
    outgoing = [distinct(kind, _ROWS * size, seed=100 + r) for r in range(size)]
    incoming = np.concatenate([x[own] for x in outgoing])
    x, y = a.put(nothing), a.put(nothing)
    return [
        Trial("broadcast", x, everything if here else nothing, x, everything, lambda: comm.broadcast(x, root)),
        Trial("all_gather", part, block, whole, everything, lambda: comm.all_gather(part, out=whole)),
        Trial(
            "gather", part, block, y, everything if here else nothing,
            lambda: comm.gather(part, root, out=y if here else None),
        ),
        Trial("scatter", x, everything, part, block, lambda: comm.scatter(x if here else None, root, out=part)),
        Trial("all_to_all", x, outgoing[rank], whole, incoming, lambda: comm.all_to_all(x, out=whole)),
        Trial(
            "asynchronous all_gather", part, block, whole, everything,
            lambda: [comm.all_gather(part, out=whole, async_op=True)],
        ),
    ]  # fmt: skip


def _messages(comm: Communicator, a: Arrays) -> list[Trial]:
    if comm.size == 1:
        return []
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, theirs = (distinct(BY_NAME["float32"], _ROWS, seed=200 + rank) for rank in (comm.rank, before))
    x, y = a.put(np.zeros_like(mine)), a.put(np.zeros_like(mine))

    def group() -> None:
        with comm.group():
            comm.send(x, after)
            comm.recv(y, before)

    def background() -> list[Work]:
        return [comm.isend(x, after), comm.irecv(y, before)]

    def one_by_one() -> None:
        comm.send(x, after)  # fits into the ring
        comm.recv(y, before)

    calls: dict[str, Callable[[], Any]] = {
        "sendrecv": lambda: comm.sendrecv(x, after, y, before), "group": group, "isend and irecv": background,
        "send and recv": one_by_one,
    }  # fmt: skip
    return [Trial(name, x, mine, y, theirs, call) for name, call in calls.items()]
