"""What an asynchronous operation gives back, and the ordered thread that runs such operations on host memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, NoReturn

from xvcomm.errors import ArgumentError, ClosedError, DeadlineExceeded
from xvcomm.system.forking import FORKED, ProcessFuture, forks
from xvcomm.system.threads import Daemon
from xvcomm.trace.callsite import called_at


class Work:
    """An operation under way. Keeps its arrays alive until it is done, or until what their framework does comes behind it."""

    def __init__(self, future: Future[Any], what: str) -> None:
        self._future = future
        self._what = what

    @classmethod
    def completed(cls, result: Any, what: str) -> Work:
        """A Work that is done."""
        future: Future[Any] = Future()
        future.set_result(result)
        return cls(future, what)

    def wait(self, timeout: float | None = None) -> Any:
        """Order what comes next after the operation, and give its result array.

        On GPUs the current stream waits and the host goes on; on host memory the host waits.

        Raises:
            XvcommError: what the operation raised.
            DeadlineExceeded: it was not done after `timeout` seconds; it goes on, and can be waited for again.
        """
        return self.synchronize(timeout)

    def order(self, stream: int | None) -> None:
        """As `wait`, for who knows by its handle which stream is the current one; None for the default stream."""
        self.synchronize()

    def synchronize(self, timeout: float | None = None) -> Any:
        """Block the host until the operation is done, and give its result array. Raises as `wait` does."""
        try:
            return self._future.result(timeout)
        except FutureTimeout:
            if self._future.done():  # the operation itself raised a TimeoutError
                raise
            raise DeadlineExceeded(f"{self._what} was not done after {timeout} s; wait longer, or abort()") from None

    result = wait

    def help(self, timeout: float | None) -> bool:
        """Do in this thread what its future waits for, for at most `timeout` seconds; see `ProcessFuture`."""
        return isinstance(self._future, ProcessFuture) and self._future.help is not None and self._future.help(timeout)

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """What it raised, or None; None too while it is under way. Never blocks."""
        return self._future.exception() if self._future.done() else None

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call `callback` with a future that holds result or error, once the operation has ended on host memory.

        It runs in the thread that ends the operation, at once if that was before; it must not block.
        """
        self._future.add_done_callback(callback)


def refuse_callback(what: str) -> NoReturn:
    """Refuse `add_done_callback` on a device: no thread of the host is there when the operation ends."""
    raise ArgumentError(f"{what} is on a device's stream, which tells nobody when it is done: wait() orders the stream")


class OrderedWorker:
    """A daemon thread that runs calls one after the other: the host's stream."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], int] | None] = queue.SimpleQueue()
        self._name = name
        self._thread: Daemon | None = None
        self._pending = 0
        self._lock = threading.Lock()
        self._forks = forks()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self._pending == 0

    def submit(self, call: Callable[[], Any], call_site: int) -> Future[Any]:
        """Run `call` after all that were submitted before; at once in a callback of this thread, which may wait for it.

        Args:
            call_site: where the user called what it does, from `trace.callsite`: the thread has no caller.
        """
        future: Future[Any] = ProcessFuture()
        if self._forks != forks():
            future.set_exception(ClosedError(FORKED))
            return future
        if threading.current_thread() is self._thread:
            try:
                future.set_result(called_at(call_site, call))
            except BaseException as error:
                future.set_exception(error)
            return future
        with self._lock:
            if self._thread is None:
                self._thread = Daemon(self._name, self._run)
            self._thread.start()
            self._pending += 1
        self._calls.put((future, call, call_site))
        return future

    def close(self, timeout: float) -> bool:
        """End the thread once its calls are done; whether it ended in time. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._forks != forks():
            return True
        self._calls.put(None)
        thread.join(timeout)
        return not thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call, call_site = item
            try:
                result = called_at(call_site, call)
            except BaseException as error:
                with self._lock:
                    self._pending -= 1
                future.set_exception(error)
            else:
                with self._lock:
                    self._pending -= 1
                future.set_result(result)
            del future, call, item
