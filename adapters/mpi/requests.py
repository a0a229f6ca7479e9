"""Started operations, and waiting for one, any, some or all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from xvcomm.adapters.mpi.matching import Matcher, Send
from xvcomm.adapters.mpi.messages import Envelope, Receive
from xvcomm.adapters.mpi.progress import advance, busy, wait_until
from xvcomm.adapters.mpi.status import UNDEFINED, Status
from xvcomm.errors import ArgumentError
from xvcomm.types.deadline import NEVER, Deadline


class Started(ABC):
    """An operation that was started."""

    @abstractmethod
    def over(self) -> bool:
        """Whether it has completed or failed. Never blocks."""

    @abstractmethod
    def finish(self) -> Any:
        """Block until it is over; return its object, if it has one, or raise its error."""

    def tell(self, status: Status) -> None:
        """Fill the status, once it is over."""
        status.tell(None)

    def cancel(self) -> bool:
        """Cancel it; returns whether that was possible."""
        return False


class Done(Started):
    """An operation that completed at once, without an object; `envelope` for its status."""

    def __init__(self, envelope: Envelope | None = None) -> None:
        self._envelope = envelope

    def over(self) -> bool:
        return True

    def finish(self) -> None:
        """See `Started.finish`."""

    def tell(self, status: Status) -> None:
        status.tell(self._envelope)


class Sending(Started):
    """A send in progress."""

    def __init__(self, send: Send) -> None:
        self.send = send

    def over(self) -> bool:
        return self.send.over()

    def finish(self) -> None:
        if busy():
            wait_until(self.send.over, Deadline.after(self.send.timeout), self.send.late)
        self.send.check()


class Receiving(Started):
    """A receive; `read` converts the received message to an object."""

    def __init__(self, matcher: Matcher, receive: Receive, read: Callable[[Receive], Any] | None = None) -> None:
        self._matcher, self._receive, self._read = matcher, receive, read
        self.timeout, self.late = matcher.timeout, matcher.late

    def over(self) -> bool:
        return self._receive.over()

    def finish(self) -> Any:
        self._matcher.finish(self._receive)
        return None if self._read is None or self._receive.cancelled else self._read(self._receive)

    def tell(self, status: Status) -> None:
        status.tell(self._receive.envelope, self._receive.cancelled)

    def cancel(self) -> bool:
        return self._matcher.cancel(self._receive)


class Fetching(Started):
    """A receive of a message that was taken from the queue before; `read` as in `Receiving`."""

    def __init__(self, receive: Receive, read: Callable[[Receive], Any] | None) -> None:
        self._receive, self._read = receive, read

    def over(self) -> bool:
        return self._receive.over()

    def finish(self) -> Any:
        wait_until(self._receive.over, NEVER)  # the transfer is in progress, and has a deadline of its own
        self._receive.check()
        return None if self._read is None else self._read(self._receive)

    def tell(self, status: Status) -> None:
        status.tell(self._receive.envelope)


class Both(Started):
    """A send and a receive; the status is that of the receive."""

    def __init__(self, send: Started, receive: Started) -> None:
        self._send, self._receive = send, receive

    def over(self) -> bool:
        return self._send.over() and self._receive.over()

    def finish(self) -> Any:
        value = self._receive.finish()
        self._send.finish()
        return value

    def tell(self, status: Status) -> None:
        self._receive.tell(status)


class Queued(Started):
    """A collective in its communicator's queue."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def over(self) -> bool:
        return self._future.done()

    def finish(self) -> Any:
        if busy():
            wait_until(self._future.done, NEVER)  # its operations have deadlines of their own
        return self._future.result()


class Request:
    """Result of a non-blocking operation; null once it was waited for.

    The upper-case methods return what MPI returns, the lower-case ones also the received object. Every method that waits or
    tests also progresses other operations of this process.
    """

    def __init__(self, started: Started | None = None) -> None:
        self._started = started

    def __bool__(self) -> bool:
        return self._started is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Request):
            return NotImplemented
        return self is other or not (self or other)

    __hash__ = object.__hash__

    def Wait(self, status: Status | None = None) -> bool:
        """Block until the operation is complete; returns True."""
        self.wait(status)
        return True

    def wait(self, status: Status | None = None) -> Any:
        """Block until the operation is complete; returns the received object, if any."""
        return self._finish(status)

    def Test(self, status: Status | None = None) -> bool:
        """Whether the operation is complete; if so, like `Wait`. Never blocks."""
        return self.test(status)[0]

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Like `Test`, with the received object."""
        if self._pending():
            return False, None
        return True, self._finish(status)

    def Get_status(self, status: Status | None = None) -> bool:
        """Whether the operation is complete; keeps the request. Never blocks."""
        if self._pending():
            return False
        self._tell(status)
        return True

    get_status = Get_status

    def Cancel(self) -> None:
        """Cancel an unmatched receive, which must still be waited for. Other operations cannot be cancelled."""
        if self._started is not None:
            self._started.cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Release the request; the operation continues."""
        self._started = None

    free = Free

    def _pending(self) -> bool:
        if self._started is None:
            return False
        advance()
        return not self._started.over()

    def _tell(self, status: Status | None) -> None:
        if status is not None:
            if self._started is None:
                status.tell(None)
            else:
                self._started.tell(status)

    def _finish(self, status: Status | None) -> Any:
        if self._started is None:
            self._tell(status)
            return None
        try:
            return self._started.finish()
        finally:
            self._tell(status)
            self._end()

    def _end(self) -> None:
        """Make the request null, after it was waited for."""
        self._started = None

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        """Block until all are complete; returns True."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[Any]:
        """Block until all are complete; returns the received objects."""
        fill = _statuses(statuses, len(requests))
        return [request._finish(status) for request, status in zip(requests, fill, strict=True)]

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> bool:
        """Whether all are complete; if so, like `Waitall`. Never blocks."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None
    ) -> tuple[bool, list[Any] | None]:
        """Like `Testall`, with the received objects."""
        if any(request._pending() for request in requests):
            return False, None
        return True, cls.waitall(requests, statuses)

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Status | None = None) -> int:
        """Block until one is complete; returns its index, or UNDEFINED if none is active."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, Any]:
        """Like `Waitany`, with the received object."""
        _await_any(requests)
        index, _, value = cls.testany(requests, status)
        return index, value

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool]:
        """Index of a complete one or UNDEFINED, and whether one is complete or none is active. Never blocks."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Status | None = None) -> tuple[int, bool, Any]:
        """Like `Testany`, with the received object."""
        active = _active(requests)
        if not active:
            if status is not None:
                status.tell(None)
            return UNDEFINED, True, None
        for index in active:
            if not requests[index]._pending():
                return index, True, requests[index]._finish(status)
        return UNDEFINED, False, None

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[int] | None:
        """Block until at least one is complete; returns the indices of all complete ones, or None if none is active."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Like `Waitsome`, with the received objects."""
        _await_any(requests)
        return cls.testsome(requests, statuses)

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None) -> list[int] | None:
        """The indices of all complete ones, or None if none is active. Never blocks."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: Sequence[Status] | None = None
    ) -> tuple[list[int] | None, list[Any] | None]:
        """Like `Testsome`, with the received objects."""
        active = _active(requests)
        if not active:
            return None, None
        over = [index for index in active if not requests[index]._pending()]
        fill = _statuses(statuses, len(over))
        return over, [requests[index]._finish(status) for index, status in zip(over, fill, strict=True)]


class Prequest(Request):
    """A persistent request, which can be started repeatedly.

    Args:
        start: starts the operation.
    """

    def __init__(self, start: Callable[[], Started]) -> None:
        super().__init__()
        self._start: Callable[[], Started] | None = start

    def __bool__(self) -> bool:
        return self._start is not None

    def Start(self) -> None:
        """Start the operation.

        Raises:
            ArgumentError: it is active, or the request was freed.
        """
        if self._start is None or self._started is not None:
            raise ArgumentError("Start: the request is active, or was freed; Wait for it, or create a new one")
        self._started = self._start()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start all."""
        for request in requests:
            request.Start()

    def Free(self) -> None:
        """Release the request."""
        super().Free()
        self._start = None


REQUEST_NULL = Request()


def _active(requests: Sequence[Request]) -> list[int]:
    return [index for index, request in enumerate(requests) if request._started is not None]


def _await_any(requests: Sequence[Request]) -> None:
    active = [requests[index] for index in _active(requests)]
    if not active:
        return

    receives = [r._started for r in active if isinstance(r._started, Receiving)]
    deadline, late = NEVER, None
    if len(receives) == len(active):  # all others have deadlines of their own
        deadline, late = Deadline.after(max(r.timeout for r in receives)), receives[0].late
    wait_until(lambda: any(not request._pending() for request in active), deadline, late)


def _statuses(statuses: Sequence[Status] | None, count: int) -> Sequence[Status | None]:
    """One status per request; a list that is too short is extended, as in mpi4py, other sequences are not."""
    if isinstance(statuses, list):
        statuses.extend(Status() for _ in range(count - len(statuses)))
    given = [] if statuses is None else list(statuses[:count])
    return [*given, *[None] * (count - len(given))]
