"""Operations that go on behind the host: what a communicator has on its device's streams, and what became of it.

The host does not wait for them. Whoever has time looks after them with `Pending.poll`: the next operations, a thread of
the session, and who waits for one. The vendor may hold up whoever asks the device, so that the thread that watches over
the session does not, and still keeps deadlines.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, cast
from weakref import ref

from xvcomm.abc.device import EnqueuedMarks, Mark, Stream
from xvcomm.engine.inflight.batch import Flight, Manifest
from xvcomm.engine.inflight.log import APART, ROOM, Boarding, Ends, Passengers
from xvcomm.engine.inflight.owner import Owner
from xvcomm.memory.ring import RingEnd
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.trace.recorder import DONE, FAILED
from xvcomm.types.deadline import NEVER, Deadline

_AT_ONCE = 64
"""Flights that may be behind the host before an operation looks after them itself: asking the device takes a while."""

_HELD_UP_SECONDS = 0.25
"""Without a look at the device for so long, whoever was to look is held up."""

_TURN_SECONDS = 0.05
"""How long to wait for who is polling, or notes an operation: not for ever, as a signal handler may close in the middle of it."""

_SPINS = 200
_PAUSE_SECONDS = 0.00005


class Company:
    """Asynchronous operations that become a flight together.

    Attributes:
        keep: of each, by what tells it from the others, what must live until they are over.
        flight: what they became. It may hold one more that came as the others left.
    """

    __slots__ = ("flight", "keep")

    def __init__(self) -> None:
        self.keep: dict[object, Any] = {}
        self.flight: Flight | None = None


class _Gathering:
    """Operations on one stream that become a flight together; see `Flight`.

    Args:
        marks: see `Boarding`.
    """

    def __init__(
        self, rings: Mapping[int, RingEnd], stream: Stream, marks: EnqueuedMarks | None, blocking: bool
    ) -> None:
        self.compiled, self.stream, self.blocking, self.company = Boarding(rings, marks), stream, blocking, Company()
        self._begin()

    def _begin(self) -> None:
        self.deadline = NEVER
        self.operations: list[Operation] = []
        self.ends: Ends = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.operations or self.compiled or self.company.keep)

    def add(self, operations: Sequence[Operation], deadline: Deadline, ends: Ends) -> None:
        """Some more."""
        if deadline.at < self.deadline.at:
            self.deadline = deadline
        self.compiled.accompany(deadline.at)
        self.operations.extend(operations)
        self.ends.extend(ends)

    def agrees(self, deadline: Deadline) -> bool:
        """Whether an operation that must be over by then may share a mark with those that are here; see `APART`."""
        soonest = self.compiled.deadline
        return soonest == deadline.at or abs(soonest - deadline.at) < APART

    def look(self) -> Manifest:
        """All, and the soonest deadline."""
        return self._manifest(self.compiled.look())

    def leave(self) -> tuple[Manifest, Company]:
        """The same; there are none then."""
        company, self.company = self.company, Company()  # first: who boards, and then sees the old one, leaves with it
        found = self._manifest(self.compiled.take())
        self._begin()
        return found, company

    def _manifest(self, passengers: Passengers | None) -> Manifest:
        deadline = self.deadline
        if passengers is not None and passengers.deadline < deadline.at:
            deadline = Deadline(passengers.deadline)
        return Manifest(self.operations, deadline, self.ends, passengers)


class Pending:
    """The flights of one communicator: in order on each stream. Any thread.

    Attributes:
        rings: ring ends whose messages compiled code puts on streams, by `RingEnd.counter`.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._gathering: dict[int, _Gathering] = {}
        self.rings: dict[int, RingEnd] = {}
        self._gate = threading.Lock()
        self._leaving: Manifest | None = None
        self._looked = 0.0
        self._streams: dict[ref[Stream], deque[Flight]] = {}  # a thread's streams go when it does
        self._count = 0
        self._polling = threading.Lock()

    def __bool__(self) -> bool:
        """Whether anything is behind the host, or about to be."""
        return self._gate.locked() or any(list(self._streams.values())) or any(list(self._gathering.values()))

    def add(self, flight: Flight) -> Flight:
        """Look after a flight from now on; not if it went into a graph, which is the user's to look after."""
        if flight.mark.captured:
            self._record(flight, DONE)
            return flight
        self._streams.setdefault(ref(flight.stream, self._streams.pop), deque()).append(flight)
        self._count += 1
        if self._count > _AT_ONCE:
            self.poll()
        return flight

    def board(self, operations: Sequence[Operation], handle: int, deadline: Deadline, ends: Ends) -> None:
        """Look after blocking operations on a framework's stream, together with others there: marks take time."""
        stream = self._owner.device.adopt(handle)
        if not stream.lasting:
            native = self._owner.joined_native() if any(o.peer == NO_PEER for o in operations) else None
            with self._gate:
                if handle in self._gathering:  # flights of a stream are in order
                    self._depart(handle, self._gathering[handle])
                self.add(
                    Flight(operations, deadline, ends, stream=stream, mark=cast(Mark, stream.mark()), native=native)
                )
            return
        with self._gate:
            gathering = self._at(handle)
            gathering.add(operations, deadline, ends)
            if len(gathering.operations) >= ROOM:
                self._depart(handle, gathering)

    def part(self, handle: int, deadline: Deadline) -> None:
        """Let depart what must be over at another time than what is about to come on a stream."""
        gathering = self._gathering.get(handle)
        if gathering and not gathering.agrees(deadline):
            self.depart_from(handle)

    def boarding(self, handle: int, *, blocking: bool = True) -> int:
        """Address of where compiled code notes operations on a stream; see `Boarding`.

        Args:
            blocking: whether the stream is a framework's; else one that has only operations with a Work.
        """
        with self._gate:
            return self._at(handle, blocking).compiled.address

    def company(self, handle: int) -> Company:
        """That of the operation which compiled code has just put on a stream."""
        return self._gathering[handle].company

    def marks(self, handle: int) -> EnqueuedMarks | None:
        """How compiled code marks a stream behind each operation, if it does."""
        return self._gathering[handle].compiled.marks

    def depart_from(self, handle: int) -> None:
        """Make room where compiled code notes operations."""
        with self._gate:
            self._depart(handle, self._at(handle))

    def _at(self, handle: int, blocking: bool = True) -> _Gathering:
        found = self._gathering.get(handle)
        if found is None:
            device = self._owner.device
            stream = device.adopt(handle)
            marks = None if stream.lasting else device.enqueued_marks(stream)
            found = self._gathering[handle] = _Gathering(self.rings, stream, marks, blocking)
        return found

    def _depart(self, handle: int, g: _Gathering) -> None:
        """Mark the stream behind what has come together, if that is not done; the caller holds the gate."""
        stream = self._owner.device.adopt(handle) if g.stream.lasting else g.stream
        if stream.lasting and stream.capturing():
            return  # what came before the capture is marked after it
        leaving, company = g.leave()
        self._leaving = leaving
        operations, passengers, keep = leaving.operations, leaving.passengers, company.keep
        if operations or passengers is not None or keep:
            native = self._owner.joined_native() if leaving.collective() else None
            marked = None if passengers is None else passengers.mark
            mark = marked or cast(Mark, stream.mark())
            company.flight = flight = Flight(
                operations, leaving.deadline, leaving.ends, passengers, stream=stream, mark=mark, native=native,
                blocking=g.blocking, landed=keep.clear,
            )  # fmt: skip
            self.add(flight)
        self._leaving = None

    def join(self, stream: Stream, mark: Mark) -> None:
        """Let a stream of ours wait for a mark. A graph's takes it into the capture, while nobody may be marking it."""
        with self._gate if mark.captured else contextlib.nullcontext():
            stream.wait(mark)

    def depart(self) -> None:
        """Let everything be on its way that `poll` is to look at."""
        if not any(list(self._gathering.values())) or not self._gate.acquire(timeout=_TURN_SECONDS):
            return
        try:
            for handle, gathering in self._gathering.items():
                if gathering:
                    self._depart(handle, gathering)
        finally:
            self._gate.release()

    def look(self) -> None:
        """Do both, and stop what is late. The vendor may hold this up as long as a kernel runs: a thread's of its own."""
        begin = monotonic()
        self.depart()
        if not self._polling.acquire(timeout=_TURN_SECONDS):
            return
        try:
            self._poll()
            for flights in list(self._streams.values()):
                for flight in list(flights):  # a mark that was made late lies behind younger flights
                    if flight.deadline.at < begin and flight.under_way():
                        self._expire(flight)
        finally:
            self._polling.release()
        self._looked = begin

    def stop_late(self) -> None:
        """Stop what is late while `look` is held up; calls no function of the vendor.

        NCCL's first launch of a kernel waits in the driver until the device is idle, and who records an event then waits
        for the launch. If the device waits for a rank, all of them would do so for ever.
        """
        now = monotonic()
        if now - self._looked < _HELD_UP_SECONDS:
            return
        aboard = [g.look() for g in list(self._gathering.values()) if g]
        flights = [flight for flights in list(self._streams.values()) for flight in list(flights)]
        everything = [*flights, *filter(None, [self._leaving]), *aboard]
        moving = [manifest for manifest in everything if manifest.moving()]
        for late in everything:
            if self._looked < late.deadline.at < now and (late in moving or self._missed(late, bool(moving))):
                self._expire(late)
                return  # which stops everything else

    def _missed(self, late: Manifest, moving: bool) -> bool:
        """Whether late collectives that move nothing through rings count as not over: nobody can see whether they are.

        Args:
            moving: whether there are messages, which have deadlines of their own, and may be what everybody waits for.
        """
        return late.collective() and (not moving or any(map(self._owner.awaits, late.all())))

    def poll(self) -> None:
        """End what is over. Never waits for kernels; does nothing while another thread is at it."""
        if self._count and self._polling.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._polling.release()

    def _poll(self) -> None:
        for flights in list(self._streams.values()):
            through = self._through(flights)
            while flights and self._look(flights[0], through > 0):
                flights.popleft()
                through -= 1
                self._count -= 1

    @staticmethod
    def _through(flights: deque[Flight]) -> int:
        """How many of a stream's first flights are known to be through: what is behind them is.

        Where flights have the order of their marks. On a stream that may be gone they need not: compiled code marks what
        comes together before others know of it. Nor do those with a Work, which several threads add.
        """
        half = len(flights) // 2
        middle = flights[half] if half > 1 else None
        if middle is None or not (middle.stream.lasting and middle.blocking):
            return 0
        return half if middle.stream.reached(middle.mark) else 0

    def _look(self, flight: Flight, through: bool) -> bool:
        """Whether a flight is over."""
        if through or flight.stream.reached(flight.mark):
            self._end(flight, flight.outcome(self._owner.stopped))
        elif flight.native is not None:
            self._owner.miss(flight.newest)  # whoever has not come to it may never come
        return flight.over

    def _expire(self, late: Manifest) -> None:
        """Stop what is late; said once: the streams go on as soon as everything has stopped."""
        late.deadline = NEVER
        error, operation = late.lateness(self._owner.awaits)
        late.error = self._owner.explain(error, operation)

    def _end(self, flight: Flight, failure: tuple[Exception, Operation] | None) -> None:
        if failure is not None and flight.error is None:
            flight.error = self._owner.explain(*failure)
        self._record(flight, DONE if flight.error is None else FAILED)
        flight.keep = None
        flight.over = True
        if flight.landed is not None:
            flight.landed()

    def _record(self, flight: Flight, state: int) -> None:
        """Note the end of all operations of a flight."""
        if len(flight.operations) == 1:
            self._owner.end(flight.operations[0], state)
        elif flight.operations:
            self._owner.end_all(flight.operations, state)
        if flight.passengers is not None:
            self._owner.recorder.end_all(flight.passengers.records, state)

    def drain(self, deadline: Deadline) -> None:
        """Block the host until no blocking operation is behind it, or one has failed, or the deadline has passed."""
        while not deadline.expired():
            self.look()
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

    def follow(self, handle: int | None, flight: Flight) -> None:
        """Let what comes next on a stream come behind a flight."""
        if not flight.over:
            self._owner.device.adopt(handle).wait(flight.mark)

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
