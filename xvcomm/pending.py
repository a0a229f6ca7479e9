"""Operations that go on behind the host: what a communicator has on its device's streams, and what became of it.

The host does not wait for them. Whoever has time looks after them with `Pending.poll`: the next operations, the thread
that watches over the session, and who waits for one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from xvcomm.abc.collective import Collective, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import Mark, RingStalled, RingStopped, Stream
from xvcomm.deadline import NEVER, Deadline
from xvcomm.errors import ArgumentError, DeadlineExceeded
from xvcomm.operation import Operation
from xvcomm.ring import Reason, RingEnd
from xvcomm.trace import State
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context

_AT_ONCE = 64
"""Flights that may be behind the host before an operation looks after them itself: asking the device takes a while."""

_TOGETHER = 32
"""Blocking operations that share a mark."""

_SPINS = 200
_PAUSE_SECONDS = 0.00005


Ends = list[tuple[RingEnd, int, Operation]]
"""Ring ends that operations use: each with its sequence number behind the operation, and the operation."""


@dataclass(slots=True, eq=False)
class Flight:
    """Operations that were enqueued together and end together.

    Attributes:
        operations: what the context has begun.
        stream, mark: they are over when the stream has reached the mark.
        deadline: until when that must be.
        ends: see `Ends`.
        native: the native library, if they use it.
        blocking: whether the user's call says that it blocks, so that a Work does not tell its end.
        keep: arrays that must live as long.
        landed: called when they are over, however they ended.
        error: what they raise.
        over: whether they are over.
    """

    operations: Sequence[Operation]
    stream: Stream
    mark: Mark
    deadline: Deadline
    ends: Ends = field(default_factory=list)
    native: Collective | None = None
    blocking: bool = True
    keep: Any = None
    landed: Callable[[], None] | None = None
    error: BaseException | None = None
    over: bool = False

    def outcome(self) -> tuple[Exception, Operation] | None:
        """What went wrong, and in which operation, of a flight whose mark is reached."""
        for end, sequence, operation in self.ends:
            finished, _ = end.finished()
            if finished < sequence:
                return RingStopped(end, end.abort_word(), finished), operation
        if self.native is not None:
            word = self.native.error()
            if Reason.bad(word):
                return CollectiveStopped(word), self.operations[0]
        return None

    def lateness(self, awaited: Callable[[Operation], bool]) -> tuple[Exception, Operation]:
        """What to say when the deadline has passed; `awaited` tells whether an operation waits for a rank to come."""
        open_ends = [(end, operation) for end, sequence, operation in self.ends if end.finished()[0] < sequence]
        if open_ends:
            return RingStalled([end for end, _ in open_ends]), open_ends[0][1]
        return CollectiveStalled(()), next(filter(awaited, self.operations), self.operations[-1])


class _Boarding(msgspec.Struct, eq=False):
    """Blocking operations on one stream that become a flight together; see `Flight`."""

    deadline: Deadline
    native: Collective | None
    operations: list[Operation] = []
    ends: Ends = []


class Pending:
    """The flights of one communicator: in order on each stream. Any thread."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._boarding: dict[int, _Boarding] = {}
        self._gate = threading.Lock()
        self._streams: dict[Stream, deque[Flight]] = {}
        self._count = 0
        self._polling = threading.Lock()

    def add(self, flight: Flight) -> Flight:
        """Look after a flight from now on; not if it went into a graph, which is the user's to look after."""
        if flight.mark.captured:
            self._context.end_all(flight.operations)
            return flight
        self._streams.setdefault(flight.stream, deque()).append(flight)
        self._count += 1
        if self._count > _AT_ONCE:
            self.poll()
        return flight

    def board(
        self, operation: Operation, handle: int, deadline: Deadline, native: Collective | None, ends: Ends | None
    ) -> None:
        """Look after a blocking operation on a framework's stream, together with others there: marks take time."""
        with self._gate:
            boarding = self._boarding.get(handle)
            if boarding is None:
                boarding = self._boarding[handle] = _Boarding(deadline, native)
            elif deadline.at < boarding.deadline.at:
                boarding.deadline = deadline
            if native is not None:
                boarding.native = native
            boarding.operations.append(operation)
            if ends:
                boarding.ends.extend(ends)
            if len(boarding.operations) >= _TOGETHER:
                self._depart(handle)

    def _depart(self, handle: int) -> None:
        """Mark the stream behind what has come together; the caller holds the gate."""
        stream = self._context.device.adopt(handle)
        if stream.capturing():
            return  # what came before the capture is marked after it
        b = self._boarding.pop(handle)
        self.add(Flight(b.operations, stream, cast(Mark, stream.mark()), b.deadline, b.ends, b.native))

    def depart(self) -> None:
        """Let everything be on its way that `poll` is to look at."""
        if self._boarding:
            with self._gate:
                for handle in list(self._boarding):
                    self._depart(handle)

    def poll(self) -> None:
        """End what is over or late. Never blocks; does nothing while another thread is at it."""
        if not self._count or not self._polling.acquire(blocking=False):
            return
        try:
            for flights in list(self._streams.values()):
                through = self._through(flights)
                while flights and self._look(flights[0], through > 0):
                    flights.popleft()
                    through -= 1
                    self._count -= 1
        finally:
            self._polling.release()

    @staticmethod
    def _through(flights: deque[Flight]) -> int:
        """How many of a stream's first flights are known to be through: what is behind them is."""
        half = len(flights) // 2
        return half if half > 1 and flights[half].stream.reached(flights[half].mark) else 0

    def _look(self, flight: Flight, through: bool) -> bool:
        """Whether a flight is over."""
        if through or flight.stream.reached(flight.mark):
            self._end(flight, flight.outcome())
        elif flight.deadline.expired():
            flight.deadline = NEVER  # said once; the streams go on as soon as everything has stopped
            error, operation = flight.lateness(self._context.awaits)
            flight.error = self._context.explain(error, operation)
        elif flight.native is not None:
            # Whoever has not come to the last collective may never come.
            self._context.miss(next(o for o in reversed(flight.operations) if o.peer < 0))
        return flight.over

    def _end(self, flight: Flight, failure: tuple[Exception, Operation] | None) -> None:
        if failure is not None and flight.error is None:
            flight.error = self._context.explain(*failure)
        state = State.DONE if flight.error is None else State.FAILED
        if len(flight.operations) == 1:
            self._context.end(flight.operations[0], state)
        else:
            self._context.end_all(flight.operations, state)
        flight.keep = None
        flight.over = True
        if flight.landed is not None:
            flight.landed()

    def drain(self, deadline: Deadline) -> None:
        """Block the host until no blocking operation is behind it, or one has failed, or the deadline has passed."""
        while not deadline.expired():
            self.depart()
            self.poll()
            flights = [f for flights in list(self._streams.values()) for f in list(flights)]
            if not any(f.blocking for f in flights) or any(f.error is not None for f in flights):
                return
            time.sleep(_PAUSE_SECONDS)

    def wait_for(self, flight: Flight) -> None:
        """Block the host until a flight is over, and raise what it raises."""
        if not flight.mark.captured:
            self.finish(flight, NEVER)
        if flight.error is not None:
            raise flight.error

    def finish(self, flight: Flight, deadline: Deadline) -> bool:
        """Block the host until a flight is over or has failed; whether that came about by the deadline."""
        spins = 0
        while not flight.over and flight.error is None:
            self.poll()
            if deadline.expired():
                return False
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE_SECONDS)
        return True


class StreamWork(Work):
    """A Work whose operation is on a stream.

    Args:
        follow: makes the current stream wait for a mark; None where the framework's stream is not known, so that the
            host waits.
        finish: gives the result array.

    Attributes:
        flight: the operation, once it was enqueued.
        let_go: has it enqueued now, if it waits on the host for its turn.
    """

    def __init__(
        self, pending: Pending, follow: Callable[[object], None] | None, finish: Callable[[], Any], what: str,
        flight: Flight | None = None,
    ) -> None:  # fmt: skip
        self._pending, self._follow, self._finish = pending, follow, finish
        self._what = what
        self._error: BaseException | None = None
        self.flight = flight
        self.let_go: Callable[[], None] | None = None

    def give_up(self, error: BaseException) -> None:
        """The operation will never be enqueued."""
        if self.flight is None:
            self._error = error

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work.wait`."""
        if self._follow is None:
            return self.synchronize(timeout)
        self._pending.poll()
        flight = self._under_way()
        if not flight.over:
            self._follow(flight.mark)
        return self._finish()

    def synchronize(self, timeout: float | None = None) -> Any:
        """See `Work.synchronize`."""
        flight = self._under_way()
        if flight.mark.captured:
            raise ArgumentError(f"{self._what} went into a graph: only wait() orders it; synchronize with the graph")
        if not self._pending.finish(flight, Deadline.after(timeout)):
            raise DeadlineExceeded(f"{self._what} was not done after {timeout} s; wait longer, or abort()")
        self._under_way()
        return self._finish()

    result = synchronize

    def done(self) -> bool:
        """See `Work.done`."""
        self._pending.poll()
        return self._error is not None or (self.flight is not None and self.flight.over)

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        if not self.done():
            return None
        return self._error or (self.flight.error if self.flight is not None else None)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Not on a device: no thread of the host is there when the operation ends."""
        raise ArgumentError(
            f"{self._what} is on a device's stream, which tells nobody when it is done: wait() orders the stream"
        )

    def _under_way(self) -> Flight:
        """The operation, if nothing is wrong with it."""
        if self.flight is None and self.let_go is not None:
            self.let_go()
        error = self._error or (self.flight.error if self.flight is not None else None)
        if error is not None:
            raise error
        if self.flight is None:
            raise ArgumentError(f"{self._what} starts at the end of its group(): wait for it behind that")
        return self.flight
