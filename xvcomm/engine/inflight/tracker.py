"""Operations that go on behind the host: what a communicator has on its device's streams, and what became of it.

The host does not wait for them. Whoever has time looks after them with `Tracker.poll`: the next operations, a thread of
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
from xvcomm.engine.inflight.batch import Batch, Contents
from xvcomm.engine.inflight.log import APART, ROOM, Ends, LaunchLog, LoggedOperations
from xvcomm.engine.inflight.owner import Owner
from xvcomm.memory.ring import RingEnd
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.trace.recorder import DONE, FAILED
from xvcomm.types.deadline import NEVER, Deadline

_AT_ONCE = 64
"""Batches that may be behind the host before an operation looks after them itself: asking the device takes a while."""

_HELD_UP_SECONDS = 0.25
"""Without a look at the device for so long, whoever was to look is held up."""

_TURN_SECONDS = 0.05
"""How long to wait for who is polling, or notes an operation: not for ever, as a signal handler may close in the middle of it."""

_SPINS = 200
_PAUSE_SECONDS = 0.00005


class AsyncGroup:
    """Asynchronous operations that become a batch together.

    Attributes:
        keep: of each, by what tells it from the others, what must live until they are over.
        batch: what they became. It may hold one more that came as the others left.
    """

    __slots__ = ("batch", "keep")

    def __init__(self) -> None:
        self.keep: dict[object, Any] = {}
        self.batch: Batch | None = None


class _OpenBatch:
    """Operations on one stream that become a batch together; see `Batch`.

    Args:
        marks: see `LaunchLog`.
    """

    def __init__(
        self, rings: Mapping[int, RingEnd], stream: Stream, marks: EnqueuedMarks | None, blocking: bool
    ) -> None:
        self.log, self.stream, self.blocking, self.group = LaunchLog(rings, marks), stream, blocking, AsyncGroup()
        self._begin()

    def _begin(self) -> None:
        self.deadline = NEVER
        self.operations: list[Operation] = []
        self.ends: Ends = []

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.operations or self.log or self.group.keep)

    def add(self, operations: Sequence[Operation], deadline: Deadline, ends: Ends) -> None:
        """Some more."""
        if deadline.at < self.deadline.at:
            self.deadline = deadline
        self.log.note_deadline(deadline.at)
        self.operations.extend(operations)
        self.ends.extend(ends)

    def accepts(self, deadline: Deadline) -> bool:
        """Whether an operation that must be over by then may share a mark with those that are here; see `APART`."""
        soonest = self.log.deadline
        return soonest == deadline.at or abs(soonest - deadline.at) < APART

    def look(self) -> Contents:
        """All, and the soonest deadline."""
        return self._contents(self.log.look())

    def take(self) -> tuple[Contents, AsyncGroup]:
        """The same; there are none then."""
        group, self.group = self.group, AsyncGroup()  # first: who boards, and then sees the old one, leaves with it
        found = self._contents(self.log.take())
        self._begin()
        return found, group

    def _contents(self, logged: LoggedOperations | None) -> Contents:
        deadline = self.deadline
        if logged is not None and logged.deadline < deadline.at:
            deadline = Deadline(logged.deadline)
        return Contents(self.operations, deadline, self.ends, logged)


class Tracker:
    """The batches of one communicator: in order on each stream. Any thread.

    Attributes:
        rings: ring ends whose messages compiled code puts on streams, by `RingEnd.counter`.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._open_batches: dict[int, _OpenBatch] = {}
        self.rings: dict[int, RingEnd] = {}
        self._gate = threading.Lock()
        self._sealing: Contents | None = None
        self._looked = 0.0
        self._streams: dict[ref[Stream], deque[Batch]] = {}  # a thread's streams go when it does
        self._count = 0
        self._polling = threading.Lock()

    def __bool__(self) -> bool:
        """Whether anything is behind the host, or about to be."""
        return self._gate.locked() or any(list(self._streams.values())) or any(list(self._open_batches.values()))

    def add(self, batch: Batch) -> Batch:
        """Look after a batch from now on; not if it went into a graph, which is the user's to look after."""
        if batch.mark.captured:
            self._record(batch, DONE)
            return batch
        self._streams.setdefault(ref(batch.stream, self._streams.pop), deque()).append(batch)
        self._count += 1
        if self._count > _AT_ONCE:
            self.poll()
        return batch

    def add_blocking(self, operations: Sequence[Operation], handle: int, deadline: Deadline, ends: Ends) -> None:
        """Look after blocking operations on a framework's stream, together with others there: marks take time."""
        stream = self._owner.device.adopt(handle)
        if not stream.lasting:
            native = self._owner.joined_native() if any(o.peer == NO_PEER for o in operations) else None
            with self._gate:
                if handle in self._open_batches:  # batches of a stream are in order
                    self._seal(handle, self._open_batches[handle])
                self.add(
                    Batch(operations, deadline, ends, stream=stream, mark=cast(Mark, stream.mark()), native=native)
                )
            return
        with self._gate:
            open_batch = self._at(handle)
            open_batch.add(operations, deadline, ends)
            if len(open_batch.operations) >= ROOM:
                self._seal(handle, open_batch)

    def seal_if_deadline_differs(self, handle: int, deadline: Deadline) -> None:
        """Let depart what must be over at another time than what is about to come on a stream."""
        open_batch = self._open_batches.get(handle)
        if open_batch and not open_batch.accepts(deadline):
            self.seal(handle)

    def log_address(self, handle: int, *, blocking: bool = True) -> int:
        """Address of where compiled code notes operations on a stream; see `LaunchLog`.

        Args:
            blocking: whether the stream is a framework's; else one that has only operations with a Work.
        """
        with self._gate:
            return self._at(handle, blocking).log.address

    def async_group(self, handle: int) -> AsyncGroup:
        """That of the operation which compiled code has just put on a stream."""
        return self._open_batches[handle].group

    def marks(self, handle: int) -> EnqueuedMarks | None:
        """How compiled code marks a stream behind each operation, if it does."""
        return self._open_batches[handle].log.marks

    def seal(self, handle: int) -> None:
        """Make room where compiled code notes operations."""
        with self._gate:
            self._seal(handle, self._at(handle))

    def _at(self, handle: int, blocking: bool = True) -> _OpenBatch:
        found = self._open_batches.get(handle)
        if found is None:
            device = self._owner.device
            stream = device.adopt(handle)
            marks = None if stream.lasting else device.enqueued_marks(stream)
            found = self._open_batches[handle] = _OpenBatch(self.rings, stream, marks, blocking)
        return found

    def _seal(self, handle: int, g: _OpenBatch) -> None:
        """Mark the stream behind what has come together, if that is not done; the caller holds the gate."""
        stream = self._owner.device.adopt(handle) if g.stream.lasting else g.stream
        if stream.lasting and stream.capturing():
            return  # what came before the capture is marked after it
        sealed, group = g.take()
        self._sealing = sealed
        operations, logged, keep = sealed.operations, sealed.logged, group.keep
        if operations or logged is not None or keep:
            native = self._owner.joined_native() if sealed.collective() else None
            marked = None if logged is None else logged.mark
            mark = marked or cast(Mark, stream.mark())
            group.batch = batch = Batch(
                operations, sealed.deadline, sealed.ends, logged, stream=stream, mark=mark, native=native,
                blocking=g.blocking, on_end=keep.clear,
            )  # fmt: skip
            self.add(batch)
        self._sealing = None

    def join(self, stream: Stream, mark: Mark) -> None:
        """Let a stream of ours wait for a mark. A graph's takes it into the capture, while nobody may be marking it."""
        with self._gate if mark.captured else contextlib.nullcontext():
            stream.wait(mark)

    def seal_all(self) -> None:
        """Let everything be on its way that `poll` is to look at."""
        if not any(list(self._open_batches.values())) or not self._gate.acquire(timeout=_TURN_SECONDS):
            return
        try:
            for handle, open_batch in self._open_batches.items():
                if open_batch:
                    self._seal(handle, open_batch)
        finally:
            self._gate.release()

    def look(self) -> None:
        """Do both, and stop what is late. The vendor may hold this up as long as a kernel runs: a thread's of its own."""
        begin = monotonic()
        self.seal_all()
        if not self._polling.acquire(timeout=_TURN_SECONDS):
            return
        try:
            self._poll()
            for batches in list(self._streams.values()):
                for batch in list(batches):  # a mark that was made late lies behind younger batches
                    if batch.deadline.at < begin and batch.under_way():
                        self._expire(batch)
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
        aboard = [g.look() for g in list(self._open_batches.values()) if g]
        batches = [batch for batches in list(self._streams.values()) for batch in list(batches)]
        everything = [*batches, *filter(None, [self._sealing]), *aboard]
        moving = [contents for contents in everything if contents.moving()]
        for late in everything:
            if self._looked < late.deadline.at < now and (late in moving or self._missed(late, bool(moving))):
                self._expire(late)
                return  # which stops everything else

    def _missed(self, late: Contents, moving: bool) -> bool:
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
        for batches in list(self._streams.values()):
            through = self._through(batches)
            while batches and self._look(batches[0], through > 0):
                batches.popleft()
                through -= 1
                self._count -= 1

    @staticmethod
    def _through(batches: deque[Batch]) -> int:
        """How many of a stream's first batches are known to be through: what is behind them is.

        Where batches have the order of their marks. On a stream that may be gone they need not: compiled code marks what
        comes together before others know of it. Nor do those with a Work, which several threads add.
        """
        half = len(batches) // 2
        middle = batches[half] if half > 1 else None
        if middle is None or not (middle.stream.lasting and middle.blocking):
            return 0
        return half if middle.stream.reached(middle.mark) else 0

    def _look(self, batch: Batch, through: bool) -> bool:
        """Whether a batch is over."""
        if through or batch.stream.reached(batch.mark):
            self._end(batch, batch.outcome(self._owner.stopped))
        elif batch.native is not None:
            self._owner.miss(batch.newest)  # whoever has not come to it may never come
        return batch.over

    def _expire(self, late: Contents) -> None:
        """Stop what is late; said once: the streams go on as soon as everything has stopped."""
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
        """Note the end of all operations of a batch."""
        if len(batch.operations) == 1:
            self._owner.end(batch.operations[0], state)
        elif batch.operations:
            self._owner.end_all(batch.operations, state)
        if batch.logged is not None:
            self._owner.recorder.end_all(batch.logged.records, state)

    def drain(self, deadline: Deadline) -> None:
        """Block the host until no blocking operation is behind it, or one has failed, or the deadline has passed."""
        while not deadline.expired():
            self.look()
            batches = [f for batches in list(self._streams.values()) for f in list(batches)]
            if not any(f.blocking for f in batches) or any(f.error is not None for f in batches):
                return
            time.sleep(_PAUSE_SECONDS)

    def wait_for(self, batch: Batch) -> None:
        """Block the host until a batch is over, and raise what it raises."""
        if not batch.mark.captured:
            self.finish(batch, NEVER)
        if batch.error is not None:
            raise batch.error

    def follow(self, handle: int | None, batch: Batch) -> None:
        """Let what comes next on a stream come behind a batch."""
        if not batch.over:
            self._owner.device.adopt(handle).wait(batch.mark)

    def finish(self, batch: Batch, deadline: Deadline) -> bool:
        """Block the host until a batch is over or has failed; whether that came about by the deadline."""
        spins = 0
        while not batch.over and batch.error is None:
            self.poll()
            if deadline.expired():
                return False
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE_SECONDS)
        return True
