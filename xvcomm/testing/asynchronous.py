"""Checks of devices whose streams go on behind the host: what is ordered, what waits, and what does not.

The other ranks may be on host memory, where a call waits. They take part, and are not watched.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from xvcomm.backends._vendor import Runtime
from xvcomm.communicator import Communicator
from xvcomm.deadline import Deadline
from xvcomm.dtype import BY_NAME
from xvcomm.errors import Aborted, DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.testing.arrays import SECONDS, DeviceArrays, arrays
from xvcomm.testing.cases import assert_same_bits, distinct
from xvcomm.testing.gate import Gate
from xvcomm.testing.trials import warm
from xvcomm.work import Work

_PATIENCE = 0.4
_PAUSE = 0.01
_serial = itertools.count()


class Signals:
    """What ranks tell each other past the communicator, host to host. Made by all ranks at the same place of a check."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._part = comm, f"signals/{next(_serial)}"
        told = enumerate(comm.all_gather_object(arrays(comm).asynchronous))
        self.watched = [rank for rank, asynchronous in told if asynchronous]
        """Ranks whose calls must return before the operation is done."""

    def tell(self, what: str) -> None:
        """Say that this rank has come so far."""
        self._comm.store.set(f"{self._part}/{what}/{self._comm.rank}", b"")

    def hear(self, what: str, ranks: Iterable[int]) -> None:
        """Wait until ranks have come so far."""
        self._comm.store.wait([f"{self._part}/{what}/{rank}" for rank in ranks], Deadline.after(SECONDS))

    def meet(self, what: str) -> None:
        """Wait until all watched ranks have come so far."""
        self.tell(what)
        self.hear(what, self.watched)

    @contextlib.contextmanager
    def late(self, what: str, rank: int) -> Iterator[None]:
        """Let the block of one rank begin when the watched ranks are through theirs."""
        if self._comm.rank == rank:
            self.hear(what, (r for r in self.watched if r != rank))
        yield
        self.tell(what)


def check_host_goes_on(comm: Communicator) -> None:
    """Every call returns though a rank that is needed has not called yet; the result comes when it does."""
    a, signals = arrays(comm), Signals(comm)
    for trial in warm(comm, a):
        for late in (0, comm.size - 1):
            a.fill(trial.source, trial.values)
            with signals.late(f"{trial.name} of {late}", late):
                trial.run()
            assert_same_bits(a.get(trial.target), trial.want, f"{trial.name}, rank {late} late")


def check_after_what_the_stream_holds(comm: Communicator) -> None:
    """An operation reads what work enqueued before it writes, however late that comes."""
    a, signals = arrays(comm), Signals(comm)
    ready = warm(comm, a)
    if not isinstance(a, DeviceArrays):
        for trial in ready:
            a.fill(trial.source, trial.values)
            trial.run()
            assert_same_bits(a.get(trial.target), trial.want, trial.name)
        return
    with Gate.on(a) as gate:
        for trial in ready:
            a.fill(trial.source, np.zeros_like(trial.values))
            gate.close(trial.source)
            trial.run()
            signals.meet(trial.name)  # what waits for nothing has run by now
            gate.open(trial.values)
            assert_same_bits(a.get(trial.target), trial.want, f"{trial.name} behind other work")


def check_before_what_the_stream_gets(comm: Communicator) -> None:
    """Work enqueued behind an operation sees its result, and may overwrite its input."""
    a, signals = arrays(comm), Signals(comm)
    late = comm.size - 1
    for trial in warm(comm, a):
        junk, seen = a.put(np.full_like(trial.values, 7)), a.put(np.zeros_like(trial.want))
        a.fill(trial.source, trial.values)
        with signals.late(trial.name, late):
            trial.run()
            a.copy(seen, trial.target)
            a.copy(trial.source, junk)
        assert_same_bits(a.get(seen), trial.want, f"what came behind {trial.name}")


def check_wait_orders_only(comm: Communicator) -> None:
    """`Work.wait` returns before the operation is done, `synchronize` when it is."""
    a, signals = arrays(comm), Signals(comm)
    late, here, ones = comm.size - 1, comm.rank, np.ones(1000, np.float32)
    x = a.put(ones)
    calls: dict[str, tuple[Callable[[], Work], int]] = {
        "all_reduce": (lambda: comm.all_reduce(x, async_op=True), comm.size),
        "all_gather": (lambda: comm.all_gather(x, async_op=True), 1),
    }
    if here in (0, late):
        calls["message"] = (lambda: comm.isend(x, 0) if here == late else comm.irecv(x, late)), 1
    for what, (call, factor) in calls.items():
        call().synchronize()
        a.fill(x, ones)
        with signals.late(what, late):
            work = call()
            result = work.wait()
            assert here == late or not (a.asynchronous and work.done()), f"{what} was done though rank {late} had not come"
        assert work.synchronize() is result
        assert work.done() and work.exception() is None
        found = a.get(result)
        assert (found == factor).all(), f"{what} that was waited for gave {found}"
    signals.tell("message")


def check_streams_pass(comm: Communicator) -> None:
    """What is under way on one stream holds up no other: neither the arrays' own, nor that of other arrays."""
    a, signals = arrays(comm), Signals(comm)
    other = DeviceArrays(a.device) if isinstance(a, DeviceArrays) else a
    late, ones = comm.size - 1, np.ones(1000)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for each in (a, other):
        comm.sendrecv(each.put(ones), after, each.put(ones), before)
        comm.all_reduce(each.put(ones), async_op=True).synchronize()
    x, y, z, outgoing = a.put(ones), a.put(ones), other.put(ones), other.put(3 * ones)
    with signals.late("all_reduce", late):
        work = comm.all_reduce(x, async_op=True)
        if a.asynchronous:
            assert_same_bits(a.get(y), ones, "an array beside an operation under way")
    assert_same_bits(a.get(work.wait()), comm.size * ones, "the operation under way")
    receiving = comm.recv(y, before) if a.asynchronous else comm.irecv(y, before)
    assert_same_bits(other.get(comm.all_reduce(z)), comm.size * ones, "all_reduce beside a receive that waits")
    comm.barrier()
    sending = comm.isend(outgoing, after)
    if isinstance(receiving, Work):
        receiving.wait()
    assert_same_bits(a.get(y), 3 * ones, "what was received late")
    sending.synchronize()


def check_many_under_way(comm: Communicator, many: int = 100) -> None:
    """More operations ahead of a late rank than anybody looks after at once, blocking and asynchronous."""
    a, signals = arrays(comm), Signals(comm)
    xs = [a.put(np.full(100, i)) for i in range(many)]
    ys = [a.put(np.full(100, i)) for i in range(many)]
    comm.all_reduce(a.put(np.ones(100, int)))
    with signals.late("all", comm.size - 1):
        works = [comm.all_reduce(x, async_op=True) for x in xs]
        for y in ys:
            comm.all_reduce(y)
    for i in reversed(range(many)):
        want = np.full(100, i * comm.size)
        assert_same_bits(a.get(works[i].wait()), want, f"asynchronous all_reduce {i}")
        assert_same_bits(a.get(ys[i]), want, f"all_reduce {i}")
    for work in works:
        work.synchronize()


def check_arrays_die(comm: Communicator) -> None:
    """An asynchronous operation keeps its arrays though nobody else does, until it is over and no longer."""
    a, signals = arrays(comm), Signals(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    parts = [distinct(BY_NAME["int32"], 1000, seed=rank) for rank in range(comm.size)]
    mine, theirs, everything = parts[comm.rank], parts[before], np.concatenate(parts)

    def prepare() -> list[Any]:
        return [a.put(mine), a.put(mine), a.put(np.zeros_like(mine))]

    def start(x: Any, y: Any, z: Any) -> list[Work]:
        comm.isend(x, after)
        return [comm.all_gather(y, async_op=True), comm.irecv(z, before)]

    def check(gathering: Work, receiving: Work) -> None:
        assert_same_bits(a.get(gathering.wait()), everything, "all_gather of an array that nobody kept")
        assert_same_bits(a.get(receiving.wait()), theirs, "a message of an array that nobody kept")

    check(*start(*prepare()))
    if not isinstance(a, DeviceArrays):
        check(*start(*prepare()))
        return
    with Gate.on(a) as gate:
        held, doomed = a.put(np.zeros(1, np.uint8)), prepare()
        watched = [weakref.ref(x) for x in doomed]
        gate.close(held)
        works = start(*doomed)
        doomed.clear()
        gc.collect()
        assert all(x() is not None for x in watched), "an array died before the operation was over"
        signals.meet("collected")
        gate.open(np.ones(1, np.uint8))
        check(*works)
    works.clear()

    def died() -> bool:
        gc.collect()
        return all(x() is None for x in watched)

    _await(died)


_COSTLY = ("allocate", "free", "register", "unregister", "stream", "destroy_stream", "synchronize", "compile", "load")
"""What may make the whole device wait, or takes longer than a small message."""


def check_steady_state(comm: Communicator) -> None:
    """Once every operation has run, none allocates, pins, makes streams or waits for the device any more."""
    a = arrays(comm)
    ready = warm(comm, a)

    def all_of_them(times: int) -> None:
        for trial in ready * times:
            a.fill(trial.source, trial.values)
            result = trial.call()
            for work in result if isinstance(result, list) else ():
                work.synchronize()
        comm.barrier()

    all_of_them(2)
    runtime = getattr(comm._context.device, "runtime", None)
    with contextlib.ExitStack() as stack:
        calls = {
            name: stack.enter_context(mock.patch.object(runtime, name, wraps=getattr(runtime, name)))
            for name in (_COSTLY if isinstance(runtime, Runtime) else ())
        }
        all_of_them(5)
    made = {name: call.call_count for name, call in calls.items() if call.call_count}
    assert not made, f"calls of the vendor's runtime in the steady state: {made}"


def check_mismatch(comm: Communicator) -> None:
    """Ranks that describe a collective differently all learn of it: by `synchronize`, and by the next operation."""
    a, odd = arrays(comm), comm.rank == comm.size - 1
    for asynchronous in (True, False):
        with _group(comm) as group:
            x = a.put(np.zeros(1000, np.float64 if odd else np.float32))
            if asynchronous:
                errors = [_raised(MismatchError, _finished, group.all_reduce, x, async_op=True)]
            else:
                errors = [_raised_soon(MismatchError, group.all_reduce, x)]
            errors.append(_raised(MismatchError, group.barrier))
            for error in errors:
                assert "float32" in str(error) and "float64" in str(error), error
            a.get(x)


def check_message_mismatch(comm: Communicator) -> None:
    """Both ends of a message with two tags learn of it, and nothing is delivered."""
    a, x = arrays(comm), np.ones(1000)
    for asynchronous in (True, False):
        with _group(comm) as group:
            y = a.put(0 * x)
            if comm.rank == 0:
                group.isend(a.put(x), 1, tag=1)
            elif comm.rank == 1 and asynchronous:
                _raised(MismatchError, _finished, group.irecv, y, 0, tag=2)
            elif comm.rank == 1:
                _raised_soon(MismatchError, group.recv, y, 0, tag=2)
            error = _raised_soon(MismatchError, group.barrier)
            assert "tag 1" in str(error) and "tag 2" in str(error), error
            assert not a.get(y).any(), "a message was delivered that both ends described differently"


def check_deadline(comm: Communicator) -> None:
    """What nobody comes to ends by its deadline, and the stream that it is on goes on."""
    a, late = arrays(comm), comm.size - 1
    for what in ("asynchronous", "blocking", "message"):
        signals = Signals(comm)
        with _group(comm) as group:
            x = a.put(np.zeros(1000))
            if comm.rank == late:
                signals.hear("late", range(late))
            elif what == "asynchronous":
                work = group.all_reduce(x, async_op=True, timeout=_PATIENCE)
                _raised(DeadlineExceeded, work.synchronize)
                _await(work.done)  # as soon as the stream has left it
                assert isinstance(work.exception(), DeadlineExceeded)
            elif what == "blocking":
                with contextlib.suppress(DeadlineExceeded):  # on host memory
                    group.all_reduce(x, timeout=_PATIENCE)
                _raised_soon(DeadlineExceeded, group.barrier)
            elif comm.rank == 0:
                with contextlib.suppress(DeadlineExceeded):
                    group.recv(x, late, timeout=_PATIENCE)
            signals.tell("late")
            error = _raised_soon(DeadlineExceeded, group.barrier)
            assert f"rank {late}" in str(error), error
            a.get(x)


def check_departure(comm: Communicator) -> None:
    """Who waits for a rank that closes its communicator learns of it."""
    a, late = arrays(comm), comm.size - 1
    for asynchronous in (True, False):
        signals = Signals(comm)
        with _group(comm) as group:
            x = a.put(np.zeros(1000))
            with signals.late("all_reduce", late):
                if comm.rank == late:
                    group.close()
                elif asynchronous:
                    work = group.all_reduce(x, async_op=True)
                else:
                    with contextlib.suppress(PeerLost):  # on host memory
                        group.all_reduce(x)
            if comm.rank != late:
                errors = [_raised(PeerLost, work.synchronize)] if asynchronous else []
                errors.append(_raised_soon(PeerLost, group.barrier))
                for error in errors:
                    assert error.peer == late, error
            a.get(x)


def check_abort(comm: Communicator) -> None:
    """`abort` ends what is on the streams; the reason comes out of `synchronize` and of the next operation."""
    a, late = arrays(comm), comm.size - 1
    for asynchronous in (True, False):
        signals = Signals(comm)
        with _group(comm) as group:
            x = a.put(np.zeros(1000))
            with signals.late("all_reduce", late):
                if comm.rank == late:
                    group.abort("enough is enough")
                elif asynchronous:
                    work = group.all_reduce(x, async_op=True)
                else:
                    with contextlib.suppress(Aborted):  # on host memory
                        group.all_reduce(x)
            if comm.rank != late and asynchronous:
                assert "enough is enough" in str(_raised(Aborted, work.synchronize))
            assert "enough is enough" in str(_raised_soon(Aborted, group.barrier))
            a.get(x)


@contextlib.contextmanager
def _group(comm: Communicator) -> Iterator[Communicator]:
    """A communicator of all ranks that may be finished in the block; `comm` must still work afterwards."""
    group = comm.split(0)
    assert group is not None
    a = arrays(comm)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for each in (group, comm):
        each.all_reduce(a.put(np.ones(3)))
        each.sendrecv(a.put(np.ones(3)), after, a.put(np.ones(3)), before)
    try:
        yield group
    finally:
        group.close()
    assert (a.get(comm.all_reduce(a.put(np.ones(3)))) == comm.size).all()
    assert (a.get(comm.sendrecv(a.put(np.ones(3)), after, a.put(np.zeros(3)), before)) == 1).all()


def _finished(start: Callable[..., Work], *args: Any, **kwargs: Any) -> None:
    start(*args, **kwargs).synchronize()


def _raised(error: type[XvcommError], call: Callable[..., Any], *args: Any, **kwargs: Any) -> XvcommError:
    """The error that a call raises."""
    try:
        call(*args, **kwargs)
    except error as raised:
        return raised
    raise AssertionError(f"no {error.__name__}")


def _raised_soon(error: type[XvcommError], call: Callable[..., Any], *args: Any, **kwargs: Any) -> XvcommError:
    """The error that a call raises, or a later one: a call that does not wait cannot know what comes of it."""
    raised: list[XvcommError] = []

    def has_raised() -> bool:
        try:
            call(*args, **kwargs)
        except error as caught:
            raised.append(caught)
        return bool(raised)

    _await(has_raised)
    return raised[0]


def _await(condition: Callable[[], bool]) -> None:
    """Wait until something is so, which the code under test brings about by itself."""
    deadline = Deadline.after(SECONDS)
    while not condition():
        assert not deadline.expired(), f"still not so after {SECONDS} s"
        time.sleep(_PAUSE)


ORDER: tuple[Callable[[Communicator], None], ...] = (
    check_host_goes_on, check_after_what_the_stream_holds, check_before_what_the_stream_gets, check_wait_orders_only,
    check_streams_pass, check_many_under_way, check_arrays_die, check_steady_state,
)  # fmt: skip
ERRORS: tuple[Callable[[Communicator], None], ...] = (
    check_mismatch, check_message_mismatch, check_deadline, check_abort, check_departure,
)  # fmt: skip
