"""Point-to-point operations of a communicator: send, recv, their asynchronous forms, groups, and probes.

Between two ranks, messages of one channel match in order; the tag is checked, not searched. Messages of different channels (0
to 31) are not ordered with each other. A send returns once its data is in the ring or the receiver's array, so a small one may
return before the receive is posted. A rank can send to itself in `group` and `sendrecv` only; such messages are copied.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from xvcomm.engine.inflight.work import Work
from xvcomm.engine.messages import Messages
from xvcomm.engine.probe import Probe, Probing
from xvcomm.engine.request import MessageRequest
from xvcomm.engine.session.rings import CHANNELS as CHANNELS  # adapters assign tags to channels
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
_FIRST = 0  # compared by identity, which is fast, and excludes False
_INSIDE_ADD = 2  # minimum depth of xvcomm's own frames when a group looks up the call site


@dataclass(slots=True)
class _Group:
    """Operations that a thread has called inside `group()`; `waits` if any of them blocks."""

    transfers: list[MessageRequest] = field(default_factory=list)
    waits: bool = False

    def add(self, transfer: MessageRequest, *, waits: bool = False) -> None:
        """Add an operation with its call site, which cannot be determined at the end of the group."""
        transfer.call_site = find_call_site(_INSIDE_ADD)
        self.transfers.append(transfer)
        self.waits = self.waits or waits


class PointToPoint:
    """Part of Communicator; see there for the common arguments and errors.

    Attributes:
        messages: moves what `message_request` gives; for adapters that call from threads of their own.
    """

    _context: Context
    messages: Messages
    rank: int
    size: int
    timeout: float
    _deadline: Callable[[float | None], Deadline]

    def _init_point_to_point(self) -> None:
        self._probing = Probing(self._context)
        self._groups: dict[int, _Group] = {}

    def send(
        self, x: Any, dst: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None, stream: Any = None
    ) -> None:
        """Send an array to rank `dst`; blocks until `x` may be modified."""
        transfer = self.message_request(_SEND, x, dst, tag, channel, timeout, stream)
        group = self._open_group() if self._groups else None
        if group is None:
            self.messages.run_alone(transfer)
        else:
            group.add(transfer, waits=True)

    def recv(
        self, buf: Any, src: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None, stream: Any = None
    ) -> Any:
        """Receive an array from rank `src`; blocks until it has arrived.

        Args:
            buf: the array to receive into, with the shape and dtype that are sent; if immutable, it only defines them.
            tag: must equal the sender's.
            channel: 0 to 31.
            timeout, stream: see `Communicator`.

        Returns:
            `buf`, or a new array if `buf` is immutable.
        """
        transfer = self.message_request(_RECV, buf, src, tag, channel, timeout, stream)
        group = self._open_group() if self._groups else None
        if group is None:
            self.messages.run_alone(transfer)
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
        """Start a send. `x` must not be modified until the Work is complete; the Work keeps it alive."""
        return self._background(self.message_request(_SEND, x, dst, tag, channel, timeout, stream))

    def irecv(
        self, buf: Any, src: int, tag: int = 0, *, channel: int = 0, timeout: float | None = None, stream: Any = None
    ) -> Work:
        """Start a receive; the array is the Work's result."""
        return self._background(self.message_request(_RECV, buf, src, tag, channel, timeout, stream))

    def sendrecv(
        self, x: Any, dst: int, buf: Any, src: int, send_tag: int = 0, recv_tag: int = 0, *,
        channel: int = 0, timeout: float | None = None, stream: Any = None,
    ) -> Any:  # fmt: skip
        """Send to one rank and receive from another (or the same) concurrently; returns the received array."""
        incoming = self.message_request(_RECV, buf, src, recv_tag, channel, timeout, stream, own=True)
        transfers = [self.message_request(_SEND, x, dst, send_tag, channel, timeout, stream, own=True), incoming]
        if dst == self.rank or src == self.rank:
            self._go(transfers, waits=True)
        else:
            self.messages.run(transfers)
        return array.finish(incoming.view)

    def probe(self, src: int | None = None, *, channel: int = 0, timeout: float | None = None) -> Probe:
        """Wait for a message that no receive posted so far will take; the next `recv` gets it.

        Blocks the host, also on GPUs. The message stays in the queue. Messages for receives of a captured graph are reported
        until the graph has run.

        Args:
            src: rank that sends; None means any rank, in round-robin order.
            channel: 0 to 31.
            timeout: in seconds.
        """
        peer, channel = self._probed(src, channel)
        return self._probing.wait(peer, channel, Deadline.after(self.timeout if timeout is None else timeout))

    def iprobe(self, src: int | None = None, *, channel: int = 0) -> Probe | None:
        """Like `probe` without waiting: None if there is no such message yet.

        Raises:
            PeerLost: there is none, and `src`, or every other rank, has left.
        """
        peer, channel = self._probed(src, channel)
        return self._probing.look(peer, channel, Deadline.after(self.timeout))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Start all point-to-point operations of the block together at its end, in any order without deadlock.

        If the block contains a `send` or `recv`, its end blocks until all operations are complete; otherwise `isend` and
        `irecv` continue in the background, and those of one channel complete together.

        Messages of this rank to itself are copied at the end, on the arrays' stream, in order per channel.
        """
        if self._open_group() is not None:
            yield  # as in NCCL, only the outermost group counts
            return
        thread = threading.get_ident()
        group = self._groups[thread] = _Group()
        try:
            yield
        except BaseException as error:
            # fails their Works, so that threads that wait for them return
            self.messages.give_up(group.transfers, error)
            raise
        finally:
            del self._groups[thread]
        self._go(group.transfers, waits=group.waits)

    def _go(self, transfers: list[MessageRequest], *, waits: bool) -> None:
        """Start messages together, and wait for them if `waits`."""
        own = [t for t in transfers if t.peer == self.rank]
        if own:
            try:
                self.messages.copy(_paired(own), waits=waits)
            except BaseException as error:
                self.messages.give_up(transfers, error)
                raise
            transfers = [t for t in transfers if t.peer != self.rank]
            if not transfers:
                return
        if waits:
            self.messages.run(transfers)
        else:
            self.messages.start_group(transfers)

    def _open_group(self) -> _Group | None:
        return self._groups.get(threading.get_ident())

    def message_request(
        self, name: OpCode, x: Any, peer: int, tag: int, channel: int, timeout: float | None, stream: Any,
        own: bool = False,
    ) -> MessageRequest:  # fmt: skip
        """A message to SEND or RECV, for `messages`; `own` if `peer` may be this rank itself. Raises ArgumentError."""
        if not 0 <= peer < self.size or (peer == self.rank and not own) or not 0 <= tag < _TAGS:
            self._check_direction("dst" if name is _SEND else "src", peer, tag)
        if channel is not _FIRST:
            channel = _channel(channel)
        received = name is _RECV
        view = array.view(x, output=received)
        self._context.admit(view)
        if received and view.immutable:
            view = array.empty_like(view, view.shape, self._context.device.empty)
        deadline = Deadline.after(self.timeout if timeout is None else timeout)
        handle = view.stream if stream is None else array.stream_handle(stream)
        return MessageRequest(name, view, peer, tag, deadline, handle, channel)

    def _probed(self, src: int | None, channel: int) -> tuple[int, int]:
        """Check the arguments of a probe."""
        if src is None and self.size == 1:
            raise ArgumentError("probe: this communicator has no other rank")
        peer = ANY_PEER
        if src is not None:
            peer = _whole(src, -1)
            if not 0 <= peer < self.size:
                raise ArgumentError(
                    f"src {src!r}: ranks of this communicator go from 0 to {self.size - 1}; None for any"
                )
            if peer == self.rank:
                raise ArgumentError(f"src {src} is this rank itself; a rank sends to itself only within one group()")
        if self._groups and self._open_group() is not None:
            raise ArgumentError(
                "probe inside group(): the operations of a group start at its end; probe before or after it"
            )
        channel = _channel(channel)
        self.messages.settle(range(self.size) if peer == ANY_PEER else (peer,), channel)
        return peer, channel

    def _check_direction(self, what: str, peer: int, tag: int) -> None:
        """Raise ArgumentError for an invalid peer or tag; messages to oneself are valid in a group."""
        if not 0 <= peer < self.size:
            raise ArgumentError(f"{what} {peer}: ranks of this communicator go from 0 to {self.size - 1}")
        if not 0 <= tag < _TAGS:
            raise ArgumentError(f"tag {tag}: must be an integer from 0 to {_TAGS - 1}")
        if self._open_group() is None:
            raise ArgumentError(
                f"{what} {peer} is this rank itself, which would deadlock; send and receive inside one group(), use "
                "sendrecv, or copy the array"
            )

    def _background(self, transfer: MessageRequest) -> Work:
        group = self._open_group() if self._groups else None
        if group is None:
            return self.messages.start_alone(transfer)
        group.add(transfer)
        return self.messages.work(transfer)


def _paired(own: list[MessageRequest]) -> list[tuple[MessageRequest, MessageRequest]]:
    """Pair the sends of this rank to itself with their receives, in order per channel.

    Raises:
        ArgumentError: they do not match; none of them has begun.
    """
    pairs = []
    for channel in sorted({t.channel for t in own}):
        sends = [t for t in own if t.channel == channel and t.name is _SEND]
        receives = [t for t in own if t.channel == channel and t.name is not _SEND]
        if len(sends) != len(receives):
            raise ArgumentError(
                f"this rank sends {len(sends)} messages to itself on channel {channel} and receives {len(receives)}; put "
                "both ends of each into one group(), or use sendrecv"
            )
        for sent, received in zip(sends, receives, strict=True):
            if sent.message() != received.message():
                raise ArgumentError(
                    f"this rank sends {_told(sent)} to itself and receives {_told(received)}; both must be equal"
                )
            pairs.append((sent, received))
    return pairs


def _told(t: MessageRequest) -> str:
    return f"{t.view.count} x {t.view.dtype} with tag {t.tag}"


def _channel(channel: Any) -> int:
    """A channel number as a plain integer."""
    number = _whole(channel, -1)
    if not 0 <= number < CHANNELS:
        raise ArgumentError(f"channel {channel!r}: must be an integer from 0 to {CHANNELS - 1}")
    return number


def _whole(value: Any, otherwise: int) -> int:
    """An integer as a plain int; `otherwise` for other types and bools."""
    try:
        return otherwise if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return otherwise
