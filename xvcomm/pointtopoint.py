"""Point-to-point operations of a communicator: send, recv, their asynchronous forms, and groups.

Between two ranks messages match in order; the tag is checked, not searched. A send returns once its data is in the
ring, a small one therefore before the receiver comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xvcomm import array
from xvcomm.abc.device import Stream
from xvcomm.array import ArrayView
from xvcomm.deadline import NEVER, Deadline
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.links import Use
from xvcomm.opcode import OpCode
from xvcomm.ring import Message
from xvcomm.trace import State
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context, Operation


_SEND = int(OpCode.SEND)


@dataclass(slots=True)
class _Transfer:
    """One message that this rank sends or receives."""

    name: OpCode
    view: ArrayView
    peer: int
    tag: int
    deadline: Deadline
    future: Future[Any] = field(default_factory=Future)
    operation: Operation | None = None


class PointToPoint:
    """Part of Communicator; see there for what all operations have in common."""

    _context: Context
    rank: int
    size: int
    timeout: float
    _deadline: Callable[[float | None], Deadline]

    def _init_point_to_point(self) -> None:
        self._p2p_stream = self._context.device.streams(1)[0]
        self._group: list[_Transfer] | None = None
        self._group_waits = False

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an array to rank `dst`; blocks until `x` may be changed."""
        transfer = self._sending(x, dst, tag, timeout)
        if self._group is None:
            self._run_now([transfer])
        else:
            self._group_waits = True
            self._group.append(transfer)

    def recv(self, buf: Any, src: int, tag: int = 0, *, timeout: float | None = None) -> Any:
        """Receive an array from rank `src`; blocks until it is there.

        Args:
            buf: where to, of the shape and dtype that are sent; for immutable arrays what tells them.

        Returns:
            `buf`, or a new array where it is immutable.
        """
        transfer = self._receiving(buf, src, tag, timeout)
        if self._group is None:
            self._run_now([transfer])
            return array.finish(transfer.view)
        if transfer.view.immutable:
            raise ArrayError("recv of an immutable array inside group() cannot return it yet; use irecv and its result()")
        self._group_waits = True
        self._group.append(transfer)
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
        if self._group is not None:
            yield  # the outermost group counts, as in NCCL
            return
        self._group, self._group_waits = [], False
        try:
            yield
            transfers, self._group = self._group, None
            if self._group_waits:
                self._run_now(transfers)
            elif transfers:
                self._start(transfers)
        finally:
            self._group = None

    def _sending(self, x: Any, dst: int, tag: int, timeout: float | None) -> _Transfer:
        self._check_peer("dst", dst, tag)
        return _Transfer(OpCode.SEND, array.view(x), dst, tag, self._deadline(timeout))

    def _receiving(self, buf: Any, src: int, tag: int, timeout: float | None) -> _Transfer:
        self._check_peer("src", src, tag)
        view = array.view(buf, output=True)
        if view.immutable:
            view = array.empty_like(view, view.shape)
        return _Transfer(OpCode.RECV, view, src, tag, self._deadline(timeout))

    def _check_peer(self, what: str, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size:
            raise ArgumentError(f"{what} {peer}: ranks of this communicator go from 0 to {self.size - 1}")
        if peer == self.rank:
            raise ArgumentError(f"{what} {peer} is this rank itself; copy the array instead")
        if not 0 <= tag < 1 << 62:
            raise ArgumentError(f"tag {tag}: must be a whole number from 0 on")

    def _background(self, transfer: _Transfer) -> Work:
        if self._group is not None:
            self._group.append(transfer)
        else:
            self._start([transfer])
        return Work(transfer.future, f"{transfer.name} with rank {transfer.peer}")

    def _enqueue(self, transfers: list[_Transfer], stream: Stream) -> bool:
        """Put transfers on a stream; whether an earlier one of the same ring still moves in the background."""
        context, busy = self._context, False
        stream.deadline = min((t.deadline for t in transfers), key=lambda d: d.at, default=NEVER)
        for t in transfers:
            message = Message(_SEND, t.view.dtype.code, t.view.nbytes, t.tag)
            t.operation = context.begin(t.name, message, t.peer)
            sending = t.name is OpCode.SEND
            end = context.links.end(t.peer, Use.POINT_TO_POINT, t.deadline, producer=sending)
            move = context.device.put if sending else context.device.get
            move(end, t.view.address, message, stream)
            busy = busy or end.background > 0
        return busy

    def _run_now(self, transfers: list[_Transfer]) -> None:
        context = self._context
        with context.lock:
            try:
                if self._enqueue(transfers, self._p2p_stream):
                    pending = self._p2p_stream.flush()
                else:
                    pending = None
                    self._p2p_stream.synchronize()
            except BaseException as error:
                self._fail(transfers, error)
        if pending is not None:
            try:
                pending.result()
            except BaseException as error:
                self._fail(transfers, error)
        self._complete(transfers)

    def _start(self, transfers: list[_Transfer]) -> None:
        context = self._context
        with context.lock:
            try:
                self._enqueue(transfers, self._p2p_stream)
                pending = self._p2p_stream.flush()
            except BaseException as error:
                self._fail(transfers, error)
        pending.add_done_callback(lambda done: self._end(transfers, done.exception()))

    def _end(self, transfers: list[_Transfer], error: BaseException | None) -> None:
        if error is None:
            self._complete(transfers)
            return
        with contextlib.suppress(BaseException):
            self._fail(transfers, error)

    def _complete(self, transfers: list[_Transfer]) -> None:
        for t in transfers:
            if t.operation is not None:
                self._context.session.recorder.end(t.operation.record)
            t.future.set_result(array.finish(t.view))

    def _fail(self, transfers: list[_Transfer], error: BaseException) -> None:
        """Raise the user's error; the Works get the same."""
        self._p2p_stream.discard()
        begun = [t.operation for t in transfers if t.operation is not None]
        if begun:
            raised = self._context.translate(error, begun[0])
            for operation in begun[1:]:
                self._context.session.recorder.end(operation.record, State.FAILED)
        else:
            raised = error
        for t in transfers:
            t.future.set_exception(raised)
        if raised is error:
            raise error
        raise raised from None
