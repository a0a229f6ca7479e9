"""`Work` objects: results of operations for `torch.distributed` and torch's C++ (DDP's reducer, functional collectives).

C++ uses only `wait` and `get_future`; the rest is for callers in Python.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from xvcomm.adapters.torch.current import on
from xvcomm.adapters.torch.errors import as_torch, mapped
from xvcomm.adapters.torch.options import seconds
from xvcomm.errors import DeadlineExceeded, XvcommError
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.adapters.torch.planes import StreamPlane


class Work(dist.Work):
    """Base class of all kinds of Work.

    Attributes:
        tensors: the operation's results; kept until it is complete.
        source: rank that a message came from; -1 for collectives.
    """

    __slots__ = ("source", "tensors", "what")

    def __init__(self, tensors: Sequence[Tensor], what: str, source: int = -1) -> None:
        dist.Work.__init__(self)
        self.tensors = tensors
        self.what = what
        self.source = source

    def is_success(self) -> bool:
        """Whether it completed without error."""
        return bool(self.is_completed()) and self.exception() is None

    def exception(self) -> BaseException | None:
        """Its error; None if there is none, or it is in progress."""
        return None

    def result(self) -> list[Tensor]:
        """The result tensors."""
        return list(self.tensors)

    def source_rank(self) -> int:
        """The rank that a message came from."""
        return self.source

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Like `wait` without a timeout: on a GPU the current stream waits, not the host."""
        self.wait()

    block_current_stream = synchronize

    def get_future_result(self) -> Any:
        """See `get_future`."""
        return self.get_future()


class Done(Work):
    """An operation that is complete: the call has waited for it."""

    __slots__ = ()

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def get_future(self) -> Any:
        """A future with the tensors."""
        future: Any = torch.futures.Future()
        future.set_result(list(self.tensors))
        return future


NOTHING_LEFT = Done((), "")
"""For callers that wait in the call and do not use the Work."""


class HostWork(Work):
    """An operation that a thread carries out on host memory.

    Args (of the constructor):
        future: completes with the operation.
    """

    __slots__ = ("_future", "_gate", "_torch_future")

    def __init__(self, future: Future[Any], tensors: Sequence[Tensor], what: str, source: int = -1) -> None:
        super().__init__(tensors, what, source)
        self._future = future
        self._torch_future: Any = None
        self._gate = threading.Lock()

    def wait(self, timeout: Any = None) -> bool:
        """Block until it is complete.

        Raises:
            XvcommError: the operation's error.
            DeadlineExceeded: it was not complete in time; it continues.
        """
        left = seconds(timeout)
        try:
            result = self._future.result(left)
        except XvcommError as error:  # before TimeoutError, of which DeadlineExceeded is a subclass
            raise as_torch(error) from None
        except FutureTimeout:
            if not self._future.done():
                raise as_torch(_late(self.what, left)) from None
            raise
        if isinstance(result, int):
            self.source = result
        return True

    def is_completed(self) -> bool:
        """Whether it is complete."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Its error, if any."""
        error = self._future.exception() if self._future.done() else None
        return None if error is None else as_torch(error)

    def get_future(self) -> Any:
        """A future of torch that completes with the operation; callbacks run in the thread that completes it."""
        with self._gate:
            if self._torch_future is None:
                gpus = [x.device for x in self.tensors if not x.is_cpu]
                ended: Any = torch.futures.Future(devices=gpus)
                self._torch_future = ended.then(lambda _: _delivered(self.exception(), self.tensors))
                self._future.add_done_callback(lambda _: ended.set_result(list(self.tensors) if gpus else None))
            return self._torch_future


class StreamWork(Work):
    """Several steps enqueued on a GPU stream; the host has not waited for them.

    Args (of the constructor):
        event: recorded on `stream`, after the operation.
        used: tensors that the stream uses; kept until another stream waits for it.
    """

    __slots__ = ("_event", "_plane", "_stream", "_used")

    def __init__(
        self, plane: StreamPlane, event: Any, stream: Any, tensors: Sequence[Tensor], what: str, source: int = -1,
        used: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        super().__init__(tensors, what, source)
        self._plane = plane
        self._event = event
        self._stream = stream
        self._used = used

    def __del__(self) -> None:
        for tensor in self._used:  # never waited for: torch must not reuse the memory until the stream has passed
            if not tensor.is_cpu:
                tensor.record_stream(self._stream)

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait; with a timeout, the host.

        Raises:
            XvcommError: the error that ended the communicator.
            DeadlineExceeded: it was not complete in time; it continues.
        """
        left = seconds(timeout)
        if left is not None:
            self._block(left)
        self._plane.follow(self._event)
        self._used = ()
        return True

    def is_completed(self) -> bool:
        """Whether it is complete."""
        return bool(self._event.query()) or self.exception() is not None

    def exception(self) -> BaseException | None:
        """The error that ended the communicator, if any."""
        try:
            self._plane.check()
        except XvcommError as error:
            return error
        return None

    def get_future(self) -> Any:
        """A future of torch that is complete at once; reading its value makes the current stream wait, as with NCCL."""
        future: Any = torch.futures.Future(devices=[self._stream.device])
        error = self.exception()
        if error is not None:
            return _failed(error)
        with on(self._stream):
            future.set_result(list(self.tensors))
        return future

    def _block(self, timeout: float) -> None:
        deadline = Deadline.after(timeout)
        while not self._event.query():
            self._plane.check()
            if deadline.expired():
                raise as_torch(_late(self.what, timeout))
            time.sleep(0)
        self._plane.check()


class StreamOperation(Work):
    """One of the communicator's operations on a GPU; the host has not waited for it.

    Args (of the constructor):
        then: called once after it, on the first stream that waits.
    """

    __slots__ = ("_done", "_plane", "_then", "_work")

    def __init__(
        self,
        plane: StreamPlane,
        work: Any,
        then: Callable[[], Any] | None,
        tensors: Sequence[Tensor],
        what: str,
        source: int = -1,
    ) -> None:
        super().__init__(tensors, what, source)
        self._plane = plane
        self._work = work
        self._then = then
        self._done: Any = None

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait; with a timeout, the host. Raises the same as `StreamWork.wait`."""
        with mapped():
            left = seconds(timeout)
            if left is not None:
                self._work.synchronize(left)
            self._work.order(self._plane.handle())
        then, self._then = self._then, None
        if then is not None:
            then()
            self._done = self._plane.current().record_event()
        elif self._done is not None:
            self._plane.follow(self._done)
        return True

    def is_completed(self) -> bool:
        """Whether it is complete."""
        return bool(self._work.done())

    def exception(self) -> BaseException | None:
        """Its error, if any."""
        error = self._work.exception()
        return None if error is None else as_torch(error)

    def get_future(self) -> Any:
        """A future of torch that is complete at once, and whose value orders the current stream."""
        device = self._plane.place
        future: Any = torch.futures.Future(devices=[device])
        with on(_beside(device, self.source < 0)):
            try:
                self.wait()
            except XvcommError as error:
                return _failed(error)
            future.set_result(list(self.tensors))
        return future


@cache
def _beside(device: torch.device, collectives: bool) -> Any:
    """A stream on which futures wait, so that the current one need not, and collectives do not wait for messages."""
    return torch.get_device_module(device).Stream(device)


def _delivered(error: BaseException | None, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Value of a future. C++ recognizes only errors raised by a callback; one of `set_exception` counts as a result."""
    if error is not None:
        raise error
    return list(tensors)


def _failed(error: BaseException) -> Any:
    """A future that raises an error when it is waited for."""
    ended: Any = torch.futures.Future()
    future = ended.then(lambda _: _delivered(error, ()))
    ended.set_result(None)
    return future


def _late(what: str, timeout: float | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what}: Timed out waiting {timeout or 0:g} s; wait longer, or abort the group")
