"""How point-to-point messages move: enqueued in order on the rings, then waited for or left to go on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from xvcomm import array
from xvcomm.abc.device import RingStalled, RingStopped, Stream
from xvcomm.array import ArrayView
from xvcomm.deadline import Deadline
from xvcomm.dtype import DType
from xvcomm.links import Use
from xvcomm.opcode import OpCode
from xvcomm.operation import Operation
from xvcomm.ring import Message, RingEnd
from xvcomm.trace import State
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context

# Looked up once: members of enumerations take longer to find than the rest of some lines below.
_SEND, _P2P = OpCode.SEND, Use.POINT_TO_POINT


class Transfer(msgspec.Struct, eq=False):
    """One message that this rank sends or receives.

    Attributes:
        stream: handle of the stream that it is ordered on; None where nobody knows.
        promise: what its Work waits for, if it has one.
        operation, end: once it is enqueued.
    """

    name: OpCode
    view: ArrayView
    peer: int
    tag: int
    deadline: Deadline
    stream: int | None = None
    promise: Any = None
    operation: Operation | None = None
    end: RingEnd | None = None


@lru_cache(maxsize=1024)
def _message(dtype: DType, nbytes: int, tag: int) -> Message:
    return Message(int(OpCode.SEND), dtype.code, nbytes, tag)


class Transfers(ABC):
    """Moves the messages of one communicator."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @abstractmethod
    def run_alone(self, t: Transfer) -> None:
        """`run` for one message, the usual case."""

    @abstractmethod
    def run(self, transfers: Sequence[Transfer]) -> None:
        """Move messages at the same time; returns when their arrays may be used."""

    @abstractmethod
    def work(self, t: Transfer) -> Work:
        """The Work of a message that will be started or given up."""

    @abstractmethod
    def start(self, transfers: Sequence[Transfer]) -> None:
        """Move messages at the same time, without waiting for them; each has a Work."""

    @abstractmethod
    def give_up(self, transfers: Sequence[Transfer], error: BaseException) -> None:
        """Let the Works of messages that will never move raise an error."""

    def _enqueue(self, t: Transfer, stream: Stream) -> RingEnd:
        """Put one transfer on a stream; the caller holds `Context.enqueueing`."""
        context = self._context
        view, sending = t.view, t.name is _SEND
        message = _message(view.dtype, view.nbytes, t.tag)
        t.operation = context.begin(t.name, message, t.peer)
        end = t.end = context.links.end(t.peer, _P2P, t.deadline, producer=sending)
        move = context.device.put if sending else context.device.get
        move(end, view.address, message, stream)
        return end

    def _fail(self, transfers: Sequence[Transfer], error: BaseException) -> NoReturn:
        """Raise the user's error; the Works get the same."""
        culprits = (error.end,) if isinstance(error, RingStopped) else error.ends if isinstance(error, RingStalled) else ()
        begun = [t for t in transfers if t.operation is not None]
        blamed = next((t for t in begun if t.end in culprits), begun[0] if begun else None)
        raised = error
        if blamed is not None and blamed.operation is not None:
            raised = self._context.fail(error, blamed.operation)
        for t in begun:
            if t is not blamed and t.operation is not None:
                self._context.end(t.operation, State.FAILED)
        self.give_up(transfers, raised)
        if raised is error:
            raise error
        raise raised from None


class HostTransfers(Transfers):
    """On host memory whoever waits moves them, and a thread of the device's those that nobody waits for."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        # Streams that no call uses at the moment: each takes one for itself, so that threads do not wait for another.
        self._free: list[Stream] = []

    def run_alone(self, t: Transfer) -> None:
        """See `Transfers.run_alone`; without lists, because they are a tenth of a small message."""
        context, stream = self._context, self._take_stream()
        stream.deadline = t.deadline
        try:
            with context.enqueueing:
                self._enqueue(t, stream)
            stream.synchronize()
        except BaseException as error:
            stream.discard()
            self._fail([t], error)
        self._free.append(stream)
        assert t.operation is not None
        context.end(t.operation)

    def run(self, transfers: Sequence[Transfer]) -> None:
        """See `Transfers.run`."""
        stream = self._take_stream()
        try:
            self._enqueue_all(transfers, stream)
            stream.synchronize()
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        self._free.append(stream)
        self._complete(transfers)

    def work(self, t: Transfer) -> Work:
        """See `Transfers.work`."""
        t.promise = Future()
        return Work(t.promise, f"{t.name} with rank {t.peer}")

    def start(self, transfers: Sequence[Transfer]) -> None:
        """See `Transfers.start`."""
        stream = self._take_stream()
        try:
            self._enqueue_all(transfers, stream)
            pending = stream.flush()
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        self._free.append(stream)
        pending.add_done_callback(lambda done: self._end(transfers, done.exception()))

    def give_up(self, transfers: Sequence[Transfer], error: BaseException) -> None:
        """See `Transfers.give_up`."""
        for t in transfers:
            if t.promise is not None and not t.promise.done():
                t.promise.set_exception(error)

    def _take_stream(self) -> Stream:
        try:
            return self._free.pop()
        except IndexError:
            return self._context.device.streams(1)[0]

    def _enqueue_all(self, transfers: Sequence[Transfer], stream: Stream) -> None:
        stream.deadline = min((t.deadline for t in transfers), key=lambda d: d.at)
        with self._context.enqueueing:
            for t in transfers:
                self._enqueue(t, stream)

    def _end(self, transfers: Sequence[Transfer], error: BaseException | None) -> None:
        """What runs on the mover's thread when transfers that nobody waited for are through."""
        try:
            if error is None:
                self._complete(transfers)
            else:
                self._fail(transfers, error)
        except BaseException as raised:
            self.give_up(transfers, raised)

    def _complete(self, transfers: Sequence[Transfer]) -> None:
        for t in transfers:
            assert t.operation is not None
            self._context.end(t.operation)
        for t in transfers:
            if t.promise is not None:
                t.promise.set_result(array.finish(t.view))
