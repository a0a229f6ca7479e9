"""Tracks the operations that a communicator has enqueued on its device's streams, until they end.

The host does not wait for these operations. Their end is found by `Tracker.poll`, which the next operations, a thread of the
session, and callers that wait for an operation call. The vendor's driver may block a thread that queries the device.
Therefore the session's watchdog never queries it, and enforces deadlines by `Tracker.stop_late` alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, Protocol, cast
from weakref import ref

from xvcomm.abc.collective import Collective
from xvcomm.abc.device import Device, Event, Queue, Stream
from xvcomm.abc.launch import EnqueuedEvents, SupportsEnqueuedEvents
from xvcomm.engine.inflight.batch import Batch, Contents
from xvcomm.engine.inflight.log import ROOM, Ends
from xvcomm.engine.inflight.open_batch import AsyncGroup, OpenBatch
from xvcomm.engine.inflight.work import Completion, Request
from xvcomm.errors import ArgumentError
from xvcomm.memory.ring import RingEnd
from xvcomm.trace.format import DONE, FAILED, Stage
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.trace.recorder import Recorder
from xvcomm.trace.stages import Progress, Stretch
from xvcomm.types.deadline import NEVER, Deadline

_AT_ONCE = 64
"""Number of batches under way from which on `Tracker.add` polls: a query of the device takes time."""

_HELD_UP_SECONDS = 0.25
"""Seconds without a query of the device after which its thread counts as blocked by the driver."""

_A_WHILE_SECONDS, _UNANSWERED_SECONDS = 0.5, 3.0
"""Seconds under way after which it is told how far operations are; seconds without a query after which that is not known."""

_TOLD = 64
"""Number of a stream's operations from which on it is told of no further batch: those are enqueued behind them."""

_TURN_SECONDS = 0.05
"""Seconds to wait for a lock: bounded, because a signal handler may close the communicator while its thread holds the lock."""

_PAUSE_SECONDS = 0.00005


class Owner(Protocol):
    """What a tracker asks of the communicator whose operations it tracks."""

    @property
    def device(self) -> Device:
        """The rank's."""

    @property
    def recorder(self) -> Recorder:
        """The rank's flight recorder."""

    def joined_native(self) -> Collective | None:
        """The native library, if it was joined."""

    def awaits(self, operation: Operation) -> bool:
        """Whether a rank has not come to a collective yet, as far as this host can tell."""

    def stopped(self, newest: Callable[[], Operation]) -> int:
        """0, or the abort word that says that a native collective gave no result."""

    def miss(self, newest: Callable[[], Operation]) -> None:
        """Stop a collective if a rank left before it came to it."""

    def explain(self, error: BaseException, operation: Operation) -> BaseException:
        """Stop the communicator for an error from below; gives the error for the user."""

    def end(self, operation: Operation, state: int = DONE) -> None:
        """An operation is over."""

    def end_all(self, operations: Sequence[Operation], state: int = DONE) -> None:
        """The same of several at once."""


class _OnStream(deque[Batch]):
    """The batches of one stream, in order.

    Attributes:
        queue: of the stream.
        reached: number in the flight recorder of the newest operation before an event that the device has reached.
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue, self.reached = queue, -1


class Tracker:
    """The batches of one communicator, in order for each stream. Thread-safe.

    Attributes:
        rings: ring ends of messages that compiled code enqueues, by `RingEnd.counter`.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._open_batches: dict[int, OpenBatch] = {}
        self.rings: dict[int, RingEnd] = {}
        self._gate = threading.Lock()
        self._sealing: Contents | None = None
        self._looked = 0.0
        self._streams: dict[ref[Stream], _OnStream] = {}  # streams of a thread are freed with the thread
        self._count = 0
        self._polling = threading.Lock()

    def __bool__(self) -> bool:
        """Whether any operation is under way or about to be."""
        return self._gate.locked() or any(list(self._streams.values())) or any(list(self._open_batches.values()))

    def add(self, batch: Batch) -> Batch:
        """Track a batch. One that was captured in a graph is recorded as done instead: its end is the user's concern."""
        if batch.event.captured:
            self._record(batch, DONE)
            return batch
        batch.added, batch.following = monotonic(), self._owner.recorder.following
        self._streams.setdefault(ref(batch.stream, self._streams.pop), _OnStream(batch.stream.queue)).append(batch)
        self._count += 1
        if self._count > _AT_ONCE:
            self.poll()
        return batch

    def add_blocking(self, operations: Sequence[Operation], handle: int, deadline: Deadline, ends: Ends) -> None:
        """Track blocking operations on a framework's stream. Several share one event, because recording an event takes time."""
        stream = self._owner.device.adopt(handle)
        if not stream.lasting:
            native = self._owner.joined_native() if any(o.peer == NO_PEER for o in operations) else None
            with self._gate:
                if handle in self._open_batches:  # batches of a stream are in order
                    self._seal(handle, self._open_batches[handle])
                event = cast(Event, stream.record_event())
                self.add(Batch(operations, deadline, ends, stream=stream, event=event, native=native))
            return
        with self._gate:
            open_batch = self._at(handle)
            open_batch.add(operations, deadline, ends)
            if len(open_batch.operations) >= ROOM:
                self._seal(handle, open_batch)

    def seal_if_deadline_differs(self, handle: int, deadline: Deadline) -> None:
        """Seal the open batch of a stream if the next operation's deadline differs from the batch's."""
        open_batch = self._open_batches.get(handle)
        if open_batch and not open_batch.accepts(deadline):
            self.seal(handle)

    def log_address(self, handle: int, *, blocking: bool = True) -> int:
        """Address of the launch log of a stream, for compiled code; see `LaunchLog`.

        Args:
            blocking: whether the stream is a framework's; False for a stream that only asynchronous operations use.
        """
        with self._gate:
            return self._at(handle, blocking).log.address

    def async_group(self, handle: int) -> AsyncGroup:
        """The group of the operation that compiled code has just enqueued on a stream."""
        return self._open_batches[handle].group

    def events(self, handle: int) -> EnqueuedEvents | None:
        """Functions by which compiled code records an event after each operation of a stream; None if it records none."""
        return self._open_batches[handle].log.events

    def seal(self, handle: int) -> None:
        """Seal the open batch of a stream, which empties its launch log."""
        with self._gate:
            self._seal(handle, self._at(handle))

    def _at(self, handle: int, blocking: bool = True) -> OpenBatch:
        found = self._open_batches.get(handle)
        if found is None:
            device = self._owner.device
            stream = device.adopt(handle)
            events = None
            if isinstance(device, SupportsEnqueuedEvents) and not stream.lasting:
                events = device.enqueued_events(stream)
            found = self._open_batches[handle] = OpenBatch(self.rings, stream, events, blocking)
        return found

    def _seal(self, handle: int, g: OpenBatch) -> None:
        """Turn an open batch into a tracked one, with an event after it unless compiled code recorded one. Needs the lock."""
        stream = self._owner.device.adopt(handle) if g.stream.lasting else g.stream
        if stream.lasting and stream.capturing():
            return  # no event can be recorded in a capture: the batch is sealed after it
        sealed, group = g.take()
        self._sealing = sealed
        operations, logged, keep = sealed.operations, sealed.logged, group.keep
        if operations or logged is not None or keep:
            native = self._owner.joined_native() if sealed.collective() else None
            recorded = None if logged is None else logged.event
            event = recorded or cast(Event, stream.record_event())
            group.batch = batch = Batch(
                operations, sealed.deadline, sealed.ends, logged, stream=stream, event=event, native=native,
                blocking=g.blocking, on_end=keep.clear,
            )  # fmt: skip
            self.add(batch)
        self._sealing = None

    def join(self, stream: Stream, event: Event) -> None:
        """Let a stream of xvcomm's wait for an event. If the event was recorded in a capture, the stream joins the capture; the
        lock keeps other threads from recording an event on the stream at that moment.
        """
        with self._gate if event.captured else contextlib.nullcontext():
            stream.wait(event)

    def seal_all(self) -> None:
        """Seal all open batches, so that `poll` finds them. Does nothing if the lock is not free soon."""
        if not any(list(self._open_batches.values())) or not self._gate.acquire(timeout=_TURN_SECONDS):
            return
        try:
            for handle, open_batch in self._open_batches.items():
                if open_batch:
                    self._seal(handle, open_batch)
        finally:
            self._gate.release()

    def look(self) -> None:
        """Seal and poll everything, and stop batches whose deadline has passed.

        The vendor's driver may block this call as long as a kernel runs, so a thread of its own makes it.
        """
        begin = monotonic()
        self.seal_all()
        if not self._polling.acquire(timeout=_TURN_SECONDS):
            return
        try:
            self._poll()
            for batch in self._batches():  # an event recorded late may follow those of later batches
                if batch.deadline.at < begin and batch.under_way():
                    self._expire(batch)
        finally:
            self._polling.release()
        self._looked = begin

    def collective(self) -> bool:
        """Whether a collective was enqueued and has not ended, as far as is known; an open batch may have one."""
        return any(batch.collective() for batch in self._batches()) or any(list(self._open_batches.values()))

    def operations(self) -> set[Operation]:
        """Those that Python has begun and enqueued."""
        found = [batch.operations for batch in self._batches()]
        found += [open_batch.operations for open_batch in list(self._open_batches.values())]
        if (sealing := self._sealing) is not None:
            found.append(sealing.operations)
        return {operation for operations in found for operation in list(operations)}

    def _batches(self) -> list[Batch]:
        return [batch for of_stream in list(self._streams.values()) for batch in list(of_stream)]

    def progress(self) -> Progress:
        """What is known of each stream's oldest operations, if any is under way for a while; calls no function of the vendor."""
        now = monotonic()
        of_streams = [[b for b in list(batches)[:_TOLD] if not b.over] for batches in list(self._streams.values())]
        if not any(batches and batches[0].added < now - _A_WHILE_SECONDS for batches in of_streams):
            return Progress()
        found = [stretch for batches in of_streams for stretch in _oldest(batches)]
        for open_batch in list(self._open_batches.values()):
            if open_batch:
                found.append(Stretch(open_batch.stream.queue, *open_batch.look().records(), None))
        if now - self._looked > _UNANSWERED_SECONDS:
            return Progress(others={number: Stage.UNANSWERED for s in found for number in s.records})
        return Progress(found, {of_stream.queue: of_stream.reached for of_stream in list(self._streams.values())})

    def stop_late(self) -> None:
        """Stop batches whose deadline has passed while `look` is blocked; calls no function of the vendor.

        NCCL's first launch of a kernel waits in the driver until the device is idle, and a thread that records an event then
        waits for that launch. Where the device in turn waits for another rank, they would all wait forever.
        """
        now = monotonic()
        if now - self._looked < _HELD_UP_SECONDS:
            return
        unsealed = [g.look() for g in list(self._open_batches.values()) if g]
        everything = [*self._batches(), *filter(None, [self._sealing]), *unsealed]
        moving = [contents for contents in everything if contents.moving()]
        for late in everything:
            if self._looked < late.deadline.at < now and (late in moving or self._missed(late, bool(moving))):
                self._expire(late)
                return  # which stops everything else

    def _missed(self, late: Contents, moving: bool) -> bool:
        """Whether late native collectives count as unfinished, although only the device knows whether they are.

        Args:
            moving: whether messages are under way. They have deadlines of their own, and the collectives may wait for them.
        """
        return late.collective() and (not moving or any(map(self._owner.awaits, late.all())))

    def poll(self) -> None:
        """End the batches whose event is reached. Does not wait for kernels; returns at once if another thread polls."""
        if self._count and self._polling.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._polling.release()

    def _poll(self) -> None:
        for batches in list(self._streams.values()):
            through = self._through(batches)
            while batches and self._look(batches[0], through > 0):
                batches.reached = batches.popleft().last()
                through -= 1
                self._count -= 1

    @staticmethod
    def _through(batches: deque[Batch]) -> int:
        """How many of a stream's first batches have ended, known from one query of a later batch's event.

        This holds only where batches are in the order of their events: on lasting streams, and for blocking operations.
        Compiled code records events on other streams before the tracker knows the batch, and several threads add batches
        of asynchronous operations.
        """
        half = len(batches) // 2
        middle = batches[half] if half > 1 else None
        if middle is None or not (middle.stream.lasting and middle.blocking):
            return 0
        return half if middle.stream.reached(middle.event) else 0

    def _look(self, batch: Batch, through: bool) -> bool:
        """End a batch if its event is reached; whether it has ended."""
        if through or batch.stream.reached(batch.event):
            self._end(batch, batch.outcome(self._owner.stopped))
        elif batch.native is not None:
            self._owner.miss(batch.newest)  # a rank that left before it came will never come
        return batch.over

    def _expire(self, late: Contents) -> None:
        """Stop the communicator because a batch is late. Done once a batch, since the streams run on afterwards."""
        late.deadline = NEVER
        error, operation = late.lateness(self._owner.awaits)
        late.error = self._owner.explain(error, operation)

    def _end(self, batch: Batch, failure: tuple[Exception, Operation] | None) -> None:
        if failure is not None and batch.error is None:
            batch.error = self._owner.explain(*failure)
        self._record(batch, DONE if batch.error is None else FAILED)
        batch.keep = None
        batch.over = True
        if batch.on_end is not None:
            batch.on_end()

    def _record(self, batch: Batch, state: int) -> None:
        """Record the end of a batch's operations in the flight recorder."""
        if len(batch.operations) == 1:
            self._owner.end(batch.operations[0], state)
        elif batch.operations:
            self._owner.end_all(batch.operations, state)
        if batch.logged is not None:
            self._owner.recorder.end_all(batch.logged.records, state)

    def drain(self, deadline: Deadline) -> None:
        """Block until no blocking operation is under way, or one has failed, or the deadline has passed."""
        while not deadline.expired():
            self.look()
            batches = self._batches()
            if not any(f.blocking for f in batches) or any(f.error is not None for f in batches):
                return
            time.sleep(_PAUSE_SECONDS)

    def wait_for(self, batch: Batch) -> None:
        """Block until a batch has ended, and raise its error."""
        if not batch.event.captured:
            Tracked(self, batch).block(NEVER)
        elif batch.error is not None:
            raise batch.error

    def follow(self, handle: int | None, batch: Batch) -> None:
        """Let later work of a stream wait for a batch."""
        if not batch.over:
            self._owner.device.adopt(handle).wait(batch.event)


def _oldest(batches: Sequence[Batch]) -> Iterator[Stretch]:
    """What is known of the first batches of a stream, until there are `_TOLD` operations."""
    told = 0
    for batch in batches:
        if told < _TOLD:
            found = Stretch(batch.stream.queue, *batch.records(), batch.following)
            told += len(found.records)
            yield found


class Tracked(Completion):
    """By the end of the batch."""

    def __init__(self, tracker: Tracker, batch: Batch) -> None:
        self._tracker, self._batch = tracker, batch

    def done(self) -> bool:
        self._tracker.poll()
        return self._batch.over or self._batch.error is not None

    def exception(self) -> BaseException | None:
        return self._batch.error

    def order(self, stream: int | None) -> None:
        self._tracker.poll()
        if self._batch.error is not None:
            raise self._batch.error
        self._tracker.follow(stream, self._batch)

    def result(self, request: Request, deadline: Deadline) -> Any:
        if self._batch.event.captured:
            what = request.described(-1)
            raise ArgumentError(f"{what} went into a graph: only wait() orders it; synchronize with the graph")
        return super().result(request, deadline)
