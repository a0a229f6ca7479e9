"""Point-to-point operations of a communicator: send, recv, their asynchronous forms, and groups.

Between two ranks messages match in order; the tag is checked, not searched. A send returns once its data is in the
ring, a small one therefore before the receiver comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xvcomm import array
from xvcomm.abc.device import RingStalled, RingStopped, Stream
from xvcomm.array import ArrayView
from xvcomm.deadline import Deadline
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.links import Use
from xvcomm.opcode import OpCode
from xvcomm.operation import Operation
from xvcomm.ring import Message, RingEnd
from xvcomm.trace import State
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context


# Looked up once: members of enumerations take longer to find than the rest of some lines below.
_SEND, _RECV, _P2P, _CODE = OpCode.SEND, OpCode.RECV, Use.POINT_TO_POINT, int(OpCode.SEND)


_TAGS = 1 << 62


@dataclass(slots=True)
class _Transfer:
    """One message that this rank sends or receives; `future` is for its Work, if it has one."""

    name: OpCode
    view: ArrayView
    peer: int
    tag: int
    deadline: Deadline
    future: Future[Any] | None = None
    operation: Operation | None = None
    end: RingEnd | None = None


@dataclass(slots=True)
class _Group:
    """What a thread has called inside `group()`; `waits` if any of it blocks."""

    transfers: list[_Transfer] = field(default_factory=list)
    waits: bool = False


class PointToPoint:
    """Part of Communicator; see there for what all operations have in common."""

    _context: Context
    rank: int
    size: int
    timeout: float
    _deadline: Callable[[float | None], Deadline]

    def _init_point_to_point(self) -> None:
        # Streams that no call uses at the moment: each takes one for itself, so that threads do not wait for another.
        self._streams: list[Stream] = []
        self._groups: dict[int, _Group] = {}

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an array to rank `dst`; blocks until `x` may be changed."""
        transfer = self._sending(x, dst, tag, timeout)
        group = self._open_group()
        if group is None:
            self._run_alone(transfer)
        else:
            group.waits = True
            group.transfers.append(transfer)

    def recv(self, buf: Any, src: int, tag: int = 0, *, timeout: float | None = None) -> Any:
        """Receive an array from rank `src`; blocks until it is there.

        Args:
            buf: where to, of the shape and dtype that are sent; for immutable arrays what tells them.

        Returns:
            `buf`, or a new array where it is immutable.
        """
        transfer = self._receiving(buf, src, tag, timeout)
        group = self._open_group()
        if group is None:
            self._run_alone(transfer)
            return array.finish(transfer.view)
        if transfer.view.immutable:
            raise ArrayError("recv of an immutable array inside group() cannot return it yet; use irecv and its result()")
        group.waits = True
        group.transfers.append(transfer)
        return buf

    def isend(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> Work:
        """Send without waiting. `x` may be changed once the Work is done; the Work keeps it alive."""
        return self._background(self._sending(x, dst, tag, timeout))

    def irecv(self, buf: Any, src: int, tag: int = 0, *, timeout: float | None = None) -> Work:
        """Receive without waiting; the array is the Work's result."""
        return self._background(self._receiving(buf, src, tag, timeout))

    def sendrecv(
        self, x: Any, dst: int, buf: Any, src: int, send_tag: int = 0, recv_tag: int = 0, *, timeout: float | None = None
    ) -> Any:
        """Send to one rank and receive from another (or the same) at once; gives the received array."""
        incoming = self._receiving(buf, src, recv_tag, timeout)
        self._run_now([self._sending(x, dst, send_tag, timeout), incoming])
        return array.finish(incoming.view)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start all point-to-point operations of the block together at its end, in any order without deadlock.

        The end blocks until all are done if the block holds a `send` or `recv`; `isend` and `irecv` go on behind it.
        """
        if self._open_group() is not None:
            yield  # the outermost group counts, as in NCCL
            return
        thread = threading.get_ident()
        group = self._groups[thread] = _Group()
        try:
            yield
        except BaseException as error:
            _end_works(group.transfers, error)  # given up: who waits for one must not wait for ever
            raise
        finally:
            del self._groups[thread]
        if group.waits:
            self._run_now(group.transfers)
        elif group.transfers:
            self._start(group.transfers)

    def _open_group(self) -> _Group | None:
        return self._groups.get(threading.get_ident()) if self._groups else None

    def _sending(self, x: Any, dst: int, tag: int, timeout: float | None) -> _Transfer:
        if not 0 <= dst < self.size or dst == self.rank or not 0 <= tag < _TAGS:
            raise self._misdirected("dst", dst, tag)
        view = array.view(x)
        if view.device != self._context.kind:
            raise self._context.foreign(view)
        return _Transfer(_SEND, view, dst, tag, Deadline.after(self.timeout if timeout is None else timeout))

    def _receiving(self, buf: Any, src: int, tag: int, timeout: float | None) -> _Transfer:
        if not 0 <= src < self.size or src == self.rank or not 0 <= tag < _TAGS:
            raise self._misdirected("src", src, tag)
        view = array.view(buf, output=True)
        if view.device != self._context.kind:
            raise self._context.foreign(view)
        if view.immutable:
            view = array.empty_like(view, view.shape)
        return _Transfer(_RECV, view, src, tag, Deadline.after(self.timeout if timeout is None else timeout))

    def _misdirected(self, what: str, peer: int, tag: int) -> ArgumentError:
        if not 0 <= peer < self.size:
            return ArgumentError(f"{what} {peer}: ranks of this communicator go from 0 to {self.size - 1}")
        if peer == self.rank:
            return ArgumentError(f"{what} {peer} is this rank itself; copy the array instead")
        return ArgumentError(f"tag {tag}: must be a whole number from 0 on")

    def _background(self, transfer: _Transfer) -> Work:
        future = transfer.future = Future()
        group = self._open_group()
        if group is not None:
            group.transfers.append(transfer)
        else:
            self._start([transfer])
        return Work(future, f"{transfer.name} with rank {transfer.peer}")

    def _take_stream(self) -> Stream:
        try:
            return self._streams.pop()
        except IndexError:
            return self._context.device.streams(1)[0]

    def _enqueue(self, t: _Transfer, stream: Stream) -> None:
        """Put one transfer on a stream; the caller holds `Context.enqueueing`."""
        context = self._context
        view, sending = t.view, t.name is _SEND
        message = Message(_CODE, view.dtype.code, view.nbytes, t.tag)
        t.operation = context.begin(t.name, message, t.peer)
        t.end = context.links.end(t.peer, _P2P, t.deadline, producer=sending)
        move = context.device.put if sending else context.device.get
        move(t.end, view.address, message, stream)

    def _enqueue_all(self, transfers: list[_Transfer], stream: Stream) -> None:
        stream.deadline = min((t.deadline for t in transfers), key=lambda d: d.at)
        with self._context.enqueueing:
            for t in transfers:
                self._enqueue(t, stream)

    def _run_alone(self, t: _Transfer) -> None:
        """`_run_now` for one transfer, the usual case: without lists, because they are a tenth of a small message."""
        context, stream = self._context, self._take_stream()
        stream.deadline = t.deadline
        try:
            with context.enqueueing:
                self._enqueue(t, stream)
            stream.synchronize()
        except BaseException as error:
            stream.discard()
            self._fail([t], error)
        self._streams.append(stream)
        assert t.operation is not None
        context.end(t.operation)

    def _run_now(self, transfers: list[_Transfer]) -> None:
        if not transfers:
            return
        stream = self._take_stream()
        try:
            self._enqueue_all(transfers, stream)
            stream.synchronize()
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        self._streams.append(stream)
        self._complete(transfers)

    def _start(self, transfers: list[_Transfer]) -> None:
        stream = self._take_stream()
        try:
            self._enqueue_all(transfers, stream)
            pending = stream.flush()
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        self._streams.append(stream)
        pending.add_done_callback(lambda done: self._end(transfers, done.exception()))

    def _end(self, transfers: list[_Transfer], error: BaseException | None) -> None:
        """What runs on the mover's thread when transfers that nobody waited for are through."""
        try:
            if error is None:
                self._complete(transfers)
            else:
                self._fail(transfers, error)
        except BaseException as raised:
            _end_works(transfers, raised)

    def _complete(self, transfers: list[_Transfer]) -> None:
        for t in transfers:
            assert t.operation is not None
            self._context.end(t.operation)
        for t in transfers:
            if t.future is not None:
                t.future.set_result(array.finish(t.view))

    def _fail(self, transfers: list[_Transfer], error: BaseException) -> None:
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
        _end_works(transfers, raised)
        if raised is error:
            raise error
        raise raised from None


def _end_works(transfers: list[_Transfer], error: BaseException) -> None:
    for t in transfers:
        if t.future is not None and not t.future.done():
            t.future.set_exception(error)
