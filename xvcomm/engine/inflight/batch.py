"""Operations that one event ends: what they are, which ring ends they use, and until when they must end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any

from xvcomm.abc.collective import Collective, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import Event, RingStalled, RingStopped, Stream
from xvcomm.engine.inflight.log import Ends, LoggedOperations
from xvcomm.memory.ring import Reason, RingEnd
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import Deadline


@dataclass(slots=True, eq=False)
class Contents:
    """Operations on a stream, sealed or not yet.

    Attributes:
        operations: those that Python has begun.
        deadline: the earliest of their deadlines.
        logged: those that compiled code has begun.
        error: the error that they raise.
    """

    operations: Sequence[Operation]
    deadline: Deadline
    ends: Ends = field(default_factory=list)
    logged: LoggedOperations | None = None
    error: BaseException | None = None

    def lateness(self, awaited: Callable[[Operation], bool]) -> tuple[Exception, Operation]:
        """The error for a deadline that has passed, and the operation that fails by it.

        Args:
            awaited: whether an operation waits for a rank that has not come to it.
        """
        found = self.moving()
        if found:
            return RingStalled([end for end, _ in found]), found[0][1]
        operations = self.all()
        return CollectiveStalled(()), next(filter(awaited, operations), operations[-1])

    def moving(self) -> list[tuple[RingEnd, Operation]]:
        """Ring ends with unfinished messages, each with the operation that the message belongs to."""
        return [(end, operation) for end, sequence, operation in self.all_ends() if end.finished()[0] < sequence]

    def collective(self) -> bool:
        """Whether any of them is a collective."""
        return any(o.peer < 0 for o in self.operations) or (self.logged is not None and self.logged.collective)

    def newest(self) -> Operation:
        """The last of the collectives."""
        return max((o for o in self.all() if o.peer < 0), key=attrgetter("sequence"))

    def records(self) -> tuple[list[int], list[int]]:
        """Numbers in the flight recorder of the operations: of those that may be under way, and of messages that have passed."""
        numbers = [o.record for o in self.operations] + (self.logged.records if self.logged is not None else [])
        ends = [(end, following, o) for end, following, o in self.all_ends() if o.peer >= 0 and not end.replayed]
        passed = [o.record for end, following, o in ends if end.finished()[0] >= following]
        over = set(passed)
        return [number for number in numbers if number >= 0 and number not in over], passed

    def all(self) -> list[Operation]:
        """All operations, begun by Python or by compiled code."""
        return [*self.operations, *(self.logged.operations() if self.logged is not None else ())]

    def all_ends(self) -> Ends:
        """The ring ends of all operations."""
        return [*self.ends, *(self.logged.ends() if self.logged is not None else ())]


@dataclass(slots=True, eq=False)
class Batch(Contents):
    """Operations that end when their stream reaches one event.

    Attributes:
        stream, event: the stream, and the event recorded on it after the operations.
        native: the native library, if one of them uses it.
        blocking: whether the calls were blocking ones, which have no Work.
        keep: arrays that must live until the end.
        on_end: called at the end, also after a failure.
        added: when the tracker got it, on the monotonic clock.
        following: number in the flight recorder of the first operation that surely lies behind its event.
    """

    _: KW_ONLY
    stream: Stream
    event: Event
    native: Collective | None = None
    blocking: bool = True
    keep: Any = None
    on_end: Callable[[], None] | None = None
    over: bool = False
    added: float = 0.0
    following: int = 0

    def last(self) -> int:
        """Number in the flight recorder of the last operation; -1 if there is none."""
        logged = self.logged.records if self.logged is not None else []
        return max(self.operations[-1].record if self.operations else -1, logged[-1] if logged else -1)

    def under_way(self) -> bool:
        """Whether any operation may still be under way, as far as the host can see without a query of the device.

        The event alone does not tell: work that the user enqueued later may precede it.
        """
        return self.native is not None or bool(self.moving()) or any(end.replayed for end, _, _ in self.all_ends())

    def outcome(self, stopped: Callable[[Callable[[], Operation]], int]) -> tuple[Exception, Operation] | None:
        """The failure of a batch whose event is reached, and the operation that failed; None if all succeeded.

        Args:
            stopped: gives the abort word as far as it concerns the last collective. Where other ranks abort the native
                library first, this rank's kernels end without an error and leave undefined results.
        """
        ends = self.ends if self.logged is None or self.logged.arrived() else self.all_ends()
        for end, sequence, operation in ends:
            finished, goes_on = end.finished()
            if finished < sequence or (end.replayed and not goes_on):
                return RingStopped(end, end.abort_word(), finished), operation
        if self.native is not None:
            word = self.native.error()
            if not Reason.bad(word):
                word = stopped(self.newest)
            if word:
                return CollectiveStopped(word), self.all()[0]
        return None
