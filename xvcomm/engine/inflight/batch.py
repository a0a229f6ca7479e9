"""What goes on behind the host together: operations, the ring ends that they use, and when they must be over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any

from xvcomm.abc.collective import Collective, CollectiveStalled, CollectiveStopped
from xvcomm.abc.device import Mark, RingStalled, RingStopped, Stream
from xvcomm.engine.inflight.log import Ends, LoggedOperations
from xvcomm.memory.ring import Reason, RingEnd
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import Deadline


@dataclass(slots=True, eq=False)
class Contents:
    """Operations that are on a stream, or about to be.

    Attributes:
        operations: what the context has begun.
        deadline: until when they must be over.
        ends: see `Ends`.
        logged: what compiled code has begun.
        error: what they raise.
    """

    operations: Sequence[Operation]
    deadline: Deadline
    ends: Ends = field(default_factory=list)
    logged: LoggedOperations | None = None
    error: BaseException | None = None

    def lateness(self, awaited: Callable[[Operation], bool]) -> tuple[Exception, Operation]:
        """What to say when the deadline has passed; `awaited` tells whether an operation waits for a rank to come."""
        found = self.moving()
        if found:
            return RingStalled([end for end, _ in found]), found[0][1]
        operations = self.all()
        return CollectiveStalled(()), next(filter(awaited, operations), operations[-1])

    def moving(self) -> list[tuple[RingEnd, Operation]]:
        """Ring ends that are not through with their messages, and the operations that these are of."""
        return [(end, operation) for end, sequence, operation in self.all_ends() if end.finished()[0] < sequence]

    def collective(self) -> bool:
        """Whether there are collectives among them."""
        return any(o.peer < 0 for o in self.operations) or (self.logged is not None and self.logged.collective)

    def newest(self) -> Operation:
        """The last of its collectives."""
        return max((o for o in self.all() if o.peer < 0), key=attrgetter("sequence"))

    def all(self) -> list[Operation]:
        """All operations, by whomever they were begun."""
        return [*self.operations, *(self.logged.operations() if self.logged is not None else ())]

    def all_ends(self) -> Ends:
        """The ring ends that they use."""
        return [*self.ends, *(self.logged.ends() if self.logged is not None else ())]


@dataclass(slots=True, eq=False)
class Batch(Contents):
    """Operations that were enqueued together and end together.

    Attributes:
        stream, mark: they are over when the stream has reached the mark.
        native: the native library, if they use it.
        blocking: whether the user's call says that it blocks, so that a Work does not tell its end.
        keep: arrays that must live as long.
        on_end: called when they are over, however they ended.
        over: whether they are over.
    """

    _: KW_ONLY
    stream: Stream
    mark: Mark
    native: Collective | None = None
    blocking: bool = True
    keep: Any = None
    on_end: Callable[[], None] | None = None
    over: bool = False

    def under_way(self) -> bool:
        """Whether any of it may be under way, as far as the host sees: its mark may lie behind what the user put there later."""
        return self.native is not None or bool(self.moving()) or any(end.replayed for end, _, _ in self.ends)

    def outcome(self, stopped: Callable[[Callable[[], Operation]], int]) -> tuple[Exception, Operation] | None:
        """What went wrong, and in which operation, of a batch whose mark is reached.

        Args:
            stopped: gives the abort word, as far as it concerns the last of the collectives. Where other ranks stop the
                native library before this one does, its kernels end here as if all were well, and leave rubbish.
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
