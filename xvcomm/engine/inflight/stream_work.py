"""The Work of an operation on a device's stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.engine.inflight.work import Work, refuse_callback
from xvcomm.errors import ArgumentError, DeadlineExceeded
from xvcomm.types.deadline import Deadline


class StreamWork(Work):
    """A Work whose operation is on a stream.

    Args (of the constructor):
        now: gives the handle of the framework's current stream; None where that is not known, so that the host waits.
    """

    def __init__(
        self,
        tracker: Tracker,
        now: Callable[[], int | None] | None,
        finish: Callable[[], Any],
        what: str,
        batch: Batch,
    ) -> None:
        self._tracker, self._now, self._finish = tracker, now, finish
        self._what, self._batch = what, batch

    def wait(self, timeout: float | None = None) -> Any:
        if self._now is None:
            return self.synchronize(timeout)
        self.order(self._now())
        return self._finish()

    def order(self, stream: int | None) -> None:
        self._tracker.poll()
        self._raise()
        self._tracker.follow(stream, self._batch)

    def synchronize(self, timeout: float | None = None) -> Any:
        batch = self._batch
        if batch.event.captured:
            raise ArgumentError(f"{self._what} went into a graph: only wait() orders it; synchronize with the graph")
        if not self._tracker.finish(batch, Deadline.after(timeout)):
            raise DeadlineExceeded(f"{self._what} was not done after {timeout} s; wait longer, or abort()")
        self._raise()
        return self._finish()

    result = synchronize

    def done(self) -> bool:
        self._tracker.poll()
        return self._batch.over or self._batch.error is not None

    def exception(self) -> BaseException | None:
        return self._batch.error if self.done() else None

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> NoReturn:
        refuse_callback(self._what)

    def _raise(self) -> None:
        if self._batch.error is not None:
            raise self._batch.error
