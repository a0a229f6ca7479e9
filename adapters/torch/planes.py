"""Which communicator serves which tensors, and in which thread or on which stream an operation runs.

A group has a plane for each kind of device that its ranks share: tensors on GPUs go through a communicator of the GPUs,
tensors in host memory through one of host memory. In a job where some ranks have no GPU there is one communicator for
all; a rank with a GPU then brings tensors in host memory to it first.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from xvcomm.adapters.torch.errors import as_torch, mapped
from xvcomm.adapters.torch.tensors import plain, view
from xvcomm.adapters.torch.works import NOTHING_LEFT, HostWork, StreamMessage, StreamWork, Work
from xvcomm.array import ArrayView
from xvcomm.communicator import Communicator
from xvcomm.errors import XvcommError
from xvcomm.work import OrderedWorker

_CLOSE_SECONDS = 2.0
Job = Callable[["Plane"], Any]


class Plane(ABC):
    """One communicator, and how a group's operations run on it.

    Attributes:
        comm: the communicator.
        device: where tensors must be brought before they are passed to it; None if they are there already.
    """

    device: torch.device | None = None

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    @abstractmethod
    def view(self, x: Tensor) -> ArrayView:
        """A contiguous tensor on this plane's device, as the communicator takes it: in one dimension."""

    @abstractmethod
    def run(self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool) -> Work:
        """Run `job(self)`, which calls the communicator's blocking operations, in order with the group's other jobs.

        Args:
            tensors: the results.
            waits: whether the caller waits for it at once.
        """

    @abstractmethod
    def message(self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None) -> Work:
        """A Work for one of the communicator's asynchronous operations.

        Args:
            then: what to do once it is over.
        """

    def starts(self, tensors: Sequence[Tensor]) -> bool:
        """Whether an operation on these is best started as one of the communicator's own asynchronous ones."""
        return False

    @abstractmethod
    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], what: str) -> Work:
        """A Work for `job`, which blocks until a message is there, receives it, and gives its source; they run in order."""

    def close(self) -> None:
        """Leave the communicator. Idempotent."""
        self.comm.close()


class HostPlane(Plane):
    """Tensors in host memory: the calling thread moves them, or one thread of the group's for what is not waited for."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm)
        self._worker = OrderedWorker(f"xvcomm-{name}")
        self._receiver = OrderedWorker(f"xvcomm-{name}-any")

    def view(self, x: Tensor) -> ArrayView:
        """See `Plane.view`."""
        return view(x, "host")

    def run(self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool) -> Work:
        """See `Plane.run`. In the calling thread if it waits and nothing is under way."""
        if not waits:
            return HostWork(self._worker.submit(partial(job, self)), tensors, what)
        try:
            if self._worker.idle:
                job(self)
            else:
                self._worker.submit(partial(job, self)).result()
        except XvcommError as error:
            raise as_torch(error) from None
        return NOTHING_LEFT

    def message(self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None) -> Work:
        """See `Plane.message`."""
        future: Future[Any] = Future()

        def over(ended: Future[Any]) -> None:
            try:
                ended.result()
                if then is not None:
                    then()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(source)

        work.add_done_callback(over)
        return HostWork(future, tensors, what, source)

    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], what: str) -> Work:
        """See `Plane.from_any`. In a thread of its own, since it may wait for long."""
        return HostWork(self._receiver.submit(job), tensors, what)

    def close(self) -> None:
        """See `Plane.close`."""
        super().close()
        self._worker.close(_CLOSE_SECONDS)
        self._receiver.close(_CLOSE_SECONDS)


class StreamPlane(Plane):
    """Tensors on a GPU: on the current stream, or beside it on a stream of the group's own."""

    def __init__(self, comm: Communicator, device: torch.device, *, bring: bool) -> None:
        super().__init__(comm)
        self._place = device
        self.device = device if bring else None
        self._side: Any = None
        self._gate = threading.Lock()

    def view(self, x: Tensor) -> ArrayView:
        """See `Plane.view`."""
        return view(x, self.comm.device, torch._C._cuda_getCurrentRawStream(self._place.index))

    def run(self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool) -> Work:
        """See `Plane.run`. The host never waits."""
        if waits:
            try:
                job(self)
            except XvcommError as error:
                raise as_torch(error) from None
            return NOTHING_LEFT
        with self._gate:
            side = self._side = self._side or torch.cuda.Stream(self._place, priority=-1)
            side.wait_stream(torch.cuda.current_stream(self._place))
            with torch.cuda.stream(side), mapped():
                job(self)
                event = side.record_event()
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(side)
        return StreamWork(event, side, self._check, tensors, what)

    def starts(self, tensors: Sequence[Tensor]) -> bool:
        """See `Plane.starts`. Yes, if nothing is to be copied: one stream of the communicator's does with fewer events."""
        return self.device is None and all(plain(t) for t in tensors)

    def message(self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None) -> Work:
        """See `Plane.message`."""
        return StreamMessage(work, then, tensors, what, source)

    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], what: str) -> Work:
        """See `Plane.from_any`. The host waits here until a message is announced: before that nobody knows what to enqueue."""
        with mapped():
            source = job()
        event = torch.cuda.current_stream(self._place).record_event()
        return StreamWork(event, torch.cuda.current_stream(self._place), self._check, tensors, what, source)

    def _check(self) -> None:
        with mapped():
            self.comm.check()

