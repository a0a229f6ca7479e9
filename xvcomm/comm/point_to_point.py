"""Point-to-point operations of a communicator: send, recv, their asynchronous forms, groups, and probes.

Between two ranks messages of one channel match in order; the tag is checked, not searched. Messages of different
channels (0 to 31) do not order each other. A send returns once its data is in the ring or the receiver's array, a small
one therefore before the receiver comes. Messages of a rank to itself are for `group` and `sendrecv`, and are copied.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xvcomm.engine.inflight.work import Work
from xvcomm.engine.messages import HostTransfers, Transfer, Transfers
from xvcomm.engine.probe import Probe, Probing
from xvcomm.engine.session.rings import CHANNELS as CHANNELS  # adapters divide tags among them
from xvcomm.engine.stream_messages import StreamTransfers
from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.memory import array
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.operation import ANY_PEER
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

if TYPE_CHECKING:
    from xvcomm.engine.context import Context

_SEND, _RECV = OpCode.SEND, OpCode.RECV
_TAGS = 1 << 62
_FIRST = 0  # the one object of this number: nothing else, such as False, is taken for it, and to look takes no time
_INSIDE_ADD = 2  # functions of xvcomm that are under way at the least when a group asks for the call site


@dataclass(slots=True)
class _Group:
    """What a thread has called inside `group()`; `waits` if any of it blocks."""

    transfers: list[Transfer] = field(default_factory=list)
    waits: bool = False

    def add(self, transfer: Transfer, *, waits: bool = False) -> None:
        """Note a call with its call site, which nobody can find at the group's end."""
        transfer.call_site = find_call_site(_INSIDE_ADD)
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
        self._probing = Probing(self._context)
        self._groups: dict[int, _Group] = {}

    def send(
        self, x: Any, dst: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None, stream: Any = None
    ) -> None:
        """Send an array to rank `dst`; blocks until `x` may be changed."""
        transfer = self._sending(x, dst, tag, channel, timeout, stream)
        group = self._open_group() if self._groups else None
        if group is None:
            self._transfers.run_alone(transfer)
        else:
            group.add(transfer, waits=True)

    def recv(
        self, buf: Any, src: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None, stream: Any = None
    ) -> Any:
        """Receive an array from rank `src`; blocks until it is there.

        Args:
            buf: where to, of the shape and dtype that are sent; for immutable arrays what tells them.

        Returns:
            `buf`, or a new array where it is immutable.
        """
        transfer = self._receiving(buf, src, tag, channel, timeout, stream)
        group = self._open_group() if self._groups else None
        if group is None:
            self._transfers.run_alone(transfer)
            return array.finish(transfer.view)
        if transfer.view.immutable:
            raise ArrayError(
                "recv of an immutable array inside group() cannot return it yet; use irecv and its result()"
            )
        group.add(transfer, waits=True)
        return buf

    def isend(
        self, x: Any, dst: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None, stream: Any = None
    ) -> Work:
        """Send without waiting. `x` may be changed once the Work is done; the Work keeps it alive."""
        return self._background(self._sending(x, dst, tag, channel, timeout, stream))

    def irecv(
        self, buf: Any, src: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None, stream: Any = None
    ) -> Work:
        """Receive without waiting; the array is the Work's result."""
        return self._background(self._receiving(buf, src, tag, channel, timeout, stream))

    def sendrecv(
        self, x: Any, dst: int, buf: Any, src: int, send_tag: int = 0, recv_tag: int = 0, *,
        channel: int = 0, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Send to one rank and receive from another (or the same) at once; gives the received array."""
        incoming = self._receiving(buf, src, recv_tag, channel, timeout, stream, own=True)
        transfers = [self._sending(x, dst, send_tag, channel, timeout, stream, own=True), incoming]
        if dst == self.rank or src == self.rank:
            self._go(transfers, waits=True)
        else:
            self._transfers.run(transfers)
        return array.finish(incoming.view)

    def probe(self, src: int | None = None, *, channel: int = 0, timeout: float | None = None) -> Probe:
        """Wait until a message is there that no receive posted so far will take; a following `recv` gets it.

        Blocks the host, also on GPUs. Takes nothing away. Messages that receives in a graph will take are seen as
        long as it has not run.

        Args:
            src: rank to look at; None looks at all in turns, so that none starves another.
        """
        peer, channel = self._probed(src, channel)
        return self._probing.wait(peer, channel, Deadline.after(self.timeout if timeout is None else timeout))

    def iprobe(self, src: int | None = None, *, channel: int = 0) -> Probe | None:
        """As `probe`, but does not wait: None if there is no such message yet.

        Raises:
            PeerLost: as long as there is none and `src`, or every other rank, has left.
        """
        peer, channel = self._probed(src, channel)
        return self._probing.look(peer, channel, Deadline.after(self.timeout))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start all point-to-point operations of the block together at its end, in any order without deadlock.

        The end blocks until all are done if the block holds a `send` or `recv`; `isend` and `irecv` go on behind it, and
        those of a channel end together.

        What this rank sends to itself and receives from itself is copied at the end, on the arrays' stream; on each channel
        in order.
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
        self._go(group.transfers, waits=group.waits)

    def _go(self, transfers: list[Transfer], *, waits: bool) -> None:
        """Start messages together, and wait for them if told so."""
        own = [t for t in transfers if t.peer == self.rank]
        if own:
            try:
                self._transfers.copy(_paired(own), waits=waits)
            except BaseException as error:
                self._transfers.give_up(transfers, error)
                raise
            transfers = [t for t in transfers if t.peer != self.rank]
            if not transfers:
                return
        if waits:
            self._transfers.run(transfers)
        else:
            self._transfers.start_group(transfers)

    def _open_group(self) -> _Group | None:
        return self._groups.get(threading.get_ident())

    def _sending(
        self, x: Any, dst: int, tag: int, channel: int, timeout: float | None, stream: Any, own: bool = False
    ) -> Transfer:
        """A message to be sent; `own` if it may be this rank's to itself."""
        if not 0 <= dst < self.size or (dst == self.rank and not own) or not 0 <= tag < _TAGS:
            self._check_direction("dst", dst, tag)
        if channel is not _FIRST:
            channel = _channel(channel)
        view = array.view(x)
        self._context.admit(view)
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        handle = view.stream if stream is None else array.stream_handle(stream)
        return Transfer(_SEND, view, dst, tag, deadline, handle, channel)

    def _receiving(
        self, buf: Any, src: int, tag: int, channel: int, timeout: float | None, stream: Any, own: bool = False
    ) -> Transfer:
        """The same of one to be received."""
        if not 0 <= src < self.size or (src == self.rank and not own) or not 0 <= tag < _TAGS:
            self._check_direction("src", src, tag)
        if channel is not _FIRST:
            channel = _channel(channel)
        view = array.view(buf, output=True)
        self._context.admit(view)
        if view.immutable:
            view = array.empty_like(view, view.shape, self._context.device.empty)
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        handle = view.stream if stream is None else array.stream_handle(stream)
        return Transfer(_RECV, view, src, tag, deadline, handle, channel)

    def _probed(self, src: int | None, channel: int) -> tuple[int, int]:
        """What to look at, checked."""
        if src is None and self.size == 1:
            raise ArgumentError("probe: this communicator has no other rank that could send")
        peer = ANY_PEER
        if src is not None:
            peer = _whole(src, -1)
            if not 0 <= peer < self.size:
                raise ArgumentError(
                    f"src {src!r}: ranks of this communicator go from 0 to {self.size - 1}; None for any"
                )
            if peer == self.rank:
                raise ArgumentError(
                    f"src {src} is this rank itself, whose messages to itself go from call to call in group()"
                )
        if self._groups and self._open_group() is not None:
            raise ArgumentError(
                "probe inside group(): what the group holds starts at its end; probe before or behind it"
            )
        channel = _channel(channel)
        self._transfers.settle(range(self.size) if peer == ANY_PEER else (peer,), channel)
        return peer, channel

    def _check_direction(self, what: str, peer: int, tag: int) -> None:
        """Raise ArgumentError for what goes nowhere; messages to oneself may stand in a group."""
        if not 0 <= peer < self.size:
            raise ArgumentError(f"{what} {peer}: ranks of this communicator go from 0 to {self.size - 1}")
        if not 0 <= tag < _TAGS:
            raise ArgumentError(f"tag {tag}: must be a whole number from 0 to {_TAGS - 1}")
        if self._open_group() is None:
            raise ArgumentError(
                f"{what} {peer} is this rank itself, which would wait for itself; send and receive inside one group(), use "
                "sendrecv, or copy the array"
            )

    def _background(self, transfer: Transfer) -> Work:
        group = self._open_group() if self._groups else None
        if group is None:
            return self._transfers.start_alone(transfer)
        group.add(transfer)
        return self._transfers.work(transfer)


def _paired(own: list[Transfer]) -> list[tuple[Transfer, Transfer]]:
    """Sends of this rank to itself and their receives, of each channel in order.

    Raises:
        ArgumentError: they do not match; none of them has begun.
    """
    pairs = []
    for channel in sorted({t.channel for t in own}):
        sends = [t for t in own if t.channel == channel and t.name is _SEND]
        receives = [t for t in own if t.channel == channel and t.name is not _SEND]
        if len(sends) != len(receives):
            raise ArgumentError(
                f"{len(sends)} messages are sent to this rank itself on channel {channel} and {len(receives)} received; put "
                "both ends of each into one group(), or sendrecv"
            )
        for sent, received in zip(sends, receives, strict=True):
            if sent.message() != received.message():
                raise ArgumentError(
                    f"this rank sends {_told(sent)} to itself and receives {_told(received)}; both must be the same"
                )
            pairs.append((sent, received))
    return pairs


def _told(t: Transfer) -> str:
    return f"{t.view.count} x {t.view.dtype} with tag {t.tag}"


def _channel(channel: Any) -> int:
    """A channel as a plain integer."""
    number = _whole(channel, -1)
    if not 0 <= number < CHANNELS:
        raise ArgumentError(f"channel {channel!r}: must be a whole number from 0 to {CHANNELS - 1}")
    return number


def _whole(value: Any, otherwise: int) -> int:
    """A whole number as a plain integer; something else for what is none, truth values among it."""
    try:
        return otherwise if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return otherwise
