"""Asynchronous collectives that compiled code starts on a stream beside the users', and how each of them ended.

They are looked after together, as blocking ones are: see `Pending`. So a Work does not wait for that, but asks for its own
mark, and costs little where nobody asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from xvcomm import array
from xvcomm.abc.collective import CollectiveStopped
from xvcomm.abc.device import EnqueuedMarks, Mark, Stream
from xvcomm.calling import call_3
from xvcomm.calls import Call
from xvcomm.context import Context
from xvcomm.deadline import NEVER, Deadline
from xvcomm.door import Door
from xvcomm.enqueued import Branch, CollectiveCall
from xvcomm.errors import ArgumentError, DeadlineExceeded
from xvcomm.flight import Flight
from xvcomm.jit import brief, compiling
from xvcomm.operation import Operation
from xvcomm.pending import Company
from xvcomm.ring import Reason, RingEnd
from xvcomm.work import Work

_SPINS = 200
_PAUSE_SECONDS = 0.00005


def _three(function: int, a: int, b: int, c: int) -> int:
    return call_3(function, a, b, c)  # type: ignore[no-any-return]


with compiling():
    _call = brief("int64(int64, int64, int64, int64)")(_three)


class Beside:
    """A communicator's stream beside the users', as compiled code uses it.

    Args (of the constructor):
        stream: that stream.
        lock: under which collectives are started there.
    """

    def __init__(self, context: Context, door: Door, stream: Stream, marks: EnqueuedMarks, lock: threading.Lock) -> None:
        self.context, self.stream = context, stream
        self._door, self._marks, self._lock = door, marks, lock
        self._handle, self._branch = stream.handle, Branch(marks)
        self._known: set[int] = set()

    def start(
        self, ready: CollectiveCall, call: Call, user: int | None, given: int | None, site: int, deadline: Deadline
    ) -> Started | None:
        """Start a collective behind what a user's stream holds now; None if nothing has begun.

        Args:
            user: the stream's handle; None for the default one.
            given: the same where the user said it, and not the arrays' framework.

        Raises:
            MismatchError, PeerLost, DeadlineExceeded, Aborted: as operations of the communicator do.
        """
        handle, branch = self._handle, self._branch
        with self._lock:
            mark = self._marks.take()
            branch.user, branch.event = user or 0, mark.event
            place = self._door.places.get(handle) or self._door.place(handle, blocking=False)
            if not ready.run(place, handle, call.src, call.dst, site, deadline.at, branch):
                return None
            sequence, ends = branch.sequence, branch.ends
        company = self.context.pending.company(handle)
        company.keep[sequence] = call
        return Started(self, call, sequence, ends, mark, company, given)

    def follow(self, handle: int | None, mark: Mark) -> None:
        """Let what comes next on a user's stream wait for a mark on this one."""
        marks, stream = self._marks, handle or 0
        if stream not in self._known or _call(marks.follow, marks.argument, mark.event, stream) != 0:
            self.context.device.adopt(handle).wait(mark)
            self._known.add(stream)


class Started(Work):
    """A collective that was started there."""

    def __init__(
        self, beside: Beside, call: Call, sequence: int, ends: list[tuple[RingEnd, int]], mark: Mark, company: Company,
        given: int | None,
    ) -> None:  # fmt: skip
        self._beside, self._call, self._sequence, self._ends = beside, call, sequence, ends
        self._mark, self._company, self._given = mark, company, given
        self._well = False
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work.wait`."""
        call = self._call
        view = call.src if call.dst is None else call.dst
        if view is not None and view.staged:
            return self.synchronize(timeout)
        self.order(array.stream_now(view, self._given))
        return call.result()

    def order(self, stream: int | None) -> None:
        """See `Work.order`."""
        if self._beside.context.word() and self.done():
            self._raise()
        if not self._well:
            self._beside.follow(stream, self._mark)
        call = self._call
        if call.dst is not None and call.dst.stream == stream:  # whatever its framework does with the memory comes behind
            self._company.keep.pop(self._sequence, None)
            call.src = None

    def synchronize(self, timeout: float | None = None) -> Any:
        """See `Work.synchronize`."""
        deadline, spins = Deadline.after(timeout), 0
        while not self.done():
            if deadline.expired():
                raise DeadlineExceeded(f"{self._call.op} was not done after {timeout} s; wait longer, or abort()")
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE_SECONDS)
        self._raise()
        return self._call.result()

    result = synchronize

    def done(self) -> bool:
        """See `Work.done`."""
        if self._well or self._error is not None:
            return True
        together = self._company.flight
        if together is not None and together.over and together.error is None:
            self._well = True
            return True
        context, flight = self._beside.context, self._flight()
        failure: tuple[Exception, Operation] | None
        if flight.stream.reached(self._mark):
            failure = flight.outcome(context.stopped)
        elif Reason.bad(word := context.word()):
            failure = CollectiveStopped(word), flight.operations[0]
        else:
            return False
        if failure is None:
            self._well = True
        else:
            self._error = context.explain(*failure)
        return True

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        return self._error if self.done() else None

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> NoReturn:
        """Not on a device: no thread of the host is there when the operation ends."""
        raise ArgumentError(
            f"{self._call.op} is on a device's stream, which tells nobody when it is done: wait() orders the stream"
        )

    def _flight(self) -> Flight:
        """What it would be alone."""
        call, context = self._call, self._beside.context
        operation = Operation(call.op, self._sequence, call.message())
        ends = [(ring, following, operation) for ring, following in self._ends]
        native = context.joined_native()
        return Flight([operation], NEVER, ends, stream=self._beside.stream, mark=self._mark, native=native)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
