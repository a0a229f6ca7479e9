"""Operations on a device's stream that one compiled call starts: from its record to the note that it must end.

For what was called before in the same shape. Nothing is left out: a collective is posted and compared on the board, a
message waits for none that must come before it, both are looked after by `Pending`. Where compiled code cannot do it, it
says so before it has begun anything.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from xvcomm.abc.collective import CollectiveStopped
from xvcomm.abc.device import CAPTURED, EnqueuedCall, EnqueuedMessage
from xvcomm.array import ArrayView
from xvcomm.atomics import load, load_acquire, store
from xvcomm.board import post
from xvcomm.boarding import ROOM, aboard, fits
from xvcomm.calling import bits_of, call_3, call_5
from xvcomm.context import Context
from xvcomm.deadline import Deadline
from xvcomm.jit import brief, compiling
from xvcomm.opcode import OpCode
from xvcomm.operation import NO_PEER, Operation
from xvcomm.ring import ABORT, Message, RingEnd
from xvcomm.schedule.steps import Buf
from xvcomm.trace import State, note

_CLOSE_SECONDS = 1.0
_FAILED, _FULL, _UNREADY = -1, -3, -4


class Place(NamedTuple):
    """A place in one of a collective's three pieces of memory.

    Attributes:
        buf: which of them.
        offset: in bytes.
    """

    buf: Buf
    offset: int


class EnqueuedStep(NamedTuple):
    """One call of the native library, copy, scaling or message, of a collective for compiled code.

    Attributes:
        call: what is called.
        first, second: the places that it reads and writes; of messages only the first counts.
        ring: of messages.
    """

    call: EnqueuedCall | EnqueuedMessage
    first: Place
    second: Place
    ring: RingEnd | None = None


class CallWord(enum.IntEnum):
    """Words of messages that start together."""

    PLACE = 0  # `Context.place`
    RESULT = 1  # what the device's function gave
    READY = 2  # these three: see `EnqueuedMessage`
    FUNCTION = 3
    ARGUMENT = 4
    ITEMS = 5  # address of three words for each of them: array, tag, and where the user called it
    COUNT = 6
    FIRST = 7  # the words of each, behind which the items are


class MessageWord(enum.IntEnum):
    """Words of a message."""

    NAME = 0
    PEER = 1
    CHANNEL = 2
    COUNTER = 3
    RECORD = 4  # the newest one's number
    MESSAGE = 5  # five


class CollectiveWord(enum.IntEnum):
    """Words of a collective."""

    PLACE = 0  # `Context.place`
    MESSAGE = 1  # five
    RECORD = 6  # what became of the newest: its record's number, inverted if the board was aborted
    RESULT = 7  # and what a function gave
    INPUT = 8  # these four are what steps take, with something added
    OUTPUT = 9
    SCRATCH = 10
    SEQUENCE = 11
    AT = 12  # the step that is under way
    STEPS = 13  # how many there are
    SEATS = 14  # entries that it needs aboard
    FIRST = 15  # the words of the steps


class StepWord(enum.IntEnum):
    """Words of a step."""

    READY = 0  # of messages: see `EnqueuedMessage`; else 0
    FUNCTION = 1
    ARGUMENT = 2
    FIRST = 3  # what to add: the offset of a word of the call, and bytes
    FIRST_BYTES = 4
    SECOND = 5
    SECOND_BYTES = 6
    COUNTER = 7  # of messages: `RingEnd.counter`; else 0


_, _RESULT, _READY, _FUNCTION, _ARGUMENT, _ITEMS, _COUNT, _MESSAGES = (8 * int(w) for w in CallWord)
_NAME, _PEER, _CHANNEL, _COUNTER, _RECORD, _MESSAGE = (8 * int(w) for w in MessageWord)
_ENTRY, _ITEM = _MESSAGE + 40, 24
_, _C_MESSAGE, _C_RECORD, _C_RESULT, _INPUT, _OUTPUT, _SCRATCH, _SEQUENCE = (8 * int(w) for w in list(CollectiveWord)[:8])
_AT, _STEPS, _SEATS, _FIRST = (8 * int(w) for w in list(CollectiveWord)[8:])
_BASES = {Buf.IN: _INPUT, Buf.OUT: _OUTPUT, Buf.TMP: _SCRATCH}
_STEP = 8 * len(StepWord)
_S_READY, _S_FUNCTION, _S_ARGUMENT, _S_FIRST, _S_FIRST_BYTES = (8 * int(w) for w in list(StepWord)[:5])
_S_SECOND, _S_SECOND_BYTES, _S_COUNTER = (8 * int(w) for w in list(StepWord)[5:])
_BOARD, _RECORDER, _COMMUNICATOR = 0, 24, 32  # words of `Board.place`


def _collective(call, boarding, sequence, site, src, dst, stream, deadline):  # type: ignore[no-untyped-def]
    first, end = call + _FIRST, call + _FIRST + load(call + _STEPS) * _STEP
    if not fits(boarding, load(call + _SEATS)):
        return _FULL
    for step in range(first, end, _STEP):
        ready = load(step + _S_READY)
        if ready != 0 and call_3(ready, load(step + _S_ARGUMENT), stream, 0) == 0:
            return _UNREADY
    message, bits = call + _C_MESSAGE, bits_of(deadline)
    op, dtype, nbytes = load(message), load(message + 8), load(message + 16)
    tag, detail = load(message + 24), load(message + 32)
    number = post(load(call), sequence, op, dtype, nbytes, tag, detail, site)
    store(call + _C_RECORD, number)
    if number < 0:
        return _FAILED
    store(call + _INPUT, src)
    store(call + _OUTPUT, dst)
    store(call + _SEQUENCE, sequence)
    for step in range(first, end, _STEP):
        one = load(call + load(step + _S_FIRST)) + load(step + _S_FIRST_BYTES)
        two = load(call + load(step + _S_SECOND)) + load(step + _S_SECOND_BYTES)
        code = call_5(load(step + _S_FUNCTION), load(step + _S_ARGUMENT), one, two, stream, bits)
        if code != 0:
            store(call + _C_RESULT, code)
            store(call + _AT, (step - first) // _STEP)
            return CAPTURED if code == CAPTURED else _FAILED
    seats = aboard(boarding, number, sequence, op, NO_PEER, 0, 0, message, tag, bits)
    for step in range(first, end, _STEP):
        if load(step + _S_COUNTER) != 0:
            seats = aboard(boarding, number, sequence, op, NO_PEER, 0, load(step + _S_COUNTER), message, tag, bits)
    return seats


def _messages(call, boarding, sequence, stream, deadline):  # type: ignore[no-untyped-def]
    place, argument, count, items = load(call), load(call + _ARGUMENT), load(call + _COUNT), load(call + _ITEMS)
    if not fits(boarding, count):
        return _FULL
    if load_acquire(load(place + _BOARD) + ABORT) != 0 or call_3(load(call + _READY), argument, stream, 0) == 0:
        return _UNREADY
    recorder, communicator, first = load(place + _RECORDER), load(place + _COMMUNICATOR), call + _MESSAGES
    for i in range(count):
        entry, item = first + i * _ENTRY, items + i * _ITEM
        name, peer, message = load(entry + _NAME), load(entry + _PEER), entry + _MESSAGE
        tag, site = load(item + 8), load(item + 16)
        number = note(recorder, communicator, sequence, name, load(message + 8), load(message + 16), peer, tag, site)
        store(entry + _RECORD, number)
    code = call_5(load(call + _FUNCTION), argument, items, 0, stream, 0)
    if code != 0:
        store(call + _RESULT, code)
        return _FAILED
    seats, bits = 0, bits_of(deadline)
    for i in range(count):
        entry, tag = first + i * _ENTRY, load(items + i * _ITEM + 8)
        record, name, peer = load(entry + _RECORD), load(entry + _NAME), load(entry + _PEER)
        channel, counter = load(entry + _CHANNEL), load(entry + _COUNTER)
        seats = aboard(boarding, record, sequence, name, peer, channel, counter, entry + _MESSAGE, tag, bits)
    return seats


with compiling():
    _collective_kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64, float64)")(_collective)
    _messages_kernel = brief("int64(int64, int64, int64, int64, float64)")(_messages)


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
    """A collective of fixed shape that is a few calls, one behind the other on one stream.

    Args:
        scratch: gives the address of scratch memory that only collectives on a stream use; None if the steps need none.
    """

    def __init__(
        self, context: Context, door: Door, op: OpCode, message: Message, steps: Sequence[EnqueuedStep],
        scratch: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        self._context, self._door, self._op, self._message, self._scratch = context, door, op, message, scratch
        self._calls = [step.call for step in steps]  # compiled code knows them by address
        rings = [step.ring for step in steps if step.ring is not None]
        context.pending.rings.update((ring.counter, ring) for ring in rings)
        seats = 1 + len(rings)
        self._most = ROOM - seats
        words = [context.place, *message, *[0] * 7, len(steps), seats]
        for step in steps:
            words += _words_of(step)
        self._words = (ctypes.c_int64 * len(words))(*words)
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
            if self._scratch is not None:
                self._words[CollectiveWord.SCRATCH] = self._scratch(handle)
            code = _collective_kernel(self._address, place, sequence, site, reads, writes, handle, deadline.at)
            if code == _FULL:
                context.pending.depart_from(handle)
                code = _collective_kernel(self._address, place, sequence, site, reads, writes, handle, deadline.at)
            if code in (_FULL, _UNREADY):
                return False
            context.sequence = sequence + 1
            if code < 0:
                self._end(sequence, code)
        if code > self._most:
            context.pending.depart_from(handle)
        return True

    def _end(self, sequence: int, code: int) -> None:
        """What is not the usual end of a call."""
        number = self._words[CollectiveWord.RECORD]
        operation = Operation(self._op, sequence, self._message, record=max(number, ~number))
        if code == CAPTURED:
            self._context.end(operation)
            return
        try:
            if number < 0:
                raise CollectiveStopped(self._context.word())
            self._calls[self._words[CollectiveWord.AT]].failed(self._words[CollectiveWord.RESULT])
        except BaseException as error:
            _raise(self._context, error, operation)


def _words_of(step: EnqueuedStep) -> list[int]:
    """The words of a step."""
    call, ring = step.call, step.ring
    places = [[_BASES[place.buf], place.offset] for place in (step.first, step.second)]
    if isinstance(call, EnqueuedMessage) and ring is not None:
        return [call.ready, call.function, call.argument, *places[0], _SEQUENCE, 0, ring.counter]  # the tag is the number
    return [0, call.function, call.argument, *places[0], *places[1], 0]


class EnqueuedTransfer(NamedTuple):
    """A message of fixed shape: what it is called, its ring end, and what it is but for its tag."""

    name: OpCode
    end: RingEnd
    message: Message


class MessageCall:
    """Messages of fixed shapes that start together, each through a ring end of its own."""

    def __init__(
        self, context: Context, door: Door, transfers: Sequence[EnqueuedTransfer], device: EnqueuedMessage
    ) -> None:
        self._context, self._door, self._transfers, self._device = context, door, transfers, device
        words = [context.place, 0, *device[:3], 0, len(transfers)]
        for name, end, message in transfers:
            words += +name, end.peer, end.channel, end.counter, 0, *message
            context.pending.rings[end.counter] = end
        self._at, self._most = len(words), ROOM - len(transfers)
        words += [0] * 3 * len(transfers)
        self._words = (ctypes.c_int64 * len(words))(*words)
        self._address = ctypes.addressof(self._words)
        self._words[CallWord.ITEMS] = self._address + 8 * self._at

    def run(self, place: int, handle: int, items: list[int], deadline: Deadline) -> bool:
        """Enqueue them on a stream; what is not told here as in `CollectiveCall.run`.

        Args:
            items: of each message the array's address, the tag, and where the user called it.
        """
        context, door = self._context, self._door
        with door.lock:
            if not door.open:
                return False
            self._words[self._at :] = items  # type: ignore[assignment]
            code = _messages_kernel(self._address, place, context.sequence, handle, deadline.at)
            if code == _FULL:
                context.pending.depart_from(handle)
                code = _messages_kernel(self._address, place, context.sequence, handle, deadline.at)
            if code in (_FULL, _UNREADY):
                return False
            if code == _FAILED:
                self._fail()
        if code > self._most:
            context.pending.depart_from(handle)
        return True

    def _fail(self) -> NoReturn:
        first, *others = self._operations()
        for operation in others:
            self._context.end(operation, State.FAILED)
        try:
            self._device.failed(self._words[CallWord.RESULT])
        except BaseException as error:
            _raise(self._context, error, first)

    def _operations(self) -> list[Operation]:
        """What was noted last."""
        found = []
        for i, (name, end, message) in enumerate(self._transfers):
            number = self._words[CallWord.FIRST + i * _ENTRY // 8 + MessageWord.RECORD]
            told = message._replace(tag=self._words[self._at + 3 * i + 1])
            found.append(Operation(name, self._context.sequence, told, end.peer, number, end.channel))
        return found


def _raise(context: Context, error: BaseException, operation: Operation) -> NoReturn:
    """Raise the user's error."""
    raised = context.fail(error, operation)
    if raised is error:
        raise error
    raise raised from None
