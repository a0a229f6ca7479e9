"""Streams of xvcomm's on which compiled code launches asynchronous operations, and the ends of such operations.

The tracker ends these operations in batches, as it does blocking ones. A Work does not wait for its batch: it queries the
event of its own operation, and only when it is asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from xvcomm.abc.collective import CollectiveStopped
from xvcomm.abc.device import Event, Stream
from xvcomm.abc.launch import SupportsEnqueuedEvents
from xvcomm.engine.context import Context
from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.work import Completion
from xvcomm.engine.request import CollectiveRequest, MessageRequest
from xvcomm.jit.ccall import call_3
from xvcomm.jit.compile import brief, compiling
from xvcomm.jit.record import python_type
from xvcomm.memory.ring import Reason, RingEnd
from xvcomm.trace.operation import NO_PEER
from xvcomm.types.deadline import NEVER

BRANCH = np.dtype([("branch", "i8"), ("record", "i8"), ("argument", "i8")])
"""For compiled code; see `EnqueuedEvents`."""

_Branch = python_type(BRANCH)


def _three(function: int, a: int, b: int, c: int) -> int:
    return call_3(function, a, b, c)  # type: ignore[no-any-return]


with compiling():
    _call = brief("int64(int64, int64, int64, int64)")(_three)


class Branch:
    """A stream of xvcomm's for operations that compiled code launches.

    One launch at a time: the admission queue sees to it for messages, and the caller for collectives.

    Args (of the constructor):
        device: of the stream.

    Attributes:
        log: address of the stream's launch log.
        address: of the `BRANCH` record.
        event: the event after the latest operation.
        sequence: number of the latest collective; for messages of the next collective.
        ends: ring ends of the latest operation, each with the number of its next message.
        failed: see `EnqueuedEvents`.
    """

    def __init__(self, context: Context, device: SupportsEnqueuedEvents, stream: Stream) -> None:
        self.context, self.stream, self.handle = context, stream, stream.handle
        self._events = events = device.enqueued_events(stream)
        self._record, self.failed = _Branch(events.branch, events.record, events.argument), events.failed
        self.address = ctypes.addressof(self._record)
        self.log = context.tracker.log_address(self.handle, blocking=False)
        self.event, self.sequence, self.ends = events.take(), -1, list[tuple[RingEnd, int]]()
        self._followed: set[int] = set()

    def take_event(self) -> int:
        """Take an event for the next operation, and give its handle."""
        event = self.event = self._events.take()
        return event.handle

    def follow(self, handle: int | None, event: Event, over: Callable[[], bool]) -> None:
        """Let later work of a user's stream wait for an event of this one, unless that operation is `over`."""
        events, stream = self._events, handle or 0
        if stream in self._followed and _call(events.follow, events.argument, event.handle, stream) == 0:
            return
        if not over():  # a graph cannot wait for an event that was reached before its capture
            self.context.device.adopt(handle).wait(event)
            self._followed.add(stream)


class Launched(Completion):
    """By the event after the operation on its branch. It must be made before the next operation is launched there.

    Args (of the constructor):
        request: of the operation; it lives until the operation has ended.
        ends: the operation's ring ends, each with the number of its next message.
    """

    def __init__(
        self, branch: Branch, request: CollectiveRequest | MessageRequest, ends: list[tuple[RingEnd, int]]
    ) -> None:
        self._branch, self._event, self._request, self._ends = branch, branch.event, request, ends
        self.sequence = branch.sequence
        group = self._group = branch.context.tracker.async_group(branch.handle)
        group.keep.add(request)
        self._well = False
        self._error: BaseException | None = None

    def done(self) -> bool:
        if self._well or self._error is not None:
            return True
        together = self._group.batch
        if together is not None and together.over and together.error is None:
            self._well = True
            return True
        context, operation, stream = self._branch.context, self._request.described(self.sequence), self._branch.stream
        if stream.reached(self._event):
            ends = [(end, following, operation) for end, following in self._ends]
            native = context.joined_native() if operation.peer == NO_PEER else None
            alone = Batch([operation], NEVER, ends, stream=stream, event=self._event, native=native)
            failure = alone.outcome(context.stopped)
        elif Reason.bad(word := context.lifecycle.word()):
            failure = CollectiveStopped(word), operation
        else:
            return False
        if failure is None:
            self._well = True
        else:
            self._error = context.explain(*failure)
        return True

    def exception(self) -> BaseException | None:
        return self._error

    def order(self, stream: int | None) -> None:
        if self._branch.context.lifecycle.word():
            self.done()
        if not self._well and self._error is None:
            self._branch.follow(stream, self._event, self.done)
        if self._error is not None:
            raise self._error
        view = self._request.view
        if stream is not None and view is not None and view.stream == stream:
            # The framework's later work on the array follows on that stream.
            self._group.keep.discard(self._request)
            self._request.release()
