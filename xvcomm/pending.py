"""Operations that go on behind the host: what a communicator has on its device's streams, and what became of it.

The host does not wait for them. Whoever has time looks after them with `Pending.poll`: the next operations, the thread
that watches over the session, and who waits for one.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from xvcomm.abc.collective import Collective, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import Mark, RingStalled, RingStopped, Stream
from xvcomm.boarding import ROOM, Boarding, Ends, Passengers
from xvcomm.deadline import NEVER, Deadline
from xvcomm.errors import ArgumentError, DeadlineExceeded
from xvcomm.operation import Operation
from xvcomm.ring import Reason, RingEnd
from xvcomm.trace import DONE, FAILED
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context

_AT_ONCE = 64
"""Flights that may be behind the host before an operation looks after them itself: asking the device takes a while."""

_SPINS = 200
_PAUSE_SECONDS = 0.00005


@dataclass(slots=True, eq=False)
class Flight:
    """Operations that were enqueued together and end together.

    Attributes:
        operations: what the context has begun.
        passengers: what compiled code has begun.
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
    passengers: Passengers | None = None

    def outcome(self, stopped: Callable[[Callable[[], Operation]], int]) -> tuple[Exception, Operation] | None:
        """What went wrong, and in which operation, of a flight whose mark is reached.

        Args:
            stopped: gives the abort word, as far as it concerns the last of the collectives. Where other ranks stop the
                native library before this one does, its kernels end here as if all were well, and leave rubbish.
        """
        ends = self.ends if self.passengers is None or self.passengers.arrived() else self._ends()
        for end, sequence, operation in ends:
            finished, _ = end.finished()
            if finished < sequence:
                return RingStopped(end, end.abort_word(), finished), operation
        if self.native is not None:
            word = self.native.error()
            if not Reason.bad(word):
                word = stopped(self.newest)
            if word:
                return CollectiveStopped(word), self.all()[0]
        return None

    def lateness(self, awaited: Callable[[Operation], bool]) -> tuple[Exception, Operation]:
        """What to say when the deadline has passed; `awaited` tells whether an operation waits for a rank to come."""
        open_ends = [(end, operation) for end, sequence, operation in self._ends() if end.finished()[0] < sequence]
        if open_ends:
            return RingStalled([end for end, _ in open_ends]), open_ends[0][1]
        operations = self.all()
        return CollectiveStalled(()), next(filter(awaited, operations), operations[-1])

    def newest(self) -> Operation:
        """The last of its collectives."""
        return max((o for o in self.all() if o.peer < 0), key=attrgetter("sequence"))

    def all(self) -> list[Operation]:
        """All operations, by whomever they were begun."""
        return [*self.operations, *(self.passengers.operations() if self.passengers is not None else ())]

    def _ends(self) -> Ends:
        return [*self.ends, *(self.passengers.ends() if self.passengers is not None else ())]


class _Gathering:
    """Blocking operations on one stream that become a flight together; see `Flight`."""

    def __init__(self, rings: Mapping[int, RingEnd]) -> None:
        self.compiled = Boarding(rings)
        self._begin()

    def _begin(self) -> None:
        self.deadline = NEVER
        self.operations: list[Operation] = []
        self.ends: Ends = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.operations or self.compiled)

    def add(self, operations: Sequence[Operation], deadline: Deadline, ends: Ends) -> None:
        """Some more."""
        if deadline.at < self.deadline.at:
            self.deadline = deadline
        self.operations.extend(operations)
        self.ends.extend(ends)

    def leave(self) -> tuple[list[Operation], Ends, Deadline, Passengers | None]:
        """All, and the soonest deadline; there are none then."""
        passengers, operations, ends, deadline = self.compiled.take(), self.operations, self.ends, self.deadline
        if passengers is not None and passengers.deadline < deadline.at:
            deadline = Deadline(passengers.deadline)
        self._begin()
        return operations, ends, deadline, passengers


class Pending:
    """The flights of one communicator: in order on each stream. Any thread.

    Attributes:
        rings: ring ends whose messages compiled code puts on streams, by `RingEnd.counter`.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._gathering: dict[int, _Gathering] = {}
        self.rings: dict[int, RingEnd] = {}
        self._gate = threading.Lock()
        self._streams: dict[Stream, deque[Flight]] = {}
        self._count = 0
        self._polling = threading.Lock()

    def __bool__(self) -> bool:
        """Whether anything is behind the host, or about to be."""
        return any(list(self._streams.values())) or any(list(self._gathering.values()))

    def add(self, flight: Flight) -> Flight:
        """Look after a flight from now on; not if it went into a graph, which is the user's to look after."""
        if flight.mark.captured:
            self._record(flight, DONE)
            return flight
        self._streams.setdefault(flight.stream, deque()).append(flight)
        self._count += 1
        if self._count > _AT_ONCE:
            self.poll()
        return flight

    def board(self, operations: Sequence[Operation], handle: int, deadline: Deadline, ends: Ends) -> None:
        """Look after blocking operations on a framework's stream, together with others there: marks take time."""
        with self._gate:
            gathering = self._at(handle)
            gathering.add(operations, deadline, ends)
            if len(gathering.operations) >= ROOM:
                self._depart(handle, gathering)

    def boarding(self, handle: int) -> int:
        """Address of where compiled code notes blocking operations on a framework's stream; see `Boarding`."""
        with self._gate:
            return self._at(handle).compiled.address

    def depart_from(self, handle: int) -> None:
        """Make room where compiled code notes operations."""
        with self._gate:
            self._depart(handle, self._at(handle))

    def _at(self, handle: int) -> _Gathering:
        found = self._gathering.get(handle)
        if found is None:
            found = self._gathering[handle] = _Gathering(self.rings)
        return found

    def _depart(self, handle: int, g: _Gathering) -> None:
        """Mark the stream behind what has come together; the caller holds the gate."""
        stream = self._context.device.adopt(handle)
        if stream.capturing():
            return  # what came before the capture is marked after it
        operations, ends, deadline, passengers = g.leave()
        if not operations and passengers is None:
            return
        collective = any(o.peer < 0 for o in operations) or (passengers is not None and passengers.collective)
        native = self._context.joined_native() if collective else None
        mark = cast(Mark, stream.mark())
        self.add(Flight(operations, stream, mark, deadline, ends, native, passengers=passengers))

    def depart(self) -> None:
        """Let everything be on its way that `poll` is to look at."""
        if any(list(self._gathering.values())):
            with self._gate:
                for handle, gathering in self._gathering.items():
                    if gathering:
                        self._depart(handle, gathering)

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
                for flight in list(flights):  # a mark that was made late lies behind younger flights
                    if flight.deadline.expired():
                        self._expire(flight)
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
            self._end(flight, flight.outcome(self._context.stopped))
        elif flight.native is not None:
            self._context.miss(flight.newest)  # whoever has not come to it may never come
        return flight.over

    def _expire(self, flight: Flight) -> None:
        """Stop a flight whose deadline has passed; said once: the streams go on as soon as everything has stopped."""
        flight.deadline = NEVER
        error, operation = flight.lateness(self._context.awaits)
        flight.error = self._context.explain(error, operation)

    def _end(self, flight: Flight, failure: tuple[Exception, Operation] | None) -> None:
        if failure is not None and flight.error is None:
            flight.error = self._context.explain(*failure)
        self._record(flight, DONE if flight.error is None else FAILED)
        flight.keep = None
        flight.over = True
        if flight.landed is not None:
            flight.landed()

    def _record(self, flight: Flight, state: int) -> None:
        """Note the end of all operations of a flight."""
        if len(flight.operations) == 1:
            self._context.end(flight.operations[0], state)
        elif flight.operations:
            self._context.end_all(flight.operations, state)
        if flight.passengers is not None:
            self._context.session.recorder.end_all(flight.passengers.records, state)

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
        come: makes the host wait while other messages do, until this one is over or a deadline has passed; what waits is
            enqueued then.
    """

    def __init__(
        self, pending: Pending, follow: Callable[[object], None] | None, finish: Callable[[], Any], what: str,
        flight: Flight | None = None,
    ) -> None:  # fmt: skip
        self._pending, self._follow, self._finish = pending, follow, finish
        self._what = what
        self._error: BaseException | None = None
        self.flight = flight
        self.come: Callable[[Callable[[], bool], Deadline], None] | None = None

    def give_up(self, error: BaseException) -> None:
        """The operation will never be enqueued."""
        if self.flight is None:
            self._error = error

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work.wait`."""
        if self._follow is None:
            return self.synchronize(timeout)
        flight = self._under_way(Deadline.after(timeout))
        if not flight.over:
            self._follow(flight.mark)
        return self._finish()

    def synchronize(self, timeout: float | None = None) -> Any:
        """See `Work.synchronize`."""
        deadline = Deadline.after(timeout)
        flight = self._under_way(deadline)
        if flight.mark.captured:
            raise ArgumentError(f"{self._what} went into a graph: only wait() orders it; synchronize with the graph")
        if not self._pending.finish(flight, deadline):
            raise DeadlineExceeded(f"{self._what} was not done after {timeout} s; wait longer, or abort()")
        self._raise()
        return self._finish()

    result = synchronize

    def done(self) -> bool:
        """See `Work.done`."""
        self._pending.poll()
        return self._error is not None or (self.flight is not None and self.flight.over)

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        return self._failure() if self.done() else None

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Not on a device: no thread of the host is there when the operation ends."""
        raise ArgumentError(
            f"{self._what} is on a device's stream, which tells nobody when it is done: wait() orders the stream"
        )

    def _under_way(self, deadline: Deadline) -> Flight:
        """The operation, if nothing is wrong with it."""
        if not self.done() and self.come is not None:
            self.come(lambda: self.done() or self._failure() is not None, deadline)
        self._raise()
        if self.flight is None:
            raise ArgumentError(f"{self._what} starts at the end of its group(): wait for it behind that")
        return self.flight

    def _raise(self) -> None:
        error = self._failure()
        if error is not None:
            raise error

    def _failure(self) -> BaseException | None:
        return self._error or (self.flight.error if self.flight is not None else None)
