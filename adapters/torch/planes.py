"""Selects the communicator for a call's tensors, and the thread or stream on which an operation runs.

A group has a plane for each device type that its ranks share: tensors on GPUs use a communicator of the GPUs, tensors in host
memory one of host memory. In a job where some ranks have no GPU there is one communicator for all; a rank with a GPU then
copies tensors in host memory to its GPU first.
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

from xvcomm.adapters.torch.current import current_handle, handle_of, on
from xvcomm.adapters.torch.errors import as_torch, mapped
from xvcomm.adapters.torch.options import Options
from xvcomm.adapters.torch.ownmessages import OwnMessages
from xvcomm.adapters.torch.tensors import plain, view
from xvcomm.adapters.torch.works import NOTHING_LEFT, Done, HostWork, StreamOperation, StreamWork, Work
from xvcomm.comm.communicator import Communicator
from xvcomm.comm.point_to_point import CHANNELS
from xvcomm.engine.inflight.work import OrderedWorker
from xvcomm.errors import XvcommError
from xvcomm.memory.array_view import ArrayView
from xvcomm.system.forking import ProcessFuture
from xvcomm.trace.callsite import find_call_site

_CLOSE_SECONDS = 2.0
_INSIDE_RUN, _INSIDE_FROM_ANY = 2, 3
"""Minimum depth of xvcomm's own frames when `HostPlane` looks up the call site."""
_FROM_ANY = "recv from any rank"
Job = Callable[["Plane"], Any]
Operation = Callable[..., Any]


class Plane(ABC):
    """One communicator, and how a group's operations run on it.

    Attributes:
        own: messages of this rank to itself.
        device: device to which tensors must be copied before they are passed to it; None if they are there already.
    """

    device: torch.device | None = None

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.own = OwnMessages()

    @abstractmethod
    def view(self, x: Tensor) -> ArrayView:
        """A contiguous tensor on this plane's device, as a one-dimensional view."""

    @property
    def ready(self) -> bool:
        """Whether an operation of the calling thread would run next."""
        return True

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the communicator accepts these tensors, one or two, without copies."""
        return self.device is None and plain(tensors[0]) and (len(tensors) == 1 or plain(tensors[1]))

    @abstractmethod
    def run(
        self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool, inputs: Sequence[Tensor] = ()
    ) -> Work:
        """Run `job(self)`, which calls the communicator's blocking operations, in order with the group's other jobs.

        Args:
            what: name for errors.
            waits: whether the caller waits for it at once.
            inputs: further tensors that it uses.
        """

    def start(self, operation: Operation, tensors: Sequence[Tensor], how: Options, what: str) -> Work:
        """Run one of the operations of `collectives.on_any` asynchronously, on tensors that `takes` accepts."""
        return self.run(
            lambda plane: operation(plane, *tensors, how), tensors[:1], what, waits=False, inputs=tensors[1:]
        )

    @abstractmethod
    def message(
        self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None
    ) -> Work:
        """A Work for one of the communicator's asynchronous operations.

        Args:
            what: name for errors.
            source: rank that a message comes from, or -1.
            then: called once it is complete.
        """

    @abstractmethod
    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], channel: int) -> Work:
        """A Work for `job`, which waits for a message, receives it, and returns its source; in order per channel."""

    @abstractmethod
    def record_event(self) -> Any:
        """An event on the current stream, for `follow`; None in host memory."""

    @abstractmethod
    def follow(self, event: Any) -> None:
        """Make the current stream wait for an event; raises the error that ended the communicator, if any."""

    @abstractmethod
    def over(self, tensor: Tensor, what: str, source: int, used: Tensor) -> Work:
        """A Work for what the call has done itself, in host memory or on the current stream, with two tensors."""

    def handle(self) -> int | None:
        """Handle of the current stream; None in host memory."""
        return None

    def check(self) -> None:
        """Raise the error that ended the communicator, if any."""
        try:
            self.comm.check()
        except XvcommError as error:
            raise as_torch(error) from None

    def close(self) -> None:
        """Close the communicator. Idempotent."""
        self.comm.close()
        self.own.close()


class HostPlane(Plane):
    """Tensors in host memory: the calling thread moves them, or a thread of the group for asynchronous operations."""

    def __init__(self, comm: Communicator, name: str) -> None:
        super().__init__(comm)
        self._worker = OrderedWorker(f"xvcomm-{name}")
        # their threads start on first use
        self._receivers = [OrderedWorker(f"xvcomm-{name}-any-{n}") for n in range(CHANNELS)]

    @property
    def ready(self) -> bool:
        return not self._worker.pending

    def view(self, x: Tensor) -> ArrayView:
        return view(x, "host")

    def run(
        self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool, inputs: Sequence[Tensor] = ()
    ) -> Work:
        """See `Plane.run`. Runs in the calling thread if the caller waits and nothing is in progress, or for a single rank."""
        alone = self.comm.size == 1
        if not (waits or alone):
            return HostWork(self._worker.submit(partial(job, self), find_call_site(_INSIDE_RUN)), tensors, what)
        try:
            if alone or not self._worker.pending:
                job(self)
            else:
                self._worker.submit(partial(job, self), find_call_site(_INSIDE_RUN)).result()
        except XvcommError as error:
            raise as_torch(error) from None
        return NOTHING_LEFT if waits else Done(tensors, what)

    def message(
        self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None
    ) -> Work:
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

    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], channel: int) -> Work:
        """See `Plane.from_any`. Runs in a thread of the channel, because it may wait for long."""
        return HostWork(self._receivers[channel].submit(job, find_call_site(_INSIDE_FROM_ANY)), tensors, _FROM_ANY)

    def record_event(self) -> None:
        """See `Plane.record_event`."""

    def follow(self, event: Any) -> None:
        self.check()

    def over(self, tensor: Tensor, what: str, source: int, used: Tensor) -> Work:
        return Done((tensor,), what, source)

    def close(self) -> None:
        # started operations may complete, as with Gloo; immediate if the group was aborted
        self._worker.close(_CLOSE_SECONDS)
        super().close()
        for receiver in self._receivers:
            receiver.close(_CLOSE_SECONDS)


class StreamPlane(Plane):
    """Tensors on a GPU: on the current stream, or concurrently on a stream of the group. The host never waits.

    Args (of the constructor):
        bring: whether tensors are elsewhere, and must be copied to the GPU.
        stream: the communicator's stream for operations, instead of the current stream.
    """

    def __init__(self, comm: Communicator, device: torch.device, *, bring: bool, stream: Any = None) -> None:
        super().__init__(comm)
        self.place = device
        self.device = device if bring else None
        self._kind, self._index, self._bring = comm.device, device.index, bring
        self._handle = None if stream is None else handle_of(stream)
        self._torch, self._current_stream = torch.get_device_module(device), current_handle(device)
        self._side: Any = None
        self._beside: StreamPlane = self
        self._gate = threading.Lock()

    def view(self, x: Tensor) -> ArrayView:
        handle = self._handle
        return view(x, self._kind, self._current_stream(self._index) if handle is None else handle)

    def run(
        self, job: Job, tensors: Sequence[Tensor], what: str, *, waits: bool, inputs: Sequence[Tensor] = ()
    ) -> Work:
        if waits:
            with mapped():
                job(self)
            return NOTHING_LEFT
        with self._gate, mapped():
            if self._side is None:
                self._side = self._torch.Stream(self.place, priority=-1)
                self._beside = StreamPlane(self.comm, self.place, bring=self._bring, stream=self._side)
            side = self._side
            side.wait_stream(self.current())
            with on(side):
                job(self._beside)
            return StreamWork(self, side.record_event(), side, tensors, what, used=(*tensors, *inputs))

    def start(self, operation: Operation, tensors: Sequence[Tensor], how: Options, what: str) -> Work:
        """See `Plane.start`; on the communicator's stream for asynchronous operations."""
        try:
            work = operation(self, *tensors, how, async_op=True)
        except XvcommError as error:
            raise as_torch(error) from None
        return StreamOperation(self, work, None, tensors[:1], what)

    def barrier(self, how: Options) -> Work:
        """A Work for a barrier after the current stream's work; waiting for it blocks the host, as with NCCL."""
        with mapped():
            work = self.comm.barrier(async_op=True, timeout=how.timeout, stream=self.handle())
            assert work is not None
        return StreamOperation(self, work, work.synchronize, (), "barrier")

    def message(
        self, work: Any, tensors: Sequence[Tensor], what: str, source: int, then: Callable[[], Any] | None
    ) -> Work:
        return StreamOperation(self, work, then, tensors, what, source)

    def from_any(self, job: Callable[[], int], tensors: Sequence[Tensor], channel: int) -> Work:
        """See `Plane.from_any`. The host waits here until a message is announced, which determines what to enqueue."""
        with mapped():
            source = job()
        current = self.current()
        return StreamWork(self, current.record_event(), current, tensors, _FROM_ANY, source)

    def over(self, tensor: Tensor, what: str, source: int, used: Tensor) -> Work:
        current = self.current()
        return StreamWork(self, current.record_event(), current, (tensor,), what, source, used=(tensor, used))

    def current(self) -> Any:
        """The current stream."""
        return self._torch.current_stream(self.place)

    def record_event(self) -> Any:
        return self.current().record_event()

    def follow(self, event: Any) -> None:
        self.check()
        event.wait(self.current())

    def handle(self) -> int:
        return int(self._current_stream(self._index))
