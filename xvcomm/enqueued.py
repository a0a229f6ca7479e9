"""Blocking operations on a device's stream that one compiled call starts: from its record to the note that it must end.

For what was called before in the same shape. Nothing is left out: a collective is posted and compared on the board, a
message waits for none that must come before it, both are looked after by `Pending`. Where compiled code cannot do it, it
says so before it has begun anything.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from typing import NoReturn

from xvcomm.abc.collective import CAPTURED, CollectiveStopped, EnqueuedCollective
from xvcomm.abc.device import EnqueuedMessage
from xvcomm.array import ArrayView
from xvcomm.atomics import load, load_acquire, store
from xvcomm.board import post
from xvcomm.boarding import ROOM, aboard, full
from xvcomm.calling import bits_of, call_3, call_5
from xvcomm.context import Context
from xvcomm.deadline import Deadline
from xvcomm.jit import brief, compiling
from xvcomm.opcode import OpCode
from xvcomm.operation import NO_PEER, Operation
from xvcomm.ring import ABORT, Message, RingEnd
from xvcomm.trace import note

_CLOSE_SECONDS = 1.0
_REFUSED, _FAILED = -3, -1


class Word(enum.IntEnum):
    """Words of a call."""

    PLACE = 0  # `Context.place`
    MESSAGE = 1  # five
    FUNCTION = 6  # these two: the native library's, or the device's
    ARGUMENT = 7
    RECORD = 8  # what became of the newest: its record's number, inverted if the board was aborted
    RESULT = 9  # and what the function gave
    NAME = 10  # the others: of messages only
    PEER = 11
    CHANNEL = 12
    COUNTER = 13
    READY = 14


_MESSAGE, _FUNCTION, _ARGUMENT, _RECORD, _RESULT = (8 * int(w) for w in list(Word)[1:6])
_NAME, _PEER, _CHANNEL, _COUNTER, _READY = (8 * int(w) for w in list(Word)[6:])
_WORDS = int(Word.READY) + 1
_BOARD, _RECORDER, _COMMUNICATOR = 0, 24, 32  # words of `Board.place`


def _collective(call, boarding, sequence, site, src, dst, stream, deadline):  # type: ignore[no-untyped-def]
    if full(boarding):
        return _REFUSED
    message, bits = call + _MESSAGE, bits_of(deadline)
    op, dtype, nbytes = load(message), load(message + 8), load(message + 16)
    tag, detail = load(message + 24), load(message + 32)
    number = post(load(call), sequence, op, dtype, nbytes, tag, detail, site)
    store(call + _RECORD, number)
    if number < 0:
        return _FAILED
    code = call_5(load(call + _FUNCTION), load(call + _ARGUMENT), src, dst, stream, bits)
    store(call + _RESULT, code)
    if code == 0:
        return aboard(boarding, number, sequence, op, NO_PEER, 0, 0, message, tag, bits)
    return CAPTURED if code == CAPTURED else _FAILED


def _message(call, boarding, sequence, site, data, tag, stream, deadline):  # type: ignore[no-untyped-def]
    place, argument = load(call), load(call + _ARGUMENT)
    if full(boarding) or load_acquire(load(place + _BOARD) + ABORT) != 0:
        return _REFUSED
    if call_3(load(call + _READY), argument, stream, 0) == 0:
        return _REFUSED
    message, name, peer, counter = call + _MESSAGE, load(call + _NAME), load(call + _PEER), load(call + _COUNTER)
    number = note(
        load(place + _RECORDER), load(place + _COMMUNICATOR), sequence, name, load(message + 8), load(message + 16), peer, tag,
        site,
    )  # fmt: skip
    code = call_5(load(call + _FUNCTION), argument, data, tag, stream, 0)
    if code != 0:
        store(call + _RECORD, number)
        store(call + _RESULT, code)
        return _FAILED
    channel = load(call + _CHANNEL)
    return aboard(boarding, number, sequence, name, peer, channel, counter, message, tag, bits_of(deadline))


_SIGNATURE = "int64(int64, int64, int64, int64, int64, int64, int64, float64)"
with compiling():
    _collective_kernel = brief(_SIGNATURE)(_collective)
    _message_kernel = brief(_SIGNATURE)(_message)


class Door:
    """Lets compiled code at a communicator's memory, under a lock, from its first operation until `Context.close`.

    Attributes:
        lock: under which operations are put in order; whoever makes a call holds it, and has looked whether the door is open.
        open: whether calls may be made.
        places: what `place` gave, by handle.
    """

    def __init__(self, context: Context, lock: threading.Lock) -> None:
        self._context, self.lock = context, lock
        self.open = False
        self.places: dict[int, int] = {}
        # While the door is open, compiled code may be inside: an operation that keeps memory mapped.
        self._standing = Operation(OpCode.INIT, -1, Message(0, 0, 0, 0))

    def admit(self, op: OpCode) -> None:
        """Open it; the caller holds the lock.

        Raises:
            ClosedError: this rank has closed the communicator.
        """
        if not self.open:
            self._context.enter(self._standing, op)
            self._context.closing.append(self._close)
            self.open = True

    def place(self, handle: int) -> int:
        """Where operations on a stream are noted, see `Pending.boarding`; the stream is looked at."""
        self._context.device.adopt(handle)
        found = self.places[handle] = self._context.pending.boarding(handle)
        return found

    def _close(self) -> None:
        """Let no compiled code in any more; memory stays mapped if some does not come out."""
        if self.lock.acquire(timeout=_CLOSE_SECONDS):
            self.open = False
            self._context.leave(self._standing, moved=False)
            self.lock.release()


class CollectiveCall:
    """A collective of fixed shape that is one call of the native library."""

    def __init__(self, context: Context, door: Door, op: OpCode, message: Message, native: EnqueuedCollective) -> None:
        self._context, self._door, self._op, self._message, self._native = context, door, op, message, native
        words = context.place, *message, native.function, native.argument
        self._words = (ctypes.c_int64 * _WORDS)(*words)
        self._address = ctypes.addressof(self._words)

    def run(
        self, place: int, handle: int, src: ArrayView | None, dst: ArrayView | None, site: int, deadline: Deadline
    ) -> bool:
        """Enqueue it on a stream.

        Args:
            place: `Door.place` of the stream.

        Returns:
            False if nothing has begun, and it must be run in another way.

        Raises:
            MismatchError, PeerLost, DeadlineExceeded, Aborted: as operations of the communicator do.
        """
        context, door = self._context, self._door
        reads, writes = 0 if src is None else src.address, 0 if dst is None else dst.address
        with door.lock:
            if not door.open:
                return False
            sequence = context.sequence
            code = _collective_kernel(self._address, place, sequence, site, reads, writes, handle, deadline.at)
            if code == _REFUSED:
                context.pending.depart_from(handle)
                return False
            context.sequence = sequence + 1
            if code < 0:
                self._end(sequence, code)
        if code >= ROOM:
            context.pending.depart_from(handle)
        return True

    def _end(self, sequence: int, code: int) -> None:
        """What is not the usual end of a call."""
        number = self._words[Word.RECORD]
        operation = Operation(self._op, sequence, self._message, record=max(number, ~number))
        if code == CAPTURED:
            self._context.end(operation)
            return
        try:
            if number < 0:
                raise CollectiveStopped(self._context.word())
            self._native.failed(self._words[Word.RESULT])
        except BaseException as error:
            _raise(self._context, error, operation)


class MessageCall:
    """Messages of fixed shape through one ring end."""

    def __init__(
        self, context: Context, door: Door, name: OpCode, end: RingEnd, message: Message, device: EnqueuedMessage
    ) -> None:
        self._context, self._door, self._name, self._message = context, door, name, message
        self._ring, self._device = end, device
        words = context.place, *message, device.function, device.argument, 0, 0, +name, end.peer, end.channel, end.counter
        self._words = (ctypes.c_int64 * _WORDS)(*words, device.ready)
        self._address = ctypes.addressof(self._words)
        context.pending.rings[end.counter] = end

    def run(self, place: int, handle: int, data: int, tag: int, site: int, deadline: Deadline) -> bool:
        """Enqueue one on a stream; what is not told here as in `CollectiveCall.run`."""
        context, door = self._context, self._door
        with door.lock:
            if not door.open:
                return False
            code = _message_kernel(self._address, place, context.sequence, site, data, tag, handle, deadline.at)
            if code < 0:
                if code == _REFUSED:
                    return False
                self._fail(tag)
        if code >= ROOM:
            context.pending.depart_from(handle)
        return True

    def _fail(self, tag: int) -> NoReturn:
        message, end = self._message._replace(tag=tag), self._ring
        number = self._words[Word.RECORD]
        operation = Operation(self._name, self._context.sequence, message, end.peer, number, end.channel)
        try:
            self._device.failed(self._words[Word.RESULT])
        except BaseException as error:
            _raise(self._context, error, operation)


def _raise(context: Context, error: BaseException, operation: Operation) -> NoReturn:
    """Raise the user's error."""
    raised = context.fail(error, operation)
    if raised is error:
        raise error
    raise raised from None
