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

from xvcomm.adapters.torch.current import On
from xvcomm.adapters.torch.errors import as_torch, mapped
from xvcomm.adapters.torch.options import Options
from xvcomm.adapters.torch.ownmessages import OwnMessages
from xvcomm.adapters.torch.tensors import plain, view
from xvcomm.adapters.torch.works import NOTHING_LEFT, Done, HostWork, StreamOperation, StreamWork, Work
from xvcomm.comm.communicator import Communicator
from xvcomm.comm.point_to_point import CHANNELS
from xvcomm.engine.inflight.work import OrderedWorker
from xvcomm.errors import XvcommError
from xvcomm.memory.array import ArrayView
from xvcomm.system.forking import ProcessFuture
from xvcomm.trace.callsite import find_call_site

_CLOSE_SECONDS = 2.0
_INSIDE_RUN, _INSIDE_FROM_ANY = 2, 3
"""Functions of xvcomm that are under way at the least when `HostPlane` asks for the call site."""
Job = Callable[["Plane"], Any]
Operation = Callable[..., Any]


class Plane(ABC):
    """One communicator, and how a group's operations run on it.

    Attributes:
        comm: the communicator.
        own: messages of this rank to itself.
        device: where tensors must be brought before they are passed to it; None if they are there already.
    """

    device: torch.device | None = None

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.own = OwnMessages()

    @abstractmethod
    def view(self, x: Tensor) -> ArrayView:
        """A contiguous tensor on this plane's device, as the communicator takes it: in one dimension."""

    @property
    def ready(self) -> bool:
        """Whether an operation of the calling thread would be the next."""
        return True

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the communicator takes these, one or two, as they are."""
        return self.device is None and plain(tensors[0]) and (len(tensors) == 1 or plain(tensors[1]))

    @abstractmethod
    def run(
        self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool, inputs: Sequence[Tensor] = ()
    ) -> Work:
        """Run `job(self)`, which calls the communicator's blocking operations, in order with the group's other jobs.

        Args:
            tensors: the results.
            waits: whether the caller waits for it at once.
            inputs: what else it uses.
        """

    def start(self, operation: Operation, tensors: Sequence[Tensor], how: Options, what: str) -> Work:
        """Run one of the operations of `collectives.on_any` on tensors that `takes` takes, for a caller who does not wait."""
        return self.run(
            lambda plane: operation(plane, *tensors, how), tensors[:1], what, waits=False, inputs=tensors[1:]
        )

    @abstractmethod
    def message(
        self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None
    ) -> Work:
        """A Work for one of the communicator's asynchronous operations.

        Args:
            then: what to do once it is over.
        """

    @abstractmethod
    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], what: str, channel: int) -> Work:
        """A Work for `job`, which blocks until a message is there, receives it, and gives its source; in order on a channel."""

    @abstractmethod
    def record_event(self) -> Any:
        """The end of what the current stream holds now, for `follow`; None in host memory."""

    @abstractmethod
    def follow(self, event: Any) -> None:
        """Let the current stream wait for an event; raises what has finished the communicator, if anything has."""

    @abstractmethod
    def over(self, tensor: Tensor, what: str, source: int, used: Tensor) -> Work:
        """A Work for what the call has done itself, in host memory or on the current stream, with two tensors."""

    def handle(self) -> int | None:
        """The current stream's; None in host memory."""
        return None

    def check(self) -> None:
        """Raise what has finished the communicator, if anything has."""
        try:
            self.comm.check()
        except XvcommError as error:
            raise as_torch(error) from None

    def close(self) -> None:
        """Leave the communicator. Idempotent."""
        self.comm.close()
        self.own.close()


class HostPlane(Plane):
    """Tensors in host memory: the calling thread moves them, or one thread of the group's for what is not waited for."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm)
        self._worker = OrderedWorker(f"xvcomm-{name}")
        self._receivers = [OrderedWorker(f"xvcomm-{name}-any-{n}") for n in range(CHANNELS)]  # threads come with calls

    @property
    def ready(self) -> bool:
        """See `Plane.ready`."""
        return self._worker.idle

    def view(self, x: Tensor) -> ArrayView:
        """See `Plane.view`."""
        return view(x, "host")

    def run(
        self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool, inputs: Sequence[Tensor] = ()
    ) -> Work:
        """See `Plane.run`. In the calling thread if it waits and nothing is under way, or if there is nobody to wait for."""
        alone = self.comm.size == 1
        if not (waits or alone):
            return HostWork(self._worker.submit(partial(job, self), find_call_site(_INSIDE_RUN)), tensors, what)
        try:
            if alone or self._worker.idle:
                job(self)
            else:
                self._worker.submit(partial(job, self), find_call_site(_INSIDE_RUN)).result()
        except XvcommError as error:
            raise as_torch(error) from None
        return NOTHING_LEFT if waits else Done(tensors, what)

    def message(
        self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None
    ) -> Work:
        """See `Plane.message`."""
        future: Future[Any] = ProcessFuture(work.help)

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

    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], what: str, channel: int) -> Work:
        """See `Plane.from_any`. In a thread of the channel's, since it may wait for long."""
        return HostWork(self._receivers[channel].submit(job, find_call_site(_INSIDE_FROM_ANY)), tensors, what)

    def record_event(self) -> None:
        """See `Plane.record_event`."""

    def follow(self, event: Any) -> None:
        """See `Plane.follow`."""
        self.check()

    def over(self, tensor: Tensor, what: str, source: int, used: Tensor) -> Work:
        """See `Plane.over`."""
        return Done((tensor,), what, source)

    def close(self) -> None:
        """See `Plane.close`."""
        self._worker.close(_CLOSE_SECONDS)  # what was started may end, as with Gloo; at once if the group was aborted
        super().close()
        for receiver in self._receivers:
            receiver.close(_CLOSE_SECONDS)


class StreamPlane(Plane):
    """Tensors on a GPU: on the current stream, or beside it on a stream of the group's own. The host never waits.

    Args (of the constructor):
        device: the GPU.
        bring: whether tensors lie elsewhere, and must be brought there.
        stream: where the communicator puts operations, in place of the current stream.
    """

    def __init__(self, comm: Communicator, device: torch.device, *, bring: bool, stream: Any = None) -> None:
        super().__init__(comm)
        self.place = device
        self.device = device if bring else None
        self._kind, self._index, self._bring = comm.device, device.index, bring
        self._handle = None if stream is None else stream.cuda_stream
        self._current_stream = torch._C._cuda_getCurrentRawStream
        self._side: Any = None
        self._beside: StreamPlane = self
        self._gate = threading.Lock()

    def view(self, x: Tensor) -> ArrayView:
        """See `Plane.view`."""
        handle = self._handle
        return view(x, self._kind, self._current_stream(self._index) if handle is None else handle)

    def run(
        self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool, inputs: Sequence[Tensor] = ()
    ) -> Work:
        """See `Plane.run`."""
        if waits:
            with mapped():
                job(self)
            return NOTHING_LEFT
        with self._gate, mapped():
            if self._side is None:
                self._side = torch.cuda.Stream(self.place, priority=-1)
                self._beside = StreamPlane(self.comm, self.place, bring=self._bring, stream=self._side)
            side = self._side
            side.wait_stream(self.current())
            with On(side):
                job(self._beside)
            return StreamWork(self, side.record_event(), side, tensors, what, used=(*tensors, *inputs))

    def start(self, operation: Operation, tensors: Sequence[Tensor], how: Options, what: str) -> Work:
        """See `Plane.start`; on the communicator's stream for such operations."""
        try:
            work = operation(self, *tensors, how, async_op=True)
        except XvcommError as error:
            raise as_torch(error) from None
        return StreamOperation(self, work, None, tensors[:1], what)

    def barrier(self, how: Options) -> Work:
        """A Work for a barrier behind the current stream; who waits for it waits in the host, as with NCCL."""
        with mapped():
            work = self.comm.barrier(async_op=True, timeout=how.timeout, stream=self.handle())
            assert work is not None
        return StreamOperation(self, work, work.synchronize, (), "barrier")

    def message(
        self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None
    ) -> Work:
        """See `Plane.message`."""
        return StreamOperation(self, work, then, tensors, what, source)

    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], what: str, channel: int) -> Work:
        """See `Plane.from_any`. The host waits here until a message is announced: before that nobody knows what to enqueue."""
        with mapped():
            source = job()
        current = self.current()
        return StreamWork(self, current.record_event(), current, tensors, what, source)

    def over(self, tensor: Tensor, what: str, source: int, used: Tensor) -> Work:
        """See `Plane.over`."""
        current = self.current()
        return StreamWork(self, current.record_event(), current, (tensor,), what, source, used=(tensor, used))

    def current(self) -> Any:
        """The current stream."""
        return torch.cuda.current_stream(self.place)

    def record_event(self) -> Any:
        """See `Plane.record_event`."""
        return self.current().record_event()

    def follow(self, event: Any) -> None:
        """See `Plane.follow`."""
        self.check()
        event.wait(self.current())

    def handle(self) -> int:
        """See `Plane.handle`."""
        return int(self._current_stream(self._index))
