"""What a stream has got since its last event: operations that the next event will end together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from xvcomm.abc.device import Stream
from xvcomm.abc.launch import EnqueuedEvents
from xvcomm.engine.inflight.batch import Batch, Contents
from xvcomm.engine.inflight.log import APART, Ends, LaunchLog, LoggedOperations
from xvcomm.memory.ring import RingEnd
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import NEVER, Deadline


class AsyncGroup:
    """Asynchronous operations that end as one batch.

    Attributes:
        keep: their requests, which must live until the batch ends.
        batch: the batch, once it is sealed. It may contain one more operation, which was logged while it was sealed.
    """

    __slots__ = ("batch", "keep")

    def __init__(self) -> None:
        self.keep: set[object] = set()
        self.batch: Batch | None = None


class OpenBatch:
    """Collects operations on one stream until they are sealed as a `Batch`.

    Args:
        events: see `LaunchLog`.
    """

    def __init__(
        self, rings: Mapping[int, RingEnd], stream: Stream, events: EnqueuedEvents | None, blocking: bool
    ) -> None:
        self.log, self.stream, self.blocking, self.group = LaunchLog(rings, events), stream, blocking, AsyncGroup()
        self._begin()

    def _begin(self) -> None:
        self.deadline = NEVER
        self.operations: list[Operation] = []
        self.ends: Ends = []

    def __bool__(self) -> bool:
        """Whether it contains operations."""
        return bool(self.operations or self.log or self.group.keep)

    def add(self, operations: Sequence[Operation], deadline: Deadline, ends: Ends) -> None:
        """Add operations that Python has begun."""
        if deadline.at < self.deadline.at:
            self.deadline = deadline
        self.log.note_deadline(deadline.at)
        self.operations.extend(operations)
        self.ends.extend(ends)

    def accepts(self, deadline: Deadline) -> bool:
        """Whether an operation with this deadline may share an event with the operations in it; see `APART`."""
        soonest = self.log.deadline
        return soonest == deadline.at or abs(soonest - deadline.at) < APART

    def look(self) -> Contents:
        """Its contents so far, with their earliest deadline."""
        return self._contents(self.log.look())

    def take(self) -> tuple[Contents, AsyncGroup]:
        """Remove and return its contents."""
        # before the log is read: an operation logged meanwhile and its group agree
        group, self.group = self.group, AsyncGroup()
        found = self._contents(self.log.take())
        self._begin()
        return found, group

    def _contents(self, logged: LoggedOperations | None) -> Contents:
        deadline = self.deadline
        if logged is not None and logged.deadline < deadline.at:
            deadline = Deadline(logged.deadline)
        return Contents(self.operations, deadline, self.ends, logged)
