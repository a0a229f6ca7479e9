"""Launches operations of a known shape on a device's stream by one compiled call.

The call does all that Python does for the first operation of a shape: it writes the flight recorder, posts and compares the
contract check, enqueues the steps, and appends to the launch log, from which `Tracker` takes the operation. Where compiled
code cannot launch an operation, it returns before it has begun anything.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from numba.extending import register_jitable

from xvcomm.abc.collective import CollectiveStopped
from xvcomm.abc.launch import CAPTURED, EnqueuedCall, EnqueuedEvents, EnqueuedMessages
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
from xvcomm.trace.format import State
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.trace.recorder import note
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

_FAILED, _FULL, _UNREADY = -1, -3, -4
_NOT_BESIDE = 0, 0, 0


class Place(NamedTuple):
    """A place in the input, the output or the scratch memory of a collective.

    Attributes:
        buf: which of the three.
        offset: in bytes.
    """

    buf: Buf
    offset: int


class EnqueuedStep(NamedTuple):
    """One step of a collective for compiled code: a native call, a copy, a scaling, or messages that start together.

    Attributes:
        call: the function that is called.
        places: what it reads and what it writes; for messages the array of each.
        rings: for messages their ring ends.
    """

    call: EnqueuedCall | EnqueuedMessages
    places: Sequence[Place]
    rings: Sequence[RingEnd] = ()


class Branch:
    """A stream of xvcomm's for asynchronous operations. One call at a time.

    Attributes:
        failed: see `EnqueuedEvents`.
        words: arguments of compiled code for the next operation.
        sequence: number of the latest collective; for messages of the next collective.
        ends: ring ends of the latest operation, each with the number of its next message.
    """

    def __init__(self, events: EnqueuedEvents) -> None:
        self._functions = (ctypes.c_int64 * 3)(events.branch, events.record, events.argument)
        self.failed = events.failed
        self._address = ctypes.addressof(self._functions)
        self.words = _NOT_BESIDE
        self.sequence, self.ends = -1, list[tuple[RingEnd, int]]()

    def between(self, user: int, event: int) -> None:
        """Set the stream that the next operation waits for, and the event recorded after the operation."""
        self.words = self._address, user, event


class CallWord(enum.IntEnum):
    """Words of messages that start together."""

    PLACE = 0  # `Context.place`
    RESULT = 1  # return code of the device's function
    READY = 2  # this word and the next two: see `EnqueuedMessages`
    FUNCTION = 3
    ARGUMENT = 4
    ITEMS = 5  # address of three words a message: array, tag, call site
    COUNT = 6
    FIRST = 7  # the words of each message; the items follow


class MessageWord(enum.IntEnum):
    """Words of a message."""

    NAME = 0
    PEER = 1
    CHANNEL = 2
    COUNTER = 3
    RECORD = 4  # number of the latest record
    MESSAGE = 5  # five words


class CollectiveWord(enum.IntEnum):
    """Words of a collective."""

    PLACE = 0  # `Context.place`
    MESSAGE = 1  # five words
    RECORD = 6  # number of the latest record, inverted if the communicator was aborted
    RESULT = 7  # return code of the function that failed
    INPUT = 8  # this word and the next two: addresses of the memory of `Place`
    OUTPUT = 9
    SCRATCH = 10
    AT = 11  # index of the step that failed; after the last step, the recording of the event
    STEPS = 12  # number of steps
    ENTRIES = 13  # entries that it needs in the launch log
    FIRST = 14  # the words of the steps; those of the places and the items follow


class StepWord(enum.IntEnum):
    """Words of a step."""

    READY = 0  # for messages see `EnqueuedMessages`; else 0
    FUNCTION = 1
    ARGUMENT = 2
    PLACES = 3  # address of the words of its places
    COUNT = 4  # number of places
    ITEMS = 5  # for messages the address of three words each, which their function takes


class PlaceWord(enum.IntEnum):
    """Words of a place."""

    BUF = 0  # offset of the word that holds the address of its memory
    BYTES = 1  # offset in that memory
    COUNTER = 2  # for messages `RingEnd.counter`; else 0


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
    """Address of a step's place."""
    place = load(step + _S_PLACES) + number * _PLACE
    return load(call + load(place + _P_BUF)) + load(place + _P_BYTES)


@register_jitable
def _do(call: int, step: int, sequence: int, stream: int, bits: int) -> int:
    """Enqueue a step; 0, or the return code of its function."""
    function, argument, items = load(step + _S_FUNCTION), load(step + _S_ARGUMENT), load(step + _S_ITEMS)
    if items == 0:
        return call_5(function, argument, _address(call, step, 0), _address(call, step, 1), stream, bits)
    for number in range(load(step + _S_COUNT)):
        store(items + number * _ITEM, _address(call, step, number))
        store(items + number * _ITEM + 8, sequence)  # the tag
    return call_5(function, argument, items, 0, stream, 0)


@register_jitable
def _recorded(log: int, stream: int, beside: int, event: int) -> int:
    """Record an event after the operation, where compiled code must; 0, or the device's error."""
    if beside == 0:
        return record_event(log, stream)
    return call_3(load(beside + 8), load(beside + 16), event, stream)


def _collective(call, log, sequence, call_site, src, dst, stream, deadline, beside, user, event):  # type: ignore[no-untyped-def]
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
    number = post(load(call), sequence, op, dtype, nbytes, tag, detail, call_site)
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
    code = _recorded(log, stream, beside, event)
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
        tag, call_site = load(item + 8), load(item + 16)
        number = note(
            recorder, communicator, sequence, name, load(message + 8), load(message + 16), peer, tag, call_site
        )
        store(entry + _RECORD, number)
    code = call_5(load(call + _FUNCTION), argument, items, 0, stream, 0)
    if code == 0:
        code = _recorded(log, stream, beside, event)
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
    """A collective of fixed shape whose steps follow one another on one stream.

    Args:
        scratch: gives the address of a stream's scratch memory, by its handle; None if the steps need none.
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
        self, place: int, handle: int, src: ArrayView | None, dst: ArrayView | None, call_site: int, deadline: float,
        branch: Branch | None = None,
    ) -> bool:  # fmt: skip
        """Enqueue it on a stream.

        Args:
            place: `LaunchGate.place` of the stream.
            deadline: `Deadline.at`.
            branch: the stream, if it is one of xvcomm's; None for the user's.

        Returns:
            False if nothing has begun, and Python must run it.

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
            call = self._address, place, sequence, call_site, reads, writes, handle, deadline, beside, user, event
            code = _collective_kernel(*call)
            if code == _FULL:
                context.tracker.seal(handle)
                code = _collective_kernel(*call)
            if code in (_FULL, _UNREADY):
                return False
            context.sequence = sequence + 1
            if code < 0:
                self._end(sequence, code, branch or context.tracker.events(handle))
            if branch is not None:
                branch.sequence, branch.ends = sequence, [(ring, ring.sequence) for ring in self._rings]
        if code > self._most:
            context.tracker.seal(handle)
        return True

    def _end(self, sequence: int, code: int, recording: Branch | EnqueuedEvents | None) -> None:
        """Handle a call that was captured or has failed; `recording` records the event after the steps."""
        number = self._words[CollectiveWord.RECORD]
        operation = Operation(self._op, sequence, self._message, record=max(number, ~number))
        if code == CAPTURED:
            self._context.end(operation)
            return
        try:
            if number < 0:
                raise CollectiveStopped(self._context.lifecycle.word())
            [*self._calls, recording or self._calls[-1]][self._words[CollectiveWord.AT]].failed(
                self._words[CollectiveWord.RESULT]
            )
        except BaseException as error:
            _raise(self._context, error, operation)


def _pack(head: list[int], steps: Sequence[EnqueuedStep]) -> ctypes.Array[ctypes.c_int64]:
    """The words of a collective: the head, the steps, their places, and room for the items."""
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
    """A message of fixed shape: its operation, its ring end, and its description without the tag."""

    name: OpCode
    end: RingEnd
    message: Message


class MessageCall:
    """Messages of fixed shapes that start together, each through its own ring end.

    Attributes:
        ends: the ring ends.
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
        """Enqueue them on a stream; other arguments, result and errors as in `CollectiveCall.run`.

        Args:
            items: for each message the array's address, the tag and the call site.
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
        """The operations that were recorded last."""
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
