"""Point-to-point operations of a communicator: send, recv, their asynchronous forms, and groups.

Between two ranks messages match in order; the tag is checked, not searched. A send returns once its data is in the
ring, a small one therefore before the receiver comes.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xvcomm import array
from xvcomm.deadline import Deadline
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.opcode import OpCode
from xvcomm.streamtransfers import StreamTransfers
from xvcomm.trace import call_site
from xvcomm.transfers import HostTransfers, Transfer, Transfers
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context

_SEND, _RECV = OpCode.SEND, OpCode.RECV
_TAGS = 1 << 62
_INSIDE_ADD = 2  # functions of xvcomm that are under way at the least when a group asks for the call site


@dataclass(slots=True)
class _Group:
    """What a thread has called inside `group()`; `waits` if any of it blocks."""

    transfers: list[Transfer] = field(default_factory=list)
    waits: bool = False

    def add(self, transfer: Transfer, *, waits: bool = False) -> None:
        """Note a call with its site, which nobody can find at the group's end."""
        transfer.site = call_site(_INSIDE_ADD)
        self.transfers.append(transfer)
        self.waits = self.waits or waits


class PointToPoint:
    """Part of Communicator; see there for what all operations have in common."""

    _context: Context
    rank: int
    size: int
    timeout: float
    _deadline: Callable[[float | None], Deadline]

    def _init_point_to_point(self) -> None:
        moves = StreamTransfers if self._context.asynchronous else HostTransfers
        self._transfers: Transfers = moves(self._context)
        self._groups: dict[int, _Group] = {}

    def send(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None, stream: Any = None) -> None:
        """Send an array to rank `dst`; blocks until `x` may be changed."""
        transfer = self._sending(x, dst, tag, timeout, stream)
        group = self._open_group() if self._groups else None
        if group is None:
            self._transfers.run_alone(transfer)
        else:
            group.add(transfer, waits=True)

    def recv(self, buf: Any, src: int, tag: int = 0, *, timeout: float | None = None, stream: Any = None) -> Any:
        """Receive an array from rank `src`; blocks until it is there.

        Args:
            buf: where to, of the shape and dtype that are sent; for immutable arrays what tells them.

        Returns:
            `buf`, or a new array where it is immutable.
        """
        transfer = self._receiving(buf, src, tag, timeout, stream)
        group = self._open_group() if self._groups else None
        if group is None:
            self._transfers.run_alone(transfer)
            return array.finish(transfer.view)
        if transfer.view.immutable:
            raise ArrayError("recv of an immutable array inside group() cannot return it yet; use irecv and its result()")
        group.add(transfer, waits=True)
        return buf

    def isend(self, x: Any, dst: int, tag: int = 0, *, timeout: float | None = None, stream: Any = None) -> Work:
        """Send without waiting. `x` may be changed once the Work is done; the Work keeps it alive."""
        return self._background(self._sending(x, dst, tag, timeout, stream))

    def irecv(self, buf: Any, src: int, tag: int = 0, *, timeout: float | None = None, stream: Any = None) -> Work:
        """Receive without waiting; the array is the Work's result."""
        return self._background(self._receiving(buf, src, tag, timeout, stream))

    def sendrecv(
        self, x: Any, dst: int, buf: Any, src: int, send_tag: int = 0, recv_tag: int = 0, *,
        timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Send to one rank and receive from another (or the same) at once; gives the received array."""
        incoming = self._receiving(buf, src, recv_tag, timeout, stream)
        self._transfers.run([self._sending(x, dst, send_tag, timeout, stream), incoming])
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
            self._transfers.give_up(group.transfers, error)  # who waits for one must not wait for ever
            raise
        finally:
            del self._groups[thread]
        if group.waits:
            self._transfers.run(group.transfers)
        elif group.transfers:
            self._transfers.start(group.transfers)

    def _open_group(self) -> _Group | None:
        return self._groups.get(threading.get_ident())

    def _sending(self, x: Any, dst: int, tag: int, timeout: float | None, stream: Any) -> Transfer:
        if not 0 <= dst < self.size or dst == self.rank or not 0 <= tag < _TAGS:
            raise self._misdirected("dst", dst, tag)
        view = array.view(x)
        self._context.admit(view)
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        return Transfer(_SEND, view, dst, tag, deadline, view.stream if stream is None else array.stream_handle(stream))

    def _receiving(self, buf: Any, src: int, tag: int, timeout: float | None, stream: Any) -> Transfer:
        if not 0 <= src < self.size or src == self.rank or not 0 <= tag < _TAGS:
            raise self._misdirected("src", src, tag)
        view = array.view(buf, output=True)
        self._context.admit(view)
        if view.immutable:
            view = array.empty_like(view, view.shape)
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        return Transfer(_RECV, view, src, tag, deadline, view.stream if stream is None else array.stream_handle(stream))

    def _misdirected(self, what: str, peer: int, tag: int) -> ArgumentError:
        if not 0 <= peer < self.size:
            return ArgumentError(f"{what} {peer}: ranks of this communicator go from 0 to {self.size - 1}")
        if peer == self.rank:
            return ArgumentError(f"{what} {peer} is this rank itself; copy the array instead")
        return ArgumentError(f"tag {tag}: must be a whole number from 0 on")

    def _background(self, transfer: Transfer) -> Work:
        work = self._transfers.work(transfer)
        group = self._open_group()
        if group is not None:
            group.add(transfer)
        else:
            self._transfers.start([transfer])
        return work
