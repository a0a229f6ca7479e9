"""Works of messages that start later: at the end of a `group()`, or when the admission queue launches them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from xvcomm.engine.inflight.work import Work, refuse_callback
from xvcomm.errors import ArgumentError
from xvcomm.types.deadline import Deadline


class DeferredWork(Work):
    """The Work of a message that starts later. Once the message has started, it delegates to that message's own Work.

    Attributes:
        come: blocks until the message may start and has ended, or a deadline has passed; see `AdmissionQueue.come`.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._error: BaseException | None = None
        self.work: Work | None = None
        self.come: Callable[[Callable[[], bool], Deadline], None] | None = None

    def give_up(self, error: BaseException) -> None:
        """Tell that the message will never start."""
        if self.work is None:
            self._error = error

    def wait(self, timeout: float | None = None) -> Any:
        work, left = self._started(timeout)
        return work.wait(left)

    def order(self, stream: int | None) -> None:
        work, _ = self._started(None)
        work.order(stream)

    def synchronize(self, timeout: float | None = None) -> Any:
        work, left = self._started(timeout)
        return work.synchronize(left)

    result = synchronize

    def done(self) -> bool:
        return self._error is not None or (self.work is not None and self.work.done())

    def exception(self) -> BaseException | None:
        return self._error or (self.work.exception() if self.work is not None else None)

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> NoReturn:
        refuse_callback(self._what)

    def _started(self, timeout: float | None) -> tuple[Work, float | None]:
        """The Work of the started message, after messages before it have started, and the rest of a timeout."""
        deadline = Deadline.after(timeout)
        if self.come is not None and not self.done():
            self.come(self.done, deadline)
        if self._error is not None:
            raise self._error
        if self.work is None:
            raise ArgumentError(f"{self._what} starts at the end of its group(): wait for it behind that")
        return self.work, None if timeout is None else round(deadline.left(), 3)
