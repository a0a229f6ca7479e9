"""The upper-case messages: any tag in any order, from a rank or from any, of any length that fits.

`Send` returns once its data is on the way, a small one before the receiver comes, and so does `Rsend`. `Ssend` waits until
it is being received, `Bsend` for nothing. Ranks PROC_NULL, tags ANY_TAG and sources ANY_SOURCE are as in MPI.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from xvcomm.adapters.mpi.buffers import Array, carried, placed, vector
from xvcomm.adapters.mpi.matching import Matcher, wait_until
from xvcomm.adapters.mpi.messages import ANY_SOURCE, ANY_TAG, Arrived, Envelope, Receive, Room, scratch
from xvcomm.adapters.mpi.part import Part
from xvcomm.adapters.mpi.requests import Both, Done, Fetching, Prequest, Receiving, Request, Sending, Started
from xvcomm.adapters.mpi.status import Status
from xvcomm.errors import ArgumentError, ArrayError, DTypeError, PeerLost, XvcommError
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8

PROC_NULL = -2
"""The rank that takes everything and sends nothing."""

NOTHING = Envelope(PROC_NULL, ANY_TAG, 0, 0, UINT8)
"""What is received from PROC_NULL."""

NO_MESSAGE = Arrived(NOTHING, np.empty(0, np.uint8), None)


def pickled(obj: Any) -> Array:
    """An object as bytes."""
    return np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), np.uint8)


def unpickled(receive: Receive) -> Any:
    """The object of a message; None of an empty one."""
    assert receive.data is not None
    return pickle.loads(receive.data.tobytes()) if receive.data.size else None


def outgoing(buf: Any) -> Array:
    """The elements of a buffer, as a vector; a copy of those that a derived datatype means."""
    found = placed(buf)
    return vector(buf) if found is None else found.packed()


class Target:
    """A buffer to receive into; gives the vector that a message goes to.

    Attributes:
        read: what to call when the message is there, if it must be put in its places then.
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
        """See `matching.Room`.

        Raises:
            ArrayError: the message is longer than the buffer; it is lost.
            DTypeError: it has elements of another type; likewise.
        """
        if envelope.nbytes > self._memory.size:
            raise ArrayError(
                f"rank {envelope.source} sent {envelope.nbytes // envelope.dtype.itemsize} x {envelope.dtype}, tag "
                f"{envelope.tag}, more than the buffer's {self._memory.size} bytes, "
                f"{self._memory.size // self._dtype.itemsize} x {self._dtype}; the message is lost"
            )
        if envelope.dtype is not UINT8 and self._dtype != np.uint8 and self._dtype != envelope.dtype.numpy:
            raise DTypeError(
                f"rank {envelope.source} sent {envelope.dtype}, tag {envelope.tag}, and the buffer holds {self._dtype}; "
                "both must be the same, or one of bytes; the message is lost"
            )
        return self._memory[: envelope.nbytes].view(envelope.dtype.numpy)


class Message:
    """A message that `Mprobe` has taken out of the others' reach; null once it was received, unless it is a constant."""

    def __init__(self, arrived: Arrived | None = None, *, constant: bool = False) -> None:
        self._arrived, self._constant = arrived, constant

    def __bool__(self) -> bool:
        return self._arrived is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Message) and self._arrived is other._arrived

    __hash__ = None  # type: ignore[assignment]  # it changes

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive it."""
        self.Irecv(buf).Wait(status)

    def Irecv(self, buf: Any) -> Request:
        """`Recv` without waiting."""
        if self._arrived is NO_MESSAGE:
            return Request(self._fetched(None))
        target = Target(buf)
        return Request(self._fetched(target, target.read))

    def recv(self, status: Status | None = None) -> Any:
        """Receive an object."""
        return self.irecv().wait(status)

    def irecv(self) -> Request:
        """`recv` without waiting."""
        return Request(self._fetched(scratch, unpickled))

    @classmethod
    def Probe(
        cls, comm: PointToPoint, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        """`Mprobe` of a communicator."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(
        cls, comm: PointToPoint, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """`Improbe` of a communicator."""
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def _fetched(self, room: Room | None, read: Callable[[Receive], Any] | None = None) -> Started:
        arrived = self._arrived
        if not self._constant:
            self._arrived = None
        if arrived is None:
            raise ArgumentError("this message was received before, or there was none")
        if arrived is NO_MESSAGE or room is None:
            return Done(envelope=NOTHING)
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
            return Done(envelope=NOTHING)
        target = Target(buf)
        return Receiving(self._matcher, self._matcher.post(source, tag, target, waits=waits), target.read)

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; blocks until it may be changed."""
        self._sending(buf, dest, tag).finish()

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """Send without waiting; the buffer may be changed when the request is over."""
        return Request(self._sending(buf, dest, tag))

    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy; does not wait for the receiver, whatever the length."""
        self._sending(buf, dest, tag, copy=True).finish()

    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """`Bsend`, whose request is over at once."""
        return Request(self._sending(buf, dest, tag, copy=True))

    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer; blocks until it is being received."""
        self._sending(buf, dest, tag, synchronous=True).finish()

    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Request:
        """`Ssend` without waiting."""
        return Request(self._sending(buf, dest, tag, synchronous=True))

    Rsend, Irsend = Send, Isend

    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> None:
        """Receive a message of at most the buffer's length; blocks until it is there.

        Raises:
            ArrayError, DTypeError: the message does not fit the buffer, and is lost.
            DeadlineExceeded: none came within the communicator's timeout; names who sent nothing.
        """
        Request(self._receiving(buf, source, tag, waits=True)).Wait(status)

    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Request:
        """Receive without waiting. Messages come in while this process waits, or asks, for anything."""
        return Request(self._receiving(buf, source, tag))

    def Sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG, status: Status | None = None,
    ) -> None:  # fmt: skip
        """Send and receive at once."""
        self.Isendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag).Wait(status)

    def Isendrecv(
        self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Request:  # fmt: skip
        """`Sendrecv` without waiting."""
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
        """Send a buffer and receive into it."""
        self.Isendrecv_replace(buf, dest, sendtag, source, recvtag).Wait(status)

    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Request:
        """`Sendrecv_replace` without waiting."""
        copy = None if dest == PROC_NULL else outgoing(buf).copy()
        return self.Isendrecv(copy, dest, sendtag, buf, source, recvtag)

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """A send to be started as often as wanted."""
        return Prequest(lambda: self._sending(buf, dest, tag))

    def Bsend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """A `Bsend` to be started as often as wanted."""
        return Prequest(lambda: self._sending(buf, dest, tag, copy=True))

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Prequest:
        """An `Ssend` to be started as often as wanted."""
        return Prequest(lambda: self._sending(buf, dest, tag, synchronous=True))

    Rsend_init = Send_init

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Prequest:
        """A receive to be started as often as wanted."""
        return Prequest(lambda: self._receiving(buf, source, tag))

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Whether a message is there that `Recv` would get; it stays. Never blocks.

        Where it may come from any rank and all others have freed the communicator there is none.
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
        """Block until a message is there that `Recv` would get; it stays. True.

        Raises:
            DeadlineExceeded: none came within the communicator's timeout.
        """
        return bool(self._awaited(lambda: self._seen(source, tag, status), source, tag))

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message | None:
        """Take a message that is there, for nobody else to receive; None if there is none, as in `Iprobe`. Never blocks."""
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
        """`Improbe`, but blocks until there is one."""
        message: Message = self._awaited(lambda: self._taken(source, tag, status), source, tag)
        return message

    def _awaited(self, look: Callable[[], Any], source: int, tag: int) -> Any:
        """Block until `look` gives something that is true."""
        found: list[Any] = []

        def done() -> bool:
            found[:] = [look()]
            return bool(found[0])

        wait_until(done, Deadline.after(self._matcher.timeout), lambda: self._matcher.expire(source, tag))
        return found[0]
