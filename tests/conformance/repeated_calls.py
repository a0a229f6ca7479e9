"""Checks of operations that compiled code starts on GPUs, because they were called before in the same shape."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock, patch

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.context import Context
from xvcomm.engine.stream_collectives import StreamCollectives
from xvcomm.testing.arrays import Array, arrays, on_device
from xvcomm.testing.cases import assert_same_bits
from xvcomm.types.dtype import BY_NAME, premul_sum

_WARM, _TIMES, _BESIDE = 3, 8, 3
_LOOK_SECONDS = 0.02
"""Interval in which asynchronous operations are polled at least once."""

_LATE_SECONDS, _LONG_SECONDS = 1.0, 15.0


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to call a collective.

    Attributes:
        call: called with input and output.
        want: this rank's result, from all ranks' inputs; None if there is none.
        whole: whether the input is as long as all blocks together.
        wide: whether the output is.
        in_place: whether the input is the output.
        dtype: of both.
        native: whether an island's library supports it, so that compiled code starts it within an island, too.
        known: whether it is then recognized by its arrays alone.
    """

    call: Callable[..., Any]
    want: Callable[[Sequence[Array]], Array | None]
    whole: bool = True
    wide: bool = True
    in_place: bool = False
    dtype: str = "float32"
    native: bool = True
    known: bool = True


@contextlib.contextmanager
def begun_by_python(comm: Communicator) -> Iterator[Mock]:
    """Like `on_device`, with a mock that counts the operations that compiled code did not begin."""
    begun, begin = Mock(), Context.begin

    def counted(context: Context, *args: Any, **kwargs: Any) -> Any:
        begun()
        return begin(context, *args, **kwargs)

    with on_device(comm), patch.object(Context, "begin", counted):
        yield begun


def check_repeated(comm: Communicator, rounds: int) -> None:
    """Repeated calls in the same shape give correct results; over one or two islands compiled code starts them on GPUs."""
    a, mine, total = arrays(comm), float(comm.rank + 1), sum(range(1, comm.size + 1))
    xs = [a.put(np.full(1000, mine)) for _ in range(rounds)]
    with begun_by_python(comm) as begun:
        for number, x in enumerate(xs):
            if number % 2:
                comm.all_reduce(x)
            else:
                comm.all_reduce(x, async_op=True).wait()
        assert all((a.get(x) == total).all() for x in xs)
        begun.reset_mock()
        for x in xs:
            comm.broadcast(x, comm.size - 1)
            comm.all_reduce(x)
        if a.asynchronous and comm.size > 1 and len(comm.topology.islands) < 3:  # a single rank has no call to repeat
            # A broadcast does not suit the islands of every topology.
            assert begun.call_count < rounds + 5, "Python began all operations"
    assert all((a.get(x) == total * comm.size).all() for x in xs)


def check_messages_repeated(comm: Communicator, rounds: int) -> None:
    """Messages that start together, called before in the same shapes; compiled code starts them on GPUs."""
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    peers = [peer for peer in range(comm.size) if peer != comm.rank]

    def data(source: int, number: int) -> Array:
        return np.full(1000, 100.0 * number + source)

    sent = [a.put(data(comm.rank, number)) for number in range(rounds)]
    rooms = [{peer: a.put(np.zeros(1000)) for peer in (*peers, "sendrecv", "recv")} for _ in sent]
    with begun_by_python(comm) as begun:
        for number, (x, room) in enumerate(zip(sent, rooms, strict=True)):
            if number == 5:
                begun.reset_mock()
            assert comm.sendrecv(x, after, room["sendrecv"], before, number, number) is room["sendrecv"]
            with comm.group():
                for peer in peers:
                    comm.recv(room[peer], peer, 7)
                    comm.send(x, peer, 7)
            comm.send(x, after)
            comm.recv(room["recv"], before)
    if a.asynchronous:
        assert begun.call_count == 0, "Python began messages that compiled code can begin"
    for number, room in enumerate(rooms):
        for key, array in room.items():
            want = data(key if isinstance(key, int) else before, number)
            assert_same_bits(a.get(array), want, f"message {number} ({key})")


def check_streams_that_end(comm: Communicator, stream: Callable[[], AbstractContextManager[int]]) -> None:
    """A stream may be destroyed as soon as the operations on it are complete, whether Python or compiled code began them.

    Args:
        comm: the communicator.
        stream: returns the handle of a new stream, waits for it, and destroys it.
    """
    a, total = arrays(comm), sum(range(comm.size))
    x, y, z = (a.put(np.zeros(1000)) for _ in range(3))
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with begun_by_python(comm) as begun:
        for number in range(_WARM + _TIMES):
            a.fill(x, np.full(1000, comm.rank + number, float))
            a.synchronize()
            if number == _WARM:
                begun.reset_mock()
            with stream() as handle:
                for _ in range(_WARM):
                    comm.all_reduce(x, out=y, stream=handle)
                    if comm.size > 1:
                        comm.sendrecv(x, after, z, before, stream=handle)
            assert (a.get(y) == total + comm.size * number).all()
            assert comm.size == 1 or (a.get(z) == before + number).all()
            time.sleep(_LOOK_SECONDS)
        if a.asynchronous and comm.size > 1 and len(comm.topology.islands) < 3:
            # Python begins operations of a ring on a new stream; each stream gets nine operations.
            assert begun.call_count <= 4 * _TIMES, f"Python began {begun.call_count} operations"


def check_late_messages_on_a_stream(comm: Communicator, stream: Callable[[], AbstractContextManager[int]]) -> None:
    """Operations that compiled code enqueued first complete early, while later messages wait for the other rank.

    Args:
        comm: the communicator.
        stream: see `check_streams_that_end`.
    """
    a, rank, pair = arrays(comm), comm.rank, range(2)
    x, y = a.put(np.full(1000, float(rank))), a.put(np.zeros(1000))
    data = [[a.put(np.zeros(1000)) for _ in pair] for _ in range(4)]

    def message(number: int) -> None:
        with comm.group():
            for channel, part in enumerate(data[number]):
                if rank == 0:
                    comm.recv(part, 1, channel=channel, stream=handle)
                elif rank == 1:
                    comm.send(part, 0, channel=channel, stream=handle)

    with on_device(comm), stream() as handle:
        for number in range(len(data)):  # pins the rings
            message(number)
            comm.all_reduce(x, out=y, stream=handle)
        for number, parts in enumerate(data):
            for channel, part in enumerate(parts):
                a.fill(part, np.full(1000, float(rank * (10 * number + channel))))
        a.synchronize()
        comm.barrier()
        time.sleep(_LOOK_SECONDS)
        comm.all_reduce(x, out=y, stream=handle)
        if rank != 0:
            time.sleep(_LATE_SECONDS)
        for number in range(len(data)):
            message(number)
            if number:  # the collective already has its event
                time.sleep(_LATE_SECONDS / 8)
        comm.barrier()
    if rank == 0:
        assert all((a.get(part) == 10 * n + c).all() for n, parts in enumerate(data) for c, part in enumerate(parts))


def check_unlike_deadlines(comm: Communicator) -> None:
    """An operation that completes in time, followed by one with a later deadline: only operations past their deadline fail."""
    a, after, before = arrays(comm), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = a.put(np.ones(1000)), a.put(np.zeros(1000))

    def exchange(timeout: float) -> None:
        comm.sendrecv(x, after, y, before, timeout=timeout)

    def reduce(timeout: float) -> None:
        comm.all_reduce(x, "avg", timeout=timeout)

    def start(timeout: float) -> None:
        comm.all_reduce(x, "avg", timeout=timeout, async_op=True).wait()

    with on_device(comm):
        for call in (exchange, reduce, start):
            for _ in range(_WARM):
                call(_LONG_SECONDS)
            a.synchronize()
            comm.barrier()
            call(_LATE_SECONDS / 2)
            if comm.rank:
                time.sleep(_LATE_SECONDS)
            call(_LONG_SECONDS)
            a.synchronize()
    comm.barrier()
    assert (a.get(x) == 1).all()


def check_forms_repeated(comm: Communicator, count: int) -> None:
    """Every collective repeatedly with other numbers, beside asynchronous ones; on GPUs compiled code starts them.

    Args:
        comm: the communicator.
        count: elements of all ranks' blocks together; divisible by their number.
    """
    a, islands = arrays(comm), [island.size for island in comm.topology.islands]
    block = count // comm.size
    for name, form in _forms(comm).items():
        length = count if form.whole else block
        x = a.put(np.zeros(length, BY_NAME[form.dtype].numpy))
        y = x if form.in_place else a.put(np.zeros(count if form.wide else block, BY_NAME[form.dtype].numpy))
        with (
            begun_by_python(comm) as begun,
            patch.object(StreamCollectives, "run", autospec=True, side_effect=StreamCollectives.run) as run,
        ):
            for number in range(_TIMES):
                if number == _WARM:
                    begun.reset_mock()
                    run.reset_mock()
                _once(comm, f"{name}, call {number}", form, length, number, x, y)
            compiled = form.native if len(islands) == 1 else len(islands) == 2 and islands[0] == islands[1]
            if a.asynchronous and comm.size > 1 and compiled:
                assert begun.call_count < 2, f"Python began {begun.call_count} of {_TIMES - _WARM} times {name}"
                assert run.call_count < 2 or not form.known, f"{name} was taken apart {run.call_count} times"
            for number in range(_TIMES, _TIMES + _BESIDE):
                _once(comm, f"asynchronous {name}, call {number}", form, length, number, x, y, async_op=True)
                _once(comm, f"{name} beside, call {number}", form, length, number + 1, x, y)


def check_uneven_repeated(comm: Communicator) -> None:
    """Collectives of unequal blocks repeatedly with other numbers; on GPUs compiled code starts those without empty blocks."""
    a, size, rank, islands = arrays(comm), comm.size, comm.rank, [island.size for island in comm.topology.islands]
    for counts in ([r + 1 for r in range(size)], [5 * r % 7 for r in range(size)]):
        sent = [[counts[(r + s) % size] for r in range(size)] for s in range(size)]
        begins = np.cumsum([0, *counts])
        with begun_by_python(comm) as begun:
            for number in range(_TIMES):
                if number == _WARM:
                    begun.reset_mock()
                xs = [_numbers(sum(counts), number, r, size).astype(np.float32) for r in range(size)]
                blocks, total = [x[:n] for x, n in zip(xs, counts, strict=True)], np.sum(xs, axis=0)
                crossed = [np.split(x, np.cumsum(row)[:-1])[rank] for x, row in zip(xs, sent, strict=True)]
                own, received = slice(*begins[rank : rank + 2]), [row[rank] for row in sent]
                for what, got, want in (
                    ("all_gather", comm.all_gather(a.put(blocks[rank]), counts=counts), np.concatenate(blocks)),
                    ("reduce_scatter", comm.reduce_scatter(a.put(xs[rank]), counts=counts), total[own]),
                    (
                        "gather",
                        comm.gather(a.put(blocks[rank]), counts=counts),
                        None if rank else np.concatenate(blocks),
                    ),
                    ("scatter", comm.scatter(a.put(xs[rank]), counts=counts), xs[0][own]),
                    (
                        "all_to_all",
                        comm.all_to_all(a.put(xs[rank]), send_counts=sent[rank], recv_counts=received),
                        np.concatenate(crossed),
                    ),
                ):
                    if want is not None:
                        assert_same_bits(a.get(got), want, f"{what} of {counts} rows, call {number}")
        if a.asynchronous and size > 1 and all(counts) and (len(islands) == 1 or islands == [islands[0]] * 2):
            assert begun.call_count < 2, f"Python began {begun.call_count} of {5 * (_TIMES - _WARM)}"


def check_factors_repeated(comm: Communicator) -> None:
    """Sums with factors that differ between calls of one shape."""
    a = arrays(comm)
    x, y = a.put(np.full(480, comm.rank + 1.0, np.float32)), a.put(np.zeros(480, np.float32))
    for factor in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 2.0, 3.0):
        comm.all_reduce(x, premul_sum(factor), out=y)
        want = np.full(480, factor * sum(range(1, comm.size + 1)), np.float32)
        assert_same_bits(a.get(y), want, f"sum with the factor {factor}")


def check_background_repeated(comm: Communicator, count: int) -> None:
    """Asynchronous messages of one shape, repeatedly with other numbers: alone and in groups, beside blocking ones, and several
    in progress.

    Args:
        comm: the communicator.
        count: elements of a message.
    """
    a, after, before = arrays(comm), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    x, y = a.put(np.zeros(count)), a.put(np.zeros(count))
    for together in (contextlib.nullcontext, comm.group):
        with begun_by_python(comm) as begun:
            for number in range(2 * _TIMES):
                if number == _WARM:
                    begun.reset_mock()
                a.fill(x, np.full(count, 100.0 * comm.rank + number))
                a.fill(y, np.zeros(count))
                with together():
                    works = [comm.isend(x, after, number), comm.irecv(y, before, number)]
                works[1].wait()
                assert_same_bits(a.get(y), np.full(count, 100.0 * before + number), f"message {number}")
                for work in works:
                    work.synchronize()
                if number == _TIMES and a.asynchronous:
                    assert begun.call_count < 2, (
                        f"Python began {begun.call_count} of {_TIMES - _WARM} times two messages"
                    )
                if number > _TIMES:
                    comm.sendrecv(x, after, y, before, number, number)
    several = range(_TIMES)
    xs, ys = ([a.put(np.full(count, comm.rank + 10.0 * i)) for i in several] for _ in range(2))
    works = [work for i in several for work in (comm.irecv(ys[i], before, i), comm.isend(xs[i], after, i))]
    for i, (receiving, sending) in reversed(list(enumerate(zip(works[::2], works[1::2], strict=True)))):
        assert receiving.wait() is ys[i]
        assert_same_bits(a.get(ys[i]), np.full(count, before + 10.0 * i), f"message {i} of several")
        sending.synchronize()


def _once(comm: Communicator, what: str, form: _Form, length: int, number: int, x: Any, y: Any, **how: Any) -> None:
    """Call a collective on new numbers and check the result."""
    a = arrays(comm)
    inputs = [_numbers(length, number, rank, comm.size).astype(BY_NAME[form.dtype].numpy) for rank in range(comm.size)]
    want = form.want(inputs)
    a.fill(y, np.zeros_like(a.get(y)))
    a.fill(x, inputs[comm.rank])
    work = form.call(x, y, **how)
    if how:
        work.wait()
    if want is not None:
        assert_same_bits(a.get(y), want.astype(BY_NAME[form.dtype].numpy), what)


def _numbers(count: int, number: int, rank: int, size: int) -> Array:
    """Small integers that differ between calls and ranks, with integer averages."""
    return (np.arange(count) % 5 + 3 * number % 7 + rank) * size


def _forms(comm: Communicator) -> dict[str, _Form]:
    size, rank, root = comm.size, comm.rank, comm.size - 1
    here, half = rank == root, premul_sum(0.5)

    def total(xs: Sequence[Array]) -> Array:
        return np.asarray(np.sum(xs, axis=0, dtype=np.float32))

    def mean(xs: Sequence[Array]) -> Array:
        return total(xs) / size

    def own(whole: Array) -> Array:
        return np.split(whole, size)[rank]

    def at_root(value: Array) -> Array | None:
        return value if here else None

    return {
        "all_reduce": _Form(lambda x, y, **how: comm.all_reduce(x, out=y, **how), total),
        "all_reduce in place": _Form(lambda x, y, **how: comm.all_reduce(x, **how), total, in_place=True),
        "all_reduce avg": _Form(lambda x, y, **how: comm.all_reduce(x, "avg", out=y, **how), mean),
        "all_reduce avg of float16 in place": _Form(
            lambda x, y, **how: comm.all_reduce(x, "avg", **how), mean, in_place=True, dtype="float16"
        ),
        "all_reduce premul_sum": _Form(
            lambda x, y, **how: comm.all_reduce(x, half, out=y, **how), lambda xs: total(xs) / 2, native=False
        ),
        "broadcast": _Form(lambda x, y, **how: comm.broadcast(x, root, **how), lambda xs: xs[root], in_place=True),
        "reduce_scatter": _Form(
            lambda x, y, **how: comm.reduce_scatter(x, out=y, **how), lambda xs: own(total(xs)), wide=False
        ),
        "reduce_scatter avg": _Form(
            lambda x, y, **how: comm.reduce_scatter(x, "avg", out=y, **how), lambda xs: own(mean(xs)), wide=False
        ),
        "reduce_scatter avg of float16": _Form(
            lambda x, y, **how: comm.reduce_scatter(x, "avg", out=y, **how), lambda xs: own(mean(xs)), wide=False,
            dtype="float16",
        ),
        "all_gather": _Form(lambda x, y, **how: comm.all_gather(x, out=y, **how), np.concatenate, whole=False),
        "reduce": _Form(
            lambda x, y, **how: comm.reduce(x, root, out=y if here else None, **how), lambda xs: at_root(total(xs)), known=False
        ),
        "gather": _Form(
            lambda x, y, **how: comm.gather(x, root, out=y if here else None, **how),
            lambda xs: at_root(np.concatenate(xs)), whole=False, known=False,
        ),
        "scatter": _Form(
            lambda x, y, **how: comm.scatter(x if here else None, root, out=y, **how), lambda xs: own(xs[root]), wide=False,
            known=False,
        ),
        "all_to_all": _Form(
            lambda x, y, **how: comm.all_to_all(x, out=y, **how), lambda xs: np.concatenate([own(x) for x in xs])
        ),
    }  # fmt: skip


CHECKS: tuple[tuple[Callable[..., None], tuple[int, ...]], ...] = (
    (check_repeated, (40,)),
    (check_factors_repeated, ()),
    (check_uneven_repeated, ()),
    (check_forms_repeated, (480,)),
    (check_forms_repeated, (96_000,)),
    (check_background_repeated, (10,)),
    (check_background_repeated, (300_000,)),
)
"""Collectives that are called again, with the arguments of each."""
