"""Asynchronous operations that compiled code launches on a stream of xvcomm's, and their Works.

The tracker ends these operations in batches, as it does blocking ones. A Work does not wait for its batch: it queries the
event of its own operation, and only when it is asked.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from xvcomm.abc.collective import Collective, CollectiveStopped
from xvcomm.abc.device import Event, Stream
from xvcomm.abc.launch import SupportsEnqueuedEvents
from xvcomm.engine.context import Context
from xvcomm.engine.gate import LaunchGate
from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.work import Work, refuse_callback
from xvcomm.engine.launch import Branch, Launch
from xvcomm.engine.request import CollectiveRequest, MessageRequest
from xvcomm.errors import DeadlineExceeded
from xvcomm.jit.ccall import call_3
from xvcomm.jit.compile import brief, compiling
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import Reason, RingEnd
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import NEVER, Deadline

Come = Callable[[Callable[[], bool], Deadline], None]
_SPINS = 200
_PAUSE_SECONDS = 0.00005


def _three(function: int, a: int, b: int, c: int) -> int:
    return call_3(function, a, b, c)  # type: ignore[no-any-return]


with compiling():
    _call = brief("int64(int64, int64, int64, int64)")(_three)


class Beside:
    """A stream of xvcomm's, on which compiled code launches operations.

    One call at a time: the admission queue sees to it for messages, and the caller for collectives.

    Attributes:
        branch: arguments of the latest operation's launch.
    """

    def __init__(self, context: Context, device: SupportsEnqueuedEvents, gate: LaunchGate, stream: Stream) -> None:
        self.context, self.stream, self.handle = context, stream, stream.handle
        self._launch_gate, self._events = gate, device.enqueued_events(stream)
        self.branch, self.event = Branch(self._events), self._events.take()
        self._known: set[int] = set()

    def start(
        self,
        ready: Launch,
        call: CollectiveRequest,
        user: int | None,
        given: int | None,
        call_site: int,
        deadline: Deadline,
    ) -> StartedCollective | None:
        """Launch a collective after the present work of a user's stream; None if nothing has begun.

        Args:
            user: the stream's handle; None for the default one.
            given: the same handle if the user passed it; None if it is the framework's own.

        Raises:
            MismatchError, PeerLost, DeadlineExceeded, Aborted: as operations of the communicator do.
        """
        log, src, dst = self._begin(user), array.address(call.src), array.address(call.dst)
        if not ready.run(log, self.handle, deadline.at, call_site, src, dst, branch=self.branch):
            return None
        return StartedCollective(self, call, given)

    def move(
        self,
        ready: Launch,
        transfers: Sequence[MessageRequest],
        items: list[int],
        call_site: int,
        deadline: Deadline,
        user: int,
        come: Come,
    ) -> list[StartedMessage] | None:
        """The same for messages whose turn it is, each with a ring of its own.

        Args:
            items, call_site: see `Launch.run`.
            come: see `DeferredWork`.
        """
        if not ready.run(self._begin(user), self.handle, deadline.at, call_site, items=items, branch=self.branch):
            return None
        return [StartedMessage(self, t, *ring, come) for t, ring in zip(transfers, self.branch.ends, strict=True)]

    def _begin(self, user: int | None) -> int:
        """Take an event for an operation after a user's stream; gives the stream's launch log."""
        event = self.event = self._events.take()
        self.branch.between(user or 0, event.handle)
        return self._launch_gate.places.get(self.handle) or self._launch_gate.place(self.handle, blocking=False)

    def follow(self, handle: int | None, event: Event, over: Callable[[], bool]) -> None:
        """Let later work of a user's stream wait for an event of this one, unless that operation is `over`."""
        events, stream = self._events, handle or 0
        if stream in self._known and _call(events.follow, events.argument, event.handle, stream) == 0:
            return
        if not over():  # a graph cannot wait for an event that was reached before its capture
            self.context.device.adopt(handle).wait(event)
            self._known.add(stream)


class Started(Work):
    """The Work of an operation on a stream of xvcomm's. It must be made before the next operation is launched there.

    Args (of the constructor):
        ends: its ring ends, each with the number of its next message.
        key: distinguishes it from other operations on the stream.
        keep: objects that must live until it ends.
        given: handle of the user's stream that it follows, if the user passed it; None if it is the framework's own.
    """

    def __init__(
        self, beside: Beside, ends: list[tuple[RingEnd, int]], key: object, keep: object, given: int | None
    ) -> None:
        self._beside, self._event, self._key, self._given = beside, beside.event, key, given
        self._sequence, self._ends = beside.branch.sequence, ends
        group = self._group = beside.context.tracker.async_group(beside.handle)
        group.keep[key] = keep
        self._well = False
        self._error: BaseException | None = None

    def wait(self, timeout: float | None = None) -> Any:
        view = self._view()
        if view is not None and view.staged:
            return self.synchronize(timeout)
        self.order(array.stream_now(view, self._given))
        return self._result()

    def order(self, stream: int | None) -> None:
        if self._beside.context.lifecycle.word() and self.done():
            self._raise()
        if not self._well:
            self._beside.follow(stream, self._event, self.done)
            self._raise()
        if self._at_home(stream):  # the framework's later work on the array follows on that stream
            self._group.keep.pop(self._key, None)

    def synchronize(self, timeout: float | None = None) -> Any:
        deadline, spins = Deadline.after(timeout), 0
        while not self.done():
            if deadline.expired():
                raise DeadlineExceeded(f"{self._operation()} was not done after {timeout} s; wait longer, or abort()")
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE_SECONDS)
        self._raise()
        return self._result()

    result = synchronize

    def done(self) -> bool:
        if self._well or self._error is not None:
            return True
        together = self._group.batch
        if together is not None and together.over and together.error is None:
            self._well = True
            return True
        context, batch = self._beside.context, self._batch()
        failure: tuple[Exception, Operation] | None
        if batch.stream.reached(self._event):
            failure = batch.outcome(context.stopped)
        elif Reason.bad(word := context.lifecycle.word()):
            failure = CollectiveStopped(word), batch.operations[0]
        else:
            return False
        if failure is None:
            self._well = True
        else:
            self._error = context.explain(*failure)
        return True

    def exception(self) -> BaseException | None:
        return self._error if self.done() else None

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> NoReturn:
        refuse_callback(str(self._operation()))

    def _at_home(self, stream: int | None) -> bool:
        """Whether this is the stream on which the array's framework works."""
        view = self._view()
        return stream is not None and view is not None and view.stream == stream

    def _batch(self) -> Batch:
        """The operation as a batch of its own."""
        operation = self._operation()
        ends = [(end, following, operation) for end, following in self._ends]
        return Batch([operation], NEVER, ends, stream=self._beside.stream, event=self._event, native=self._native())

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    @abstractmethod
    def _view(self) -> ArrayView | None:
        """The array whose stream waits for it."""

    @abstractmethod
    def _result(self) -> Any:
        """The user's result array."""

    @abstractmethod
    def _operation(self) -> Operation:
        """The operation, for error messages."""

    @abstractmethod
    def _native(self) -> Collective | None:
        """The native library, if it uses one."""


class StartedCollective(Started):
    """The Work of such a collective."""

    def __init__(self, beside: Beside, call: CollectiveRequest, given: int | None) -> None:
        super().__init__(beside, beside.branch.ends, beside.branch.sequence, call, given)
        self._call = call

    def order(self, stream: int | None) -> None:
        super().order(stream)
        if self._call.dst is not None and self._at_home(stream):
            self._call.src = None  # it may be large, and nothing else may hold its memory

    def _view(self) -> ArrayView | None:
        return self._call.src if self._call.dst is None else self._call.dst

    def _result(self) -> Any:
        return self._call.result()

    def _operation(self) -> Operation:
        return Operation(self._call.op, self._sequence, self._call.message())

    def _native(self) -> Collective | None:
        return self._beside.context.joined_native()


class StartedMessage(Started):
    """The Work of such a message.

    Args (of the constructor):
        following: number of the ring end's next message.
    """

    def __init__(self, beside: Beside, t: MessageRequest, end: RingEnd, following: int, come: Come) -> None:
        super().__init__(beside, [(end, following)], (end, following), t.view, t.stream)
        self._transfer, self._come = t, come

    def order(self, stream: int | None) -> None:
        self._come(self.done, NEVER)
        super().order(stream)

    def _view(self) -> ArrayView:
        return self._transfer.view

    def _result(self) -> Any:
        return array.finish(self._transfer.view)

    def _operation(self) -> Operation:
        t = self._transfer
        return Operation(t.name, self._sequence, t.message(), t.peer, channel=t.channel)

    def _native(self) -> Collective | None:
        return None
