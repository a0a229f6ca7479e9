"""What an asynchronous operation gives back, and the ordered thread that runs such operations on host memory."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from xvcomm.errors import ArgumentError, ClosedError, DeadlineExceeded
from xvcomm.memory import array
from xvcomm.memory.array_view import ArrayView
from xvcomm.system.forking import FORKED, ProcessFuture, forks
from xvcomm.system.threads import Daemon
from xvcomm.trace.callsite import called_at
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import NEVER, Deadline

_SPINS = 200
_PAUSE_SECONDS = 0.00005


class Request(Protocol):
    """What a Work must know of its operation.

    Attributes:
        stream: handle of the stream that the operation follows; None if only the array's framework knows it.
    """

    stream: int | None

    @property
    def view(self) -> ArrayView | None:
        """The array whose stream waits for the operation."""

    def described(self, sequence: int) -> Operation:
        """The operation for error messages; its number is -1 if it is not known."""

    def result(self) -> Any:
        """The user's result array."""


class Completion(ABC):
    """How the end of an operation on a device's stream is found.

    Attributes:
        sequence: number of a collective; -1 if it is not known.
    """

    sequence = -1

    @abstractmethod
    def done(self) -> bool:
        """Whether the operation has ended, well or not. Never blocks."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """What the operation raised; called when it is done."""

    @abstractmethod
    def order(self, stream: int | None) -> None:
        """Let later work of a stream wait for the operation. Raises its error if that is known."""

    def block(self, deadline: Deadline) -> None:
        """Block the host until the operation is done, and raise its error, or TimeoutError if the deadline passes first."""
        spins = 0
        while not self.done():
            if deadline.expired():
                raise TimeoutError
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE_SECONDS)
        error = self.exception()
        if error is not None:
            raise error

    def result(self, request: Request, deadline: Deadline) -> Any:
        """The user's result array; blocks as `block` does."""
        self.block(deadline)
        return request.result()


class Work:
    """An operation under way. Keeps its arrays alive until it is done, or until what their framework does comes behind it.

    Attributes:
        completion: of an operation on a device's stream; None as long as it has not started: a message in a `group()`, or in
            the admission queue.
        future: ends with an operation on host memory, or fails if an operation was given up; else None.
        come: blocks until a message may start and has ended, or a deadline has passed; see `AdmissionQueue.come`.
    """

    def __init__(
        self, request: Request, completion: Completion | None = None, future: Future[Any] | None = None
    ) -> None:
        self._request, self.completion, self.future = request, completion, future
        self.come: Callable[[Callable[[], bool], Deadline], None] | None = None

    def complete(self) -> None:
        """Tell that an operation on host memory has ended well."""
        assert self.future is not None
        self.future.set_result(self._request.result())

    def give_up(self, error: BaseException) -> None:
        """Tell that the operation has failed, if it has not started or is on host memory."""
        if self.completion is None:
            self.future = self.future or Future()
            if not self.future.done():
                self.future.set_exception(error)

    def wait(self, timeout: float | None = None) -> Any:
        """Order what comes next after the operation, and give its result array.

        On GPUs the current stream waits and the host goes on; on host memory the host waits.

        Raises:
            XvcommError: what the operation raised.
            DeadlineExceeded: it was not done after `timeout` seconds; it goes on, and can be waited for again.
        """
        if self.future is None:
            view = self._request.view
            if view is None or not view.staged:
                self._started(Deadline.after(timeout)).order(array.stream_now(view, self._request.stream))
                return self._request.result()
        return self.synchronize(timeout)

    def order(self, stream: int | None) -> None:
        """As `wait`, for who knows by its handle which stream is the current one; None for the default stream."""
        if self.future is not None:
            self.future.result()
        else:
            self._started(NEVER).order(stream)

    def synchronize(self, timeout: float | None = None) -> Any:
        """Block the host until the operation is done, and give its result array. Raises as `wait` does."""
        try:
            if self.future is not None:
                return self.future.result(timeout)
            deadline = Deadline.after(timeout)
            return self._started(deadline).result(self._request, deadline)
        except TimeoutError as error:
            if self.exception() is error:  # the operation itself raised it
                raise
            what = self._request.described(-1 if self.completion is None else self.completion.sequence)
            raise DeadlineExceeded(f"{what} was not done after {timeout} s; wait longer, or abort()") from None

    result = synchronize

    def help(self, timeout: float | None) -> bool:
        """Do in this thread what its future waits for, for at most `timeout` seconds; see `ProcessFuture`."""
        return isinstance(self.future, ProcessFuture) and self.future.help is not None and self.future.help(timeout)

    def done(self) -> bool:
        """Whether it has ended, well or not. Never blocks."""
        how = self.future or self.completion
        return how is not None and how.done()

    def exception(self) -> BaseException | None:
        """What it raised, or None; None too while it is under way. Never blocks."""
        how = self.future or self.completion
        return how.exception() if how is not None and how.done() else None

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call `callback` with a future that holds result or error, once the operation has ended on host memory.

        It runs in the thread that ends the operation, at once if that was before; it must not block.

        Raises:
            ArgumentError: the operation is on a device's stream: no thread of the host is there when it ends.
        """
        if self.future is None:
            what = self._request.described(-1)
            raise ArgumentError(
                f"{what} is on a device's stream, which tells nobody when it is done: wait() orders the stream"
            )
        self.future.add_done_callback(callback)

    def _started(self, deadline: Deadline) -> Completion:
        """How it ends, once the messages before it have started."""
        if self.come is not None:
            self.come(self.done, deadline)
        if self.future is not None:
            self.future.result()
        if self.completion is None:
            raise ArgumentError(
                f"{self._request.described(-1)} starts at the end of its group(): wait for it behind that"
            )
        return self.completion


class OrderedWorker:
    """A daemon thread that runs calls one after the other: the host's stream.

    Attributes:
        pending: number of calls that are queued or running.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any], int] | None] = queue.SimpleQueue()
        self._name = name
        self._thread: Daemon | None = None
        self.pending = 0
        self._lock = threading.Lock()
        self._forks = forks()

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
            self.pending += 1
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
                    self.pending -= 1
                future.set_exception(error)
            else:
                with self._lock:
                    self.pending -= 1
                future.set_result(result)
            del future, call, item
