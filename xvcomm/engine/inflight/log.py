"""The launch log: operations that compiled code has enqueued on a stream, as plain words until the tracker takes them.

An operation that succeeds never becomes a Python object: its record in the flight recorder is ended by number. An
`Operation` is made of the words only for an error message.
"""

from __future__ import annotations

import ctypes
import enum
import math
import struct
from array import array
from collections.abc import Mapping

from numba.extending import register_jitable

from xvcomm.abc.device import Event
from xvcomm.abc.launch import EnqueuedEvents
from xvcomm.jit.atomics import copy_bytes, load, store
from xvcomm.jit.ccall import bits_of, call_3, float_of
from xvcomm.jit.compile import brief, compiling
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.types.opcode import OpCode

ROOM = 64
"""Operations that share one event of their stream, because recording an event takes time."""

APART = 0.2
"""Largest difference in seconds between the deadlines of operations that share an event: the earliest one counts for all."""

_ENTRIES = 2 * ROOM
"""Twice the room: a collective and messages may both find room, each under its own lock, before either is logged."""


class Word(enum.IntEnum):
    """Words of a logged operation."""

    RECORD = 0
    SEQUENCE = 1
    NAME = 2
    PEER = 3
    CHANNEL = 4
    COUNTER = 5  # `RingEnd.counter` of the ring end that it uses; else 0
    FOLLOWING = 6  # number of the next message of that ring end
    MESSAGE = 7  # five words


_SIZE = Word.MESSAGE + 5
_RECORD, _ARGUMENT, _EVENT, _COUNT, _DEADLINE, _FIRST = range(0, 48, 8)
_FLOAT = struct.Struct("=d")
_NEVER = struct.unpack("=q", _FLOAT.pack(math.inf))[0]
_MESSAGE_BYTES, _ENTRY = 40, 8 * int(_SIZE)
_MESSAGE = 8 * int(Word.MESSAGE)
_TAG = _MESSAGE + 24
_BLANK = array("q", bytes(8 * (1 + _ENTRIES * _SIZE)))
_RECORD, _PEER = int(Word.RECORD), int(Word.PEER)
_COUNTER, _FOLLOWING = int(Word.COUNTER), int(Word.FOLLOWING)


@register_jitable
def fits(log: int, entries: int, deadline: float) -> bool:
    """Whether the log has room for so many entries, and its operations have about the same deadline."""
    count, soonest = load(log + _COUNT), load(log + _DEADLINE)
    if count + entries > ROOM:
        return False
    free = count == 0 and soonest == _NEVER
    return free or soonest == bits_of(deadline) or abs(deadline - float_of(soonest)) < APART


@register_jitable
def record_event(log: int, stream: int) -> int:
    """Record an event after the operation to be logged, on a stream that may be destroyed later; 0, or the device's error."""
    function = load(log + _RECORD)
    if function == 0:
        return 0
    while True:
        event = load(log + _EVENT)
        code: int = call_3(function, load(log + _ARGUMENT), event, stream)
        if code != 0 or event == load(log + _EVENT):  # else the log was taken meanwhile, with this event
            return code


@register_jitable
def log_operation(log, record, sequence, name, peer, channel, counter, message, tag, deadline):  # type: ignore[no-untyped-def]
    """Append an operation; the caller has checked that it `fits`. Returns the number of entries.

    Args:
        counter: `RingEnd.counter` of its ring end, or 0.
        message: address of the words of a `Message`, without the tag.
        deadline: the bits of `Deadline.at`, which compare as the deadlines do.
    """
    count = load(log + _COUNT)
    entry = log + _FIRST + count * _ENTRY
    following = load(counter) if counter != 0 else 0
    for i, value in enumerate((record, sequence, name, peer, channel, counter, following)):
        store(entry + 8 * i, value)
    copy_bytes(entry + _MESSAGE, message, _MESSAGE_BYTES)
    store(entry + _TAG, tag)
    if deadline < load(log + _DEADLINE):
        store(log + _DEADLINE, deadline)
    store(log + _COUNT, count + 1)
    return count + 1


def _read(log: int, into: int, take: bool, event: int) -> int:
    count = load(log + _COUNT)
    copy_bytes(into, log + _DEADLINE, _FIRST - _DEADLINE + count * _ENTRY)
    if take:
        store(log + _COUNT, 0)
        store(log + _DEADLINE, _NEVER)
        store(log + _EVENT, event)
    return count


with compiling():
    _read_kernel = brief("int64(int64, int64, boolean, int64)")(_read)


Ends = list[tuple[RingEnd, int, Operation]]
"""Ring ends that operations use: each with the number of the message after the operation, and the operation."""


class LoggedOperations:
    """Operations taken from a launch log, in order. A collective across a border has one more entry for each ring end.

    Args:
        words: the bits of the earliest deadline, then the words of each operation, `count` in all.

    Attributes:
        event: the event after them, if compiled code has recorded one.
        deadline: the earliest of their deadlines, on the monotonic clock.
        records: their numbers in the flight recorder.
        collective: whether any of them is a collective.
    """

    __slots__ = ("_counters", "_end", "_rings", "_words", "collective", "deadline", "event", "records")

    def __init__(self, words: array[int], count: int, rings: Mapping[int, RingEnd], event: Event | None) -> None:
        self._words, self._end, self._rings, self.event = words, 1 + count * _SIZE, rings, event
        (self.deadline,) = _FLOAT.unpack_from(words)
        self._counters = self._each(_COUNTER)
        entries = zip(self._each(_RECORD), self._each(_PEER), self._counters, strict=True)
        self.records = array("q", [record for record, peer, counter in entries if peer != NO_PEER or not counter])
        self.collective = 0 in self._counters

    def operations(self) -> list[Operation]:
        """The operations as Python objects."""
        return [
            Operation(OpCode(name), sequence, Message(*message), peer, record, channel)
            for record, sequence, name, peer, channel, _, _, *message in self._entries()
        ]

    def ends(self) -> Ends:
        """The ring ends that they use; see `Ends`."""
        uses = zip(self._entries(), self.operations(), strict=True)
        return [
            (self._rings[entry[Word.COUNTER]], entry[Word.FOLLOWING], operation)
            for entry, operation in uses if entry[Word.COUNTER]
        ]  # fmt: skip

    def arrived(self) -> bool:
        """Whether all their messages have passed through their ring ends."""
        if not any(self._counters):
            return True
        last = dict(zip(self._counters, self._each(_FOLLOWING), strict=True))
        last.pop(0, None)
        return all(self._rings[counter].finished()[0] >= following for counter, following in last.items())

    def _each(self, word: int) -> array[int]:
        """The same word of every entry."""
        return self._words[1 + word : self._end : _SIZE]

    def _entries(self) -> list[array[int]]:
        return [self._words[at : at + _SIZE] for at in range(1, self._end, _SIZE)]


class LaunchLog:
    """The log of one stream. Compiled code appends, and `take` empties it, both with the interpreter lock held.

    Args:
        rings: ring ends of messages, by `RingEnd.counter`.
        events: how compiled code records events on the stream; None if it records none.

    Attributes:
        address: the log as `log_operation` takes it.
        events: as above.
    """

    __slots__ = ("_event", "_rings", "_words", "address", "events")

    def __init__(self, rings: Mapping[int, RingEnd], events: EnqueuedEvents | None = None) -> None:
        self._rings, self.events = rings, events
        self._event = event = self._another()
        head = (0, 0, 0) if events is None or event is None else (events.record, events.argument, event.handle)
        self._words = (ctypes.c_int64 * (_FIRST // 8 + _ENTRIES * _SIZE))(*head, 0, _NEVER)
        self.address = ctypes.addressof(self._words)

    def __bool__(self) -> bool:
        """Whether it has entries."""
        return self._words[_COUNT // 8] > 0

    @property
    def deadline(self) -> float:
        """The earliest deadline of the operations that will share the event, on the monotonic clock."""
        found: float = _FLOAT.unpack_from(self._words, _DEADLINE)[0]
        return found

    def note_deadline(self, deadline: float) -> None:
        """Take account of an operation that Python has begun, and that will share the event."""
        if deadline < self.deadline:
            _FLOAT.pack_into(self._words, _DEADLINE, deadline)

    def look(self) -> LoggedOperations | None:
        """The entries, which stay; None if there are none."""
        return self._read(self._event, take=False)

    def take(self) -> LoggedOperations | None:
        """Remove and return the entries; later ones get another event."""
        event, self._event = self._event, self._another()
        return self._read(event, take=True)

    def _another(self) -> Event | None:
        return None if self.events is None else self.events.take()

    def _read(self, event: Event | None, *, take: bool) -> LoggedOperations | None:
        words, following = _BLANK[:], self._event
        handle = 0 if following is None else following.handle
        count = _read_kernel(self.address, words.buffer_info()[0], take, handle)
        return LoggedOperations(words, count, self._rings, event) if count else None
