"""The Work of an operation on a device's stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from xvcomm.engine.inflight.batch import Flight
from xvcomm.engine.inflight.tracker import Pending
from xvcomm.engine.inflight.work import Work, nobody_calls_back
from xvcomm.errors import ArgumentError, DeadlineExceeded
from xvcomm.types.deadline import Deadline


class StreamWork(Work):
    """A Work whose operation is on a stream.

    Args (of the constructor):
        now: gives the handle of the framework's current stream; None where that is not known, so that the host waits.
        finish: gives the result array.
    """

    def __init__(
        self,
        pending: Pending,
        now: Callable[[], int | None] | None,
        finish: Callable[[], Any],
        what: str,
        flight: Flight,
    ) -> None:
        self._pending, self._now, self._finish = pending, now, finish
        self._what, self._flight = what, flight

    def wait(self, timeout: float | None = None) -> Any:
        """See `Work.wait`."""
        if self._now is None:
            return self.synchronize(timeout)
        self.order(self._now())
        return self._finish()

    def order(self, stream: int | None) -> None:
        """See `Work.order`."""
        self._pending.poll()
        self._raise()
        self._pending.follow(stream, self._flight)

    def synchronize(self, timeout: float | None = None) -> Any:
        """See `Work.synchronize`."""
        flight = self._flight
        if flight.mark.captured:
            raise ArgumentError(f"{self._what} went into a graph: only wait() orders it; synchronize with the graph")
        if not self._pending.finish(flight, Deadline.after(timeout)):
            raise DeadlineExceeded(f"{self._what} was not done after {timeout} s; wait longer, or abort()")
        self._raise()
        return self._finish()

    result = synchronize

    def done(self) -> bool:
        """See `Work.done`."""
        self._pending.poll()
        return self._flight.over or self._flight.error is not None

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        return self._flight.error if self.done() else None

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> NoReturn:
        """See `nobody_calls_back`."""
        nobody_calls_back(self._what)

    def _raise(self) -> None:
        if self._flight.error is not None:
            raise self._flight.error
