"""Checks that errors on an asynchronous device are reported, and that its streams continue to work.

Each runs on communicators of its own, split off the processes' communicator.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.errors import Aborted, DeadlineExceeded, MismatchError, PeerLost, XvcommError
from xvcomm.testing.arrays import SECONDS, arrays, on_device
from xvcomm.testing.failing import error_of, error_soon, finish, may_fail, warmed_up
from xvcomm.testing.signals import Signals, await_that

_PATIENCE = 0.4


def check_mismatch(comm: Communicator, timeout: float | None = None) -> None:
    """A mismatch of a collective is reported on all ranks: by `synchronize`, and by the next operation.

    Args:
        timeout: of the collective. In an island over hosts its deadline tells of the mismatch.
    """
    a, odd = arrays(comm), comm.rank == comm.size - 1
    for asynchronous in (True, False):
        with may_fail(comm) as group:
            x = a.put(np.zeros(1000, np.float64 if odd else np.float32))
            if asynchronous:
                errors = [error_of(MismatchError, finish, group.all_reduce, x, async_op=True, timeout=timeout)]
            else:
                errors = [error_soon(MismatchError, group.all_reduce, x, timeout=timeout)]
            errors.append(error_of(MismatchError, group.barrier))
            for error in errors:
                assert "float32" in str(error) and "float64" in str(error), error
            a.get(x)


def check_message_mismatch(comm: Communicator) -> None:
    """A mismatch of tags is reported at both ends of a message, and nothing is delivered."""
    a, x = arrays(comm), np.ones(1000)
    for asynchronous in (True, False):
        with may_fail(comm) as group:
            y = a.put(0 * x)
            if comm.rank == 0:
                group.isend(a.put(x), 1, tag=1)
            elif comm.rank == 1 and asynchronous:
                error_of(MismatchError, finish, group.irecv, y, 0, tag=2)
            elif comm.rank == 1:
                error_soon(MismatchError, group.recv, y, 0, tag=2)
            error = error_soon(MismatchError, group.barrier)
            assert "tag 1" in str(error) and "tag 2" in str(error), error
            assert not a.get(y).any(), "a message was delivered that both ends described differently"


def check_message_mismatch_with_the_departed(comm: Communicator) -> None:
    """A receiver whose peer described the message differently and then left gets the mismatch, not just PeerLost."""
    a, last = arrays(comm), comm.size - 1
    for asynchronous in (True, False):
        signals = Signals(comm)
        with may_fail(comm) as group:
            if comm.rank == last:
                group.send(a.put(np.ones(10)), 0, tag=1)
                group.close()
            elif comm.rank == 0:
                signals.hear("left", [last])
                y = a.put(np.zeros(10))
                if asynchronous:
                    errors = [error_of(MismatchError, finish, group.irecv, y, last, tag=2)]
                else:
                    errors = [error_soon(MismatchError, group.recv, y, last, tag=2)]
                errors.append(error_soon(MismatchError, group.barrier))
                for error in errors:
                    assert "sent 10 x float64, tag 1" in str(error), error
                    assert "expected 10 x float64, tag 2" in str(error), error
                assert not a.get(y).any(), "a message was delivered that both ends described differently"
            signals.tell("left")
            signals.hear("left", range(comm.size))


def check_message_to_the_departed(comm: Communicator) -> None:
    """A sender to a rank that has left gets PeerLost, not a mismatch."""
    a, last, signals = arrays(comm), comm.size - 1, Signals(comm)
    with may_fail(comm) as group:
        if comm.rank == last:
            group.recv(a.put(np.zeros(10)), 0)
            group.close()
        elif comm.rank == 0:
            group.send(a.put(np.ones(10)), last)
            signals.hear("left", [last])
            error = error_soon(PeerLost, group.send, a.put(np.ones(20)), last)
            assert error.peer == last, error
        signals.tell("left")
        signals.hear("left", range(comm.size))


def check_deadline(comm: Communicator) -> None:
    """An operation that its peers do not join ends by its deadline, and its stream continues."""
    a, late = arrays(comm), comm.size - 1
    for what in ("asynchronous", "blocking", "message"):
        signals = Signals(comm)
        with may_fail(comm) as group:
            x = a.put(np.zeros(1000))
            if comm.rank == late:
                signals.hear("late", range(late))
            elif what == "asynchronous":
                work = group.all_reduce(x, async_op=True, timeout=_PATIENCE)
                error_of(DeadlineExceeded, work.synchronize)
                await_that(work.done)  # as soon as the stream has passed it
                assert isinstance(work.exception(), DeadlineExceeded)
            elif what == "blocking":
                with contextlib.suppress(DeadlineExceeded):  # on host memory
                    group.all_reduce(x, timeout=_PATIENCE)
                error_soon(DeadlineExceeded, group.barrier)
            elif comm.rank == 0:
                with contextlib.suppress(DeadlineExceeded):
                    group.recv(x, late, timeout=_PATIENCE)
            signals.tell("late")
            error = error_soon(DeadlineExceeded, group.barrier)
            assert f"rank {late}" in str(error), error
            a.get(x)


def check_deadline_behind_a_late_event(comm: Communicator) -> None:
    """A deadline is enforced even if the event of an earlier operation is recorded after the operation's own."""
    a, late, signals, add = arrays(comm), comm.size - 1, Signals(comm), Tracker.add_blocking

    def add_late(tracker: Tracker, *args: Any) -> None:
        time.sleep(_PATIENCE / 2)  # the thread that polls the device records an event after the current work
        add(tracker, *args)

    with may_fail(comm) as group:
        x = a.put(np.zeros(1000))
        group.all_reduce(x)
        if comm.rank == late:
            signals.hear("late", range(late))
        else:
            with mock.patch.object(Tracker, "add_blocking", add_late), contextlib.suppress(DeadlineExceeded):
                group.all_reduce(x, timeout=_PATIENCE)
            begin = time.monotonic()
            error_soon(DeadlineExceeded, group.barrier)
            assert time.monotonic() - begin < SECONDS / 4, "the deadline of an older operation was waited for"
        signals.tell("late")
        error_soon(DeadlineExceeded, group.barrier)
        a.get(x)


def check_deadline_beside_loading(comm: Communicator, late: str) -> None:
    """The native library loads a kernel, for which it waits for a message that waits for a rank: both end in time.

    Requires ranks in whose processes the library has not broadcast yet.

    Args:
        late: whose deadline passes first, that of the `recv` or of the `broadcast`.
    """
    a = arrays(comm)
    x, y = a.put(np.zeros(1000)), a.put(np.ones(3))
    soon = 12 * _PATIENCE  # long enough to be met on a busy machine
    patience = {"recv": SECONDS, "broadcast": SECONDS, late: soon}
    with may_fail(comm) as group:
        for _ in range(3):
            group.all_reduce(y)
        begin = time.monotonic()
        work = group.irecv(x, (comm.rank + 1) % comm.size, timeout=patience["recv"])
        group.all_reduce(y, timeout=0.75 * soon)  # completes in time, which is not visible
        with contextlib.suppress(DeadlineExceeded):
            group.broadcast(y, timeout=patience["broadcast"])
        error = error_of(DeadlineExceeded, work.synchronize)
        assert re.search(rf"[:;] {late} [^;:]*(was waiting for|: the native collective)", str(error)), error
        assert time.monotonic() - begin < SECONDS / 2
        error_soon(DeadlineExceeded, group.barrier)
        a.get(x)
        a.get(y)


def check_abort(comm: Communicator) -> None:
    """`abort` ends the operations on the streams; `synchronize` and the next operation raise the reason."""
    for error in _ended_by(comm, lambda group: group.abort("enough is enough"), Aborted):
        assert "enough is enough" in str(error), error


def check_departure(comm: Communicator) -> None:
    """Waiting for a rank that closes its communicator raises PeerLost."""
    for error in _ended_by(comm, Communicator.close, PeerLost):
        assert error.peer == comm.size - 1, error


def check_early_departure(comm: Communicator) -> None:
    """A rank that has finished its part of a collective may close the communicator before others begin theirs."""
    a, size, me = arrays(comm), comm.size, comm.rank
    values = np.arange(1.0, size + 1)

    def mine() -> Any:
        return a.put(np.full(size, me + 1.0))

    def scattered(group: Communicator) -> Any:
        return group.scatter(a.put(values) if me == 0 else None, out=a.put(np.zeros(1)), root=0)

    calls: list[tuple[Callable[[Communicator], Any], bool, Any]] = [
        (lambda group: group.broadcast(mine(), size - 1), me == size - 1, np.full(size, float(size))),
        (scattered, me == 0, values[me]),
        (lambda group: group.reduce(mine(), 0), me > 0, np.full(size, values.sum()) if me == 0 else None),
        (lambda group: group.gather(mine(), 0), me > 0, np.repeat(values, size) if me == 0 else None),
    ]
    for repeated in (0, 3):
        for call, first, wanted in calls:
            with may_fail(comm) as group:
                for _ in range(repeated):
                    call(group)
                comm.barrier()
                if not first:
                    time.sleep(_PATIENCE)  # by then this rank knows that others have left, where they can
                result = call(group)
                if wanted is not None:
                    assert (np.ravel(a.get(result)) == wanted).all(), a.get(result)


def check_mismatch_repeated(comm: Communicator, timeout: float | None = None) -> None:
    """`check_mismatch` for collectives that were called before in the same shape."""
    with warmed_up(comm):
        check_mismatch(comm, timeout)


def check_deadline_repeated(comm: Communicator) -> None:
    """`check_deadline` for collectives that were called before in the same shape."""
    with warmed_up(comm):
        check_deadline(comm)


def check_abort_repeated(comm: Communicator) -> None:
    """`check_abort` for collectives that were called before in the same shape."""
    with warmed_up(comm):
        check_abort(comm)


def check_departure_repeated(comm: Communicator) -> None:
    """`check_departure` for collectives that were called before in the same shape."""
    with warmed_up(comm):
        check_departure(comm)


def check_exchange_repeated(comm: Communicator) -> None:
    """Errors of an exchange that was called before in the same shape are reported: mismatch, deadline, departure."""
    a, last = arrays(comm), comm.size - 1
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for what, wanted in (("mismatch", MismatchError), ("deadline", DeadlineExceeded), ("departure", PeerLost)):
        signals = Signals(comm)
        with on_device(comm), may_fail(comm) as group:
            x, y = a.put(np.ones(1000)), a.put(np.zeros(1000))
            for _ in range(8):
                group.sendrecv(a.put(np.zeros(1000)), after, y, before)
            a.get(y)
            signals.tell("warm")
            signals.hear("warm", range(comm.size))
            if what == "departure" and comm.rank == last:
                group.close()
            elif what == "mismatch" or comm.rank != last:
                tags = {}
                if what == "mismatch":
                    tags = {"send_tag": int(comm.rank == last), "recv_tag": 2 * int(comm.rank == 0)}
                with contextlib.suppress(wanted):  # on host memory
                    group.sendrecv(x, after, y, before, **tags, timeout=_PATIENCE if what == "deadline" else None)
            else:
                signals.hear("late", range(last))
            signals.tell("late")
            if what == "departure" and comm.rank == last:
                continue
            error = error_soon(wanted, group.barrier)
            if what == "mismatch":
                assert "tag 1" in str(error) and "tag 2" in str(error), error
                assert comm.rank or not a.get(y).any(), "a message was delivered that both ends described differently"
            elif comm.size == 2:
                assert f"rank {last}" in str(error), error


def check_probe_deadline(comm: Communicator) -> None:
    """A probe that finds nothing ends by its deadline, and names ranks that sent nothing; it ends at once on an abort."""
    last = comm.size - 1
    for source in (last, None):
        signals = Signals(comm)
        with may_fail(comm) as group:
            if comm.rank == 0:
                error = error_of(DeadlineExceeded, group.probe, source, channel=1, timeout=_PATIENCE)
                named = range(1, comm.size) if source is None else [last]
                assert all(f"rank {rank} on " in str(error) for rank in named) and "(channel 1)" in str(error), error
            else:
                signals.hear("late", [0])
            signals.tell("late")
            error_soon(DeadlineExceeded, group.iprobe)
        with may_fail(comm) as group:
            if comm.rank == 0:
                error = error_of(Aborted, group.probe, source)
                assert "enough is enough" in str(error), error
            elif comm.rank == last:
                group.abort("enough is enough")
            error_soon(Aborted, group.iprobe)


def check_probe_of_the_departed(comm: Communicator) -> None:
    """Messages that a rank sent before it left are still found, later only those of other ranks."""
    a, last = arrays(comm), comm.size - 1
    for source in (last, None):
        signals = Signals(comm)
        with may_fail(comm) as group:
            if comm.rank == last:
                group.send(a.put(np.full(5, 4.0)), 0, 3, channel=1)
                group.close()
                signals.tell("left")
            elif comm.rank == 0:
                signals.hear("left", [last])
                found = group.probe(source, channel=1)
                assert found[:3] == (last, 3, 40), found
                assert (a.get(group.recv(a.put(np.zeros(5)), last, 3, channel=1)) == 4).all()
                if source is None and comm.size > 2:
                    signals.tell("more")
                    assert group.probe(channel=1).src == 1
                    group.recv(a.put(np.zeros(1)), 1, channel=1)
                    source = last
                error = error_soon(PeerLost, group.iprobe, source, channel=1)
                assert error.peer == last and f"rank {last} on " in str(error), error
                error_of(PeerLost, group.probe, source, channel=1)
            elif comm.rank == 1 and source is None:
                signals.hear("more", [0])
                group.send(a.put(np.zeros(1)), 0, channel=1)
            signals.tell("through")
            signals.hear("through", [0])


def _ended_by(comm: Communicator, act: Callable[[Communicator], None], error: type[XvcommError]) -> list[XvcommError]:
    """The errors of the other ranks' operations in progress when the last rank calls `act`."""
    a, last, errors = arrays(comm), comm.size - 1, []
    for asynchronous in (True, False):
        signals = Signals(comm)
        with may_fail(comm) as group:
            x = a.put(np.zeros(1000))
            with signals.late("all_reduce", last):
                if comm.rank == last:
                    act(group)
                elif asynchronous:
                    work = group.all_reduce(x, async_op=True)
                else:
                    with contextlib.suppress(error):  # on host memory
                        group.all_reduce(x)
            if comm.rank != last:
                errors += [error_of(error, work.synchronize)] if asynchronous else []
                errors.append(error_soon(error, group.barrier))
            a.get(x)
    return errors


def wait_for_last(comm: Communicator) -> list[XvcommError]:
    """Start a message and a collective that need the last rank, which calls `die_awaited`; return their errors."""
    a, last, signals = arrays(comm), comm.size - 1, Signals(comm)
    x, y = a.put(np.zeros(100)), a.put(np.zeros(100))
    works = [comm.irecv(x, last), comm.all_reduce(y, async_op=True)]
    signals.tell("waiting")
    errors = [error_of(XvcommError, call) for call in (*(work.synchronize for work in works), comm.barrier)]
    a.get(x)
    a.get(y)
    return errors


def die_awaited(comm: Communicator) -> None:
    """Kill this process, the last rank's, once all others wait for it."""
    signals = Signals(comm)
    signals.hear("waiting", range(comm.size - 1))
    os.kill(os.getpid(), signal.SIGKILL)


CHECKS: tuple[Callable[[Communicator], None], ...] = (
    check_mismatch, check_message_mismatch, check_message_mismatch_with_the_departed,
    check_message_to_the_departed, check_deadline,
    check_deadline_behind_a_late_event, check_abort, check_departure, check_early_departure, check_probe_deadline,
    check_probe_of_the_departed,
    check_mismatch_repeated, check_deadline_repeated, check_abort_repeated, check_departure_repeated,
    check_exchange_repeated,
)  # fmt: skip
