"""The upper-case messages: matched by tag and source in any order, with receives of any sufficient length.

`Send` and `Rsend` return once the buffer may be modified, for a small message before the receive is posted. `Ssend` waits until
the message is matched; `Bsend` does not wait at all. PROC_NULL, ANY_TAG and ANY_SOURCE are as in MPI.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from xvcomm.adapters.mpi.buffers import Array, carried, placed, vector
from xvcomm.adapters.mpi.matching import Matcher
from xvcomm.adapters.mpi.messages import ANY_SOURCE, ANY_TAG, Arrived, Envelope, Receive, Room, scratch
from xvcomm.adapters.mpi.part import Part
from xvcomm.adapters.mpi.progress import wait_until
from xvcomm.adapters.mpi.requests import Both, Done, Fetching, Prequest, Receiving, Request, Sending, Started
from xvcomm.adapters.mpi.status import Status
from xvcomm.errors import ArgumentError, ArrayError, DTypeError, PeerLost, XvcommError
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8

PROC_NULL = -2
"""The null rank: sends to it and receives from it complete at once without data."""

NOTHING = Envelope(PROC_NULL, ANY_TAG, 0, 0, UINT8)
"""Envelope of a receive from PROC_NULL."""

NO_MESSAGE = Arrived(NOTHING, np.empty(0, np.uint8), None)


def unpickled(receive: Receive) -> Any:
    """The object of a message; None for an empty message."""
    assert receive.data is not None
    return pickle.loads(receive.data.tobytes()) if receive.data.size else None


def outgoing(buf: Any) -> Array:
    """The elements of a buffer, as a vector; a packed copy for a derived datatype."""
    found = placed(buf)
    return vector(buf) if found is None else found.packed()


class Target:
    """A buffer to receive into; returns the vector for a message.

    Attributes:
        read: called when the message has arrived, if it must then be unpacked; else None.
    """

    def __init__(self, buf: Any) -> None:
        found = placed(buf)
        x = vector(buf) if found is None else found.memory
        if not x.flags.writeable:
            raise ArrayError("the buffer to receive into is read-only; pass a writable one")
        self._placed = found
        self._room = x if found is None else np.empty(found.layout.size, x.dtype)
        self._memory, self._dtype = self._room.view(np.uint8), x.dtype
        self.read: Callable[[Receive], None] | None = None if found is None else self._unpack

    def _unpack(self, receive: Receive) -> None:
        assert self._placed is not None and receive.envelope is not None
        self._placed.unpack(self._room[: receive.envelope.nbytes // self._dtype.itemsize])

    def __call__(self, envelope: Envelope) -> Array:
        """See `messages.Room`.

        Raises:
            ArrayError: the message is longer than the buffer; it is lost.
            DTypeError: it has elements of another type; it is lost.
        """
        if envelope.nbytes > self._memory.size:
            raise ArrayError(
                f"rank {envelope.source} sent {envelope.nbytes // envelope.dtype.itemsize} x {envelope.dtype}, tag "
                f"{envelope.tag}, more than the buffer's {self._memory.size} bytes, "
                f"{self._memory.size // self._dtype.itemsize} x {self._dtype}; the message is lost"
            )
        if envelope.dtype is not UINT8 and self._dtype != np.uint8 and self._dtype != envelope.dtype.numpy:
            raise DTypeError(
                f"rank {envelope.source} sent {envelope.dtype}, tag {envelope.tag}, but the buffer has {self._dtype}; "
                "both must be equal, or one of them bytes; the message is lost"
            )
        return self._memory[: envelope.nbytes].view(envelope.dtype.numpy)


class Message:
    """A message that `Mprobe` has taken from the queue; null once it was received, unless it is a constant."""

    def __init__(self, arrived: Arrived | None = None, *, constant: bool = False) -> None:
        self._arrived, self._constant = arrived, constant

    def __bool__(self) -> bool:
        return self._arrived is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._arrived is other._arrived

    __hash__ = None  # type: ignore[assignment]  # it changes

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive the message."""
        self.Irecv(buf).Wait(status)

    def Irecv(self, buf: Any) -> Request:
        """Start a `Recv`."""
        if self._arrived is NO_MESSAGE:
            return Request(self._fetched(None))
        target = Target(buf)
        return Request(self._fetched(target, target.read))

    def recv(self, status: Status | None = None) -> Any:
        """Receive the message as an object."""
        return self.irecv().wait(status)

    def irecv(self) -> Request:
        """Start a `recv`."""
        return Request(self._fetched(scratch, unpickled))

    @classmethod
    def Probe(
        cls, comm: PointToPoint, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        """See `PointToPoint.Mprobe`."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(
        cls, comm: PointToPoint, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """See `PointToPoint.Improbe`."""
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def _fetched(self, room: Room | None, read: Callable[[Receive], Any] | None = None) -> Started:
        arrived = self._arrived
        if not self._constant:
            self._arrived = None
        if arrived is None:
            raise ArgumentError("this message has already been received, or is MESSAGE_NULL")
        if arrived is NO_MESSAGE or room is None:
            return Done(NOTHING)
        receive = Receive(arrived.envelope.source, arrived.envelope.tag, room)
        receive.copy(arrived)
        return Fetching(receive, read)


class PointToPoint:
    """Part of Comm."""

    _part: Part

    @property
    def _matcher(self) -> Matcher:
        return self._part.matcher

    def _sending(self, buf: Any, dest: int, tag: int, *, copy: bool = False, synchronous: bool = False) -> Started:
        if dest == PROC_NULL:
            return Done()
        x = carried(outgoing(buf))
        send = self._matcher.send(x.copy() if copy else x, dest, tag, synchronous=synchronous)
        if send is not None and not copy:
            return Sending(send)
        if send is not None:
            self._matcher.look_after(send)
        return Done()

    def _receiving(self, buf: Any, source: int, tag: int, *, waits: bool = False) -> Started:
        if source == PROC_NULL:
            return Done(NOTHING)
        target = Target(buf)
        return Receiving(self._matcher, self._matcher.post(source, tag, target, waits=waits), target.read)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; blocks until it may be modified."""
        self._sending(buf, dest, tag).finish()

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start a send; the buffer must not be modified until the request is complete."""
        return Request(self._sending(buf, dest, tag))

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy without waiting for the receiver, whatever the length."""
        self._sending(buf, dest, tag, copy=True).finish()

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Like `Bsend`; the request is complete at once."""
        return Request(self._sending(buf, dest, tag, copy=True))

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; blocks until the message is matched by a receive."""
        self._sending(buf, dest, tag, synchronous=True).finish()

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Start an `Ssend`."""
        return Request(self._sending(buf, dest, tag, synchronous=True))

    Rsend, Irsend = Send, Isend

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive a message of at most the buffer's length; blocks until it has arrived.

        Raises:
            ArrayError, DTypeError: the message does not fit the buffer, and is lost.
            DeadlineExceeded: none arrived within the communicator's timeout; names the ranks that sent nothing.
        """
        Request(self._receiving(buf, source, tag, waits=True)).Wait(status)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Start a receive. It progresses while this process waits for, or tests, any operation."""
        return Request(self._receiving(buf, source, tag))

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send and receive concurrently."""
        self.Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag).Wait(status)

    def Isendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:  # fmt: skip
        """Start a `Sendrecv`."""
        receive = self._receiving(recvbuf, source, recvtag)
        try:
            return Request(Both(self._sending(sendbuf, dest, sendtag), receive))
        except XvcommError:
            receive.cancel()
            raise

    def Sendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG,
        status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send a buffer and receive into the same buffer."""
        self.Isendrecv_replace(buf, dest, sendtag, source, recvtag).Wait(status)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """Start a `Sendrecv_replace`."""
        copy = None if dest == PROC_NULL else outgoing(buf).copy()
        return self.Isendrecv(copy, dest, sendtag, buf, source, recvtag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Create a persistent `Send`."""
        return Prequest(lambda: self._sending(buf, dest, tag))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Create a persistent `Bsend`."""
        return Prequest(lambda: self._sending(buf, dest, tag, copy=True))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """Create a persistent `Ssend`."""
        return Prequest(lambda: self._sending(buf, dest, tag, synchronous=True))

    Rsend_init = Send_init

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """Create a persistent `Recv`."""
        return Prequest(lambda: self._receiving(buf, source, tag))

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether a message is available that `Recv` would get; it remains in the queue. Never blocks.

        With ANY_SOURCE, returns False once all other ranks have freed the communicator.
        """
        try:
            return self._seen(source, tag, status)
        except PeerLost:
            if source == ANY_SOURCE and self._matcher.intact:
                return False
            raise

    def _seen(self, source: int, tag: int, status: Status | None) -> bool:
        envelope = NOTHING if source == PROC_NULL else self._matcher.look(source, tag)
        if envelope is not None and status is not None:
            status.tell(envelope)
        return envelope is not None

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Block until a message is available that `Recv` would get; it remains in the queue. Returns True.

        Raises:
            DeadlineExceeded: none arrived within the communicator's timeout.
        """
        return bool(self._awaited(lambda: self._seen(source, tag, status), source, tag))

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """Take an available message from the queue; None if there is none, as in `Iprobe`. Never blocks."""
        try:
            return self._taken(source, tag, status)
        except PeerLost:
            if source == ANY_SOURCE and self._matcher.intact:
                return None
            raise

    def _taken(self, source: int, tag: int, status: Status | None) -> Message | None:
        arrived = NO_MESSAGE if source == PROC_NULL else self._matcher.take(source, tag)
        if arrived is not None and status is not None:
            status.tell(arrived.envelope)
        return None if arrived is None else Message(arrived)

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Like `Improbe`, but blocks until there is a message."""
        message: Message = self._awaited(lambda: self._taken(source, tag, status), source, tag)
        return message

    def _awaited(self, look: Callable[[], Any], source: int, tag: int) -> Any:
        """Block until `look` returns a true value."""
        found: list[Any] = []

        def done() -> bool:
            found[:] = [look()]
            return bool(found[0])

        wait_until(done, Deadline.after(self._matcher.timeout), lambda: self._matcher.expire(source, tag))
        return found[0]
