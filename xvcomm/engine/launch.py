"""Operations on a device's stream that one compiled call starts: from its record to the note that it must end.

For what was called before in the same shape. Nothing is left out: a collective is posted and compared on the contract, a
message waits for none that must come before it, both are looked after by `Tracker`. Where compiled code cannot do it, it
says so before it has begun anything.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from numba.extending import register_jitable

from xvcomm.abc.collective import CollectiveStopped
from xvcomm.abc.device import CAPTURED, EnqueuedCall, EnqueuedMarks, EnqueuedMessages
from xvcomm.engine.context import Context
from xvcomm.engine.gate import LaunchGate
from xvcomm.engine.inflight.log import ROOM, fits, log_operation, record_event
from xvcomm.jit.atomics import load, load_acquire, store
from xvcomm.jit.ccall import bits_of, call_3, call_5
from xvcomm.jit.compile import brief, compiling
from xvcomm.memory.array import ArrayView
from xvcomm.memory.ring import ABORT, Message, RingEnd
from xvcomm.schedule.steps import Buf
from xvcomm.trace.contract import post
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.trace.recorder import State, note
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_FAILED, _FULL, _UNREADY = -1, -3, -4
_NOT_BESIDE = 0, 0, 0


class Place(NamedTuple):
    """A place in one of a collective's three pieces of memory.

    Attributes:
        buf: which of them.
        offset: in bytes.
    """

    buf: Buf
    offset: int


class EnqueuedStep(NamedTuple):
    """A call of the native library, a copy, a scaling, or messages that start together, of a collective for compiled code.

    Attributes:
        call: what is called.
        places: what it reads and what it writes; of messages each one's array.
        rings: of messages: their ring ends.
    """

    call: EnqueuedCall | EnqueuedMessages
    places: Sequence[Place]
    rings: Sequence[RingEnd] = ()


class Branch:
    """A stream beside the users', on which asynchronous operations go. One call at a time.

    Attributes:
        failed: see `EnqueuedMarks`.
        words: what compiled code takes for the next operation.
        sequence: the newest collective's number; of messages the next one's.
        ends: the newest operation's ring ends, each with the number of the next message there.
    """

    def __init__(self, marks: EnqueuedMarks) -> None:
        self._functions, self.failed = (ctypes.c_int64 * 3)(marks.branch, marks.mark, marks.argument), marks.failed
        self._address = ctypes.addressof(self._functions)
        self.words = _NOT_BESIDE
        self.sequence, self.ends = -1, list[tuple[RingEnd, int]]()

    def between(self, user: int, event: int) -> None:
        """Say which stream's handle the next operation comes behind, and the event of the mark behind it."""
        self.words = self._address, user, event


class CallWord(enum.IntEnum):
    """Words of messages that start together."""

    PLACE = 0  # `Context.place`
    RESULT = 1  # what the device's function gave
    READY = 2  # these three: see `EnqueuedMessages`
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
    RECORD = 6  # what became of the newest: its record's number, inverted if the contract was aborted
    RESULT = 7  # and what a function gave
    INPUT = 8  # these three are where steps find their places
    OUTPUT = 9
    SCRATCH = 10
    AT = 11  # the step that is under way; behind the last one the mark of a stream beside
    STEPS = 12  # how many there are
    ENTRIES = 13  # entries that it needs aboard
    FIRST = 14  # the words of the steps, behind which those of the places are, and then the items


class StepWord(enum.IntEnum):
    """Words of a step."""

    READY = 0  # of messages: see `EnqueuedMessages`; else 0
    FUNCTION = 1
    ARGUMENT = 2
    PLACES = 3  # address of the words of its places
    COUNT = 4  # how many those are
    ITEMS = 5  # of messages: address of three words for each of them, which their function takes


class PlaceWord(enum.IntEnum):
    """Words of a place."""

    BUF = 0  # where among the call's words the address of its memory is
    BYTES = 1  # what to add
    COUNTER = 2  # of messages: `RingEnd.counter`; else 0


_, _RESULT, _READY, _FUNCTION, _ARGUMENT, _ITEMS, _COUNT, _MESSAGES = (8 * int(w) for w in CallWord)
_NAME, _PEER, _CHANNEL, _COUNTER, _RECORD, _MESSAGE = (8 * int(w) for w in MessageWord)
_ENTRY, _ITEM = _MESSAGE + 40, 24
_, _C_MESSAGE, _C_RECORD, _C_RESULT, _INPUT, _OUTPUT, _SCRATCH = (8 * int(w) for w in list(CollectiveWord)[:7])
_AT, _STEPS, _ENTRIES, _FIRST = (8 * int(w) for w in list(CollectiveWord)[7:])
_BASES = {Buf.IN: _INPUT, Buf.OUT: _OUTPUT, Buf.TMP: _SCRATCH}
_S_READY, _S_FUNCTION, _S_ARGUMENT, _S_PLACES, _S_COUNT, _S_ITEMS = (8 * int(w) for w in StepWord)
_P_BUF, _P_BYTES, _P_COUNTER = (8 * int(w) for w in PlaceWord)
_STEP, _PLACE = 8 * len(StepWord), 8 * len(PlaceWord)
_CONTRACT, _RECORDER, _COMMUNICATOR = 0, 24, 32  # words of `ContractCheck.place`


@register_jitable
def _address(call: int, step: int, number: int) -> int:
    """Where a step's place of this number is."""
    place = load(step + _S_PLACES) + number * _PLACE
    return load(call + load(place + _P_BUF)) + load(place + _P_BYTES)


@register_jitable
def _do(call: int, step: int, sequence: int, stream: int, bits: int) -> int:
    """Enqueue a step; 0, or what its function gave."""
    function, argument, items = load(step + _S_FUNCTION), load(step + _S_ARGUMENT), load(step + _S_ITEMS)
    if items == 0:
        return call_5(function, argument, _address(call, step, 0), _address(call, step, 1), stream, bits)
    for number in range(load(step + _S_COUNT)):
        store(items + number * _ITEM, _address(call, step, number))
        store(items + number * _ITEM + 8, sequence)  # the tag
    return call_5(function, argument, items, 0, stream, 0)


@register_jitable
def _marked(log: int, stream: int, beside: int, event: int) -> int:
    """Mark a stream beside, or one that may be gone later, behind what was enqueued; 0, or what the device said."""
    if beside == 0:
        return record_event(log, stream)
    return call_3(load(beside + 8), load(beside + 16), event, stream)


def _collective(call, log, sequence, site, src, dst, stream, deadline, beside, user, event):  # type: ignore[no-untyped-def]
    first, end = call + _FIRST, call + _FIRST + load(call + _STEPS) * _STEP
    if not fits(log, load(call + _ENTRIES), deadline):
        return _FULL
    for step in range(first, end, _STEP):
        ready = load(step + _S_READY)
        if ready != 0 and call_3(ready, load(step + _S_ARGUMENT), stream, 0) == 0:
            return _UNREADY
    if beside != 0 and call_3(load(beside), load(beside + 16), user, stream) != 0:
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
    for step in range(first, end, _STEP):
        code = _do(call, step, sequence, stream, bits)
        if code != 0:
            store(call + _C_RESULT, code)
            store(call + _AT, (step - first) // _STEP)
            return CAPTURED if code == CAPTURED else _FAILED
    code = _marked(log, stream, beside, event)
    if code != 0:
        store(call + _C_RESULT, code)
        store(call + _AT, load(call + _STEPS))
        return _FAILED
    entries = log_operation(log, number, sequence, op, NO_PEER, 0, 0, message, tag, bits)
    for step in range(first, end, _STEP):
        if load(step + _S_ITEMS) != 0:
            for place in range(load(step + _S_COUNT)):
                counter = load(load(step + _S_PLACES) + place * _PLACE + _P_COUNTER)
                entries = log_operation(log, number, sequence, op, NO_PEER, 0, counter, message, tag, bits)
    return entries


def _messages(call, log, sequence, stream, deadline, beside, user, event):  # type: ignore[no-untyped-def]
    place, argument, count, items = load(call), load(call + _ARGUMENT), load(call + _COUNT), load(call + _ITEMS)
    if not fits(log, count, deadline):
        return _FULL
    if load_acquire(load(place + _CONTRACT) + ABORT) != 0 or call_3(load(call + _READY), argument, stream, 0) == 0:
        return _UNREADY
    if beside != 0 and call_3(load(beside), load(beside + 16), user, stream) != 0:
        return _UNREADY
    recorder, communicator, first = load(place + _RECORDER), load(place + _COMMUNICATOR), call + _MESSAGES
    for i in range(count):
        entry, item = first + i * _ENTRY, items + i * _ITEM
        name, peer, message = load(entry + _NAME), load(entry + _PEER), entry + _MESSAGE
        tag, site = load(item + 8), load(item + 16)
        number = note(recorder, communicator, sequence, name, load(message + 8), load(message + 16), peer, tag, site)
        store(entry + _RECORD, number)
    code = call_5(load(call + _FUNCTION), argument, items, 0, stream, 0)
    if code == 0:
        code = _marked(log, stream, beside, event)
    if code != 0:
        store(call + _RESULT, code)
        return _FAILED
    entries, bits = 0, bits_of(deadline)
    for i in range(count):
        entry, tag = first + i * _ENTRY, load(items + i * _ITEM + 8)
        record, name, peer = load(entry + _RECORD), load(entry + _NAME), load(entry + _PEER)
        channel, counter = load(entry + _CHANNEL), load(entry + _COUNTER)
        entries = log_operation(log, record, sequence, name, peer, channel, counter, entry + _MESSAGE, tag, bits)
    return entries


with compiling():
    _collective_kernel = brief("int64(int64, int64, int64, int64, int64, int64, int64, float64, int64, int64, int64)")(
        _collective
    )
    _messages_kernel = brief("int64(int64, int64, int64, int64, float64, int64, int64, int64)")(_messages)


class CollectiveCall:
    """A collective of fixed shape that is a few calls, one behind the other on one stream.

    Args:
        scratch: gives the address of scratch memory that only collectives on a stream use; None if the steps need none.
    """

    def __init__(
        self, context: Context, gate: LaunchGate, op: OpCode, message: Message, steps: Sequence[EnqueuedStep],
        scratch: Callable[[int], int] | None = None,
    ) -> None:  # fmt: skip
        self._context, self._launch_gate, self._op, self._message, self._scratch = context, gate, op, message, scratch
        self._calls = [step.call for step in steps]  # compiled code knows them by address
        self._rings = rings = [ring for step in steps for ring in step.rings]
        context.tracker.rings.update((ring.counter, ring) for ring in rings)
        entries = 1 + len(rings)
        self._most = ROOM - entries
        self._words = _pack([context.place, *message, *[0] * 6, len(steps), entries], steps)
        self._address = ctypes.addressof(self._words)

    def run(
        self, place: int, handle: int, src: ArrayView | None, dst: ArrayView | None, site: int, deadline: float,
        branch: Branch | None = None,
    ) -> bool:  # fmt: skip
        """Enqueue it on a stream.

        Args:
            place: `LaunchGate.place` of the stream.
            deadline: `Deadline.at`.
            branch: how it goes on that stream, if that is beside the user's.

        Returns:
            False if nothing has begun, and it must be run in another way.

        Raises:
            MismatchError, PeerLost, DeadlineExceeded, Aborted: as operations of the communicator do.
        """
        context, gate = self._context, self._launch_gate
        reads, writes = 0 if src is None else src.address, 0 if dst is None else dst.address
        beside, user, event = _NOT_BESIDE if branch is None else branch.words
        with gate.lock:
            if not gate.open:
                return False
            sequence = context.sequence
            if self._scratch is not None:
                self._words[CollectiveWord.SCRATCH] = self._scratch(handle)
            call = self._address, place, sequence, site, reads, writes, handle, deadline, beside, user, event
            code = _collective_kernel(*call)
            if code == _FULL:
                context.tracker.seal(handle)
                code = _collective_kernel(*call)
            if code in (_FULL, _UNREADY):
                return False
            context.sequence = sequence + 1
            if code < 0:
                self._end(sequence, code, branch or context.tracker.marks(handle))
            if branch is not None:
                branch.sequence, branch.ends = sequence, [(ring, ring.sequence) for ring in self._rings]
        if code > self._most:
            context.tracker.seal(handle)
        return True

    def _end(self, sequence: int, code: int, marking: Branch | EnqueuedMarks | None) -> None:
        """What is not the usual end of a call; `marking` is behind its steps."""
        number = self._words[CollectiveWord.RECORD]
        operation = Operation(self._op, sequence, self._message, record=max(number, ~number))
        if code == CAPTURED:
            self._context.end(operation)
            return
        try:
            if number < 0:
                raise CollectiveStopped(self._context.word())
            [*self._calls, marking or self._calls[-1]][self._words[CollectiveWord.AT]].failed(
                self._words[CollectiveWord.RESULT]
            )
        except BaseException as error:
            _raise(self._context, error, operation)


def _pack(head: list[int], steps: Sequence[EnqueuedStep]) -> ctypes.Array[ctypes.c_int64]:
    """The words of a collective: a head, its steps', their places', and room for the items."""
    count = sum(len(step.places) for step in steps)
    length = len(head) + len(steps) * len(StepWord)
    words = (ctypes.c_int64 * (length + count * (len(PlaceWord) + _ITEM // 8)))()
    place = ctypes.addressof(words) + 8 * length
    item = place + count * _PLACE
    tail: list[int] = []
    for call, places, rings in steps:
        ready = call.ready if isinstance(call, EnqueuedMessages) else 0
        head += ready, call.function, call.argument, place, len(places), item if rings else 0
        for where, counter in zip(places, [ring.counter for ring in rings] or [0] * len(places), strict=True):
            tail += _BASES[where.buf], where.offset, counter
        place, item = place + len(places) * _PLACE, item + len(places) * _ITEM
    words[: length + len(tail)] = head + tail  # type: ignore[assignment]
    return words


class EnqueuedTransfer(NamedTuple):
    """A message of fixed shape: what it is called, its ring end, and what it is but for its tag."""

    name: OpCode
    end: RingEnd
    message: Message


class MessageCall:
    """Messages of fixed shapes that start together, each through a ring end of its own.

    Attributes:
        ends: those ring ends.
    """

    def __init__(
        self, context: Context, gate: LaunchGate, transfers: Sequence[EnqueuedTransfer], device: EnqueuedMessages
    ) -> None:
        self._context, self._launch_gate, self._transfers, self._device = context, gate, transfers, device
        self.ends = frozenset(transfer.end for transfer in transfers)
        words = [context.place, 0, *device[:3], 0, len(transfers)]
        for name, end, message in transfers:
            words += +name, end.peer, end.channel, end.counter, 0, *message
            context.tracker.rings[end.counter] = end
        self._at, self._most = len(words), ROOM - len(transfers)
        words += [0] * 3 * len(transfers)
        self._words = (ctypes.c_int64 * len(words))(*words)
        self._address = ctypes.addressof(self._words)
        self._words[CallWord.ITEMS] = self._address + 8 * self._at

    def run(self, place: int, handle: int, items: list[int], deadline: Deadline, branch: Branch | None = None) -> bool:
        """Enqueue them on a stream; what is not told here as in `CollectiveCall.run`.

        Args:
            items: of each message the array's address, the tag, and where the user called it.
        """
        context, gate = self._context, self._launch_gate
        beside, user, event = _NOT_BESIDE if branch is None else branch.words
        with gate.lock:
            if not gate.open:
                return False
            self._words[self._at :] = items  # type: ignore[assignment]
            call = self._address, place, context.sequence, handle, deadline.at, beside, user, event
            code = _messages_kernel(*call)
            if code == _FULL:
                context.tracker.seal(handle)
                code = _messages_kernel(*call)
            if code in (_FULL, _UNREADY):
                return False
            if code == _FAILED:
                self._fail()
            if branch is not None:
                branch.sequence, branch.ends = context.sequence, [(t.end, t.end.sequence) for t in self._transfers]
        if code > self._most:
            context.tracker.seal(handle)
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
