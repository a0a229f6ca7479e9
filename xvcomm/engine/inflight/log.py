"""The launch log: operations that compiled code has enqueued on a stream, as plain records until the tracker takes them.

An operation that succeeds never becomes a Python object: its record in the flight recorder is ended by number. An
`Operation` is made of one only for an error message.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from xvcomm.abc.device import Event
from xvcomm.abc.launch import EnqueuedEvents
from xvcomm.jit.atomics import copy_bytes, load
from xvcomm.jit.ccall import call_3
from xvcomm.jit.compile import brief, compiling
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import MESSAGE, Message, RingEnd
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.types.opcode import OpCode

ROOM = 64
"""Operations that share one event of their stream, because recording an event takes time."""

APART = 0.2
"""Largest difference in seconds between the deadlines of operations that share an event: the earliest one counts for all."""

_ENTRIES = 2 * ROOM
"""Twice the room: a collective and messages may both find room, each under its own lock, before either is logged."""


ENTRY = np.dtype([
    ("name", "i8"),
    ("peer", "i8"),
    ("channel", "i8"),
    ("counter", "i8"),  # `RingEnd.counter` of the ring end that it uses; else 0
    ("record", "i8"),  # number in the flight recorder; inverted if the communicator was aborted
    ("sequence", "i8"),
    ("following", "i8"),  # number of the next message of that ring end
    ("message", MESSAGE),
])  # fmt: skip
"""An operation, in the log or before."""

_LOG = np.dtype([
    ("function", "i8"),  # records the event; 0 if Python does
    ("argument", "i8"),
    ("event", "i8"),
    ("count", "i8"),
    ("deadline", "f8"),  # the earliest of the operations
    ("entries", ENTRY, (_ENTRIES,)),
])  # fmt: skip
_Log, _log_at, _entry_at = python_type(_LOG), compiled_at(_LOG), compiled_at(ENTRY)
_ENTRY_BYTES = ENTRY.itemsize


@register_jitable
def fits(log: int, entries: int, deadline: float) -> bool:
    """Whether the log has room for so many entries, and its operations have about the same deadline."""
    head = _log_at(log)
    if head.count + entries > ROOM:
        return False
    free = head.count == 0 and head.deadline == math.inf
    return free or head.deadline == deadline or abs(deadline - head.deadline) < APART


@register_jitable
def record_event(log: int, stream: int) -> int:
    """Record an event after the operation to be logged, on a stream that may be destroyed later; 0, or the device's error."""
    head = _log_at(log)
    if head.function == 0:
        return 0
    while True:
        event = head.event
        code: int = call_3(head.function, head.argument, event, stream)
        if code != 0 or event == head.event:  # else the log was taken meanwhile, with this event
            return code


@register_jitable
def log_operations(log, entries, count, sequence, deadline):  # type: ignore[no-untyped-def]
    """Append operations with this number; the caller has checked that they fit. Returns the number of entries.

    Args:
        entries: address of `count` records of dtype `ENTRY`.
        deadline: `Deadline.at`.
    """
    head = _log_at(log)
    first = address_of(head, "entries") + head.count * _ENTRY_BYTES
    copy_bytes(first, entries, count * _ENTRY_BYTES)
    for i in range(count):
        entry = _entry_at(first, i)
        entry.sequence, entry.following = sequence, load(entry.counter) if entry.counter != 0 else 0
    head.deadline = min(head.deadline, deadline)
    head.count += count
    return head.count


def _read(log: int, into: int, take: bool, event: int) -> int:
    head = _log_at(log)
    count: int = head.count
    begin = address_of(head, "deadline")
    copy_bytes(into + (begin - log), begin, address_of(head, "entries") - begin + count * _ENTRY_BYTES)
    if take:
        head.count, head.deadline, head.event = 0, math.inf, event
    return count


with compiling():
    _read_kernel = brief("int64(int64, int64, boolean, int64)")(_read)


Ends = list[tuple[RingEnd, int, Operation]]
"""Ring ends that operations use: each with the number of the message after the operation, and the operation."""


class LoggedOperations:
    """Operations taken from a launch log, in order. A collective across a border has one more entry for each ring end.

    Args:
        entries: records of dtype `ENTRY`.

    Attributes:
        event: the event after them, if compiled code has recorded one.
        deadline: the earliest of their deadlines, on the monotonic clock.
        records: their numbers in the flight recorder.
        collective: whether any of them is a collective.
    """

    __slots__ = ("_counters", "_entries", "_rings", "collective", "deadline", "event", "records")

    def __init__(
        self, entries: np.ndarray[Any, Any], deadline: float, rings: Mapping[int, RingEnd], event: Event | None
    ) -> None:
        self._entries, self.deadline, self._rings, self.event = entries, deadline, rings, event
        self._counters: list[int] = entries["counter"].tolist()
        once = (entries["peer"] != NO_PEER) | (entries["counter"] == 0)
        self.records: list[int] = entries["record"][once].tolist()
        self.collective = 0 in self._counters

    def operations(self) -> list[Operation]:
        """The operations as Python objects."""
        return [
            Operation(OpCode(name), sequence, Message(*message), peer, record, channel)
            for name, peer, channel, _, record, sequence, _, message in self._entries.tolist()
        ]

    def ends(self) -> Ends:
        """The ring ends that they use; see `Ends`."""
        if not any(self._counters):
            return []
        uses = zip(self._counters, self._entries["following"].tolist(), self.operations(), strict=True)
        return [(self._rings[counter], following, operation) for counter, following, operation in uses if counter]

    def arrived(self) -> bool:
        """Whether all their messages have passed their ring ends; False where graphs use these too, so that it is unknown."""
        if not any(self._counters):
            return True
        last = dict(zip(self._counters, self._entries["following"].tolist(), strict=True))
        last.pop(0, None)
        ends = [(self._rings[counter], following) for counter, following in last.items()]
        return all(not end.replayed and end.finished()[0] >= following for end, following in ends)


class LaunchLog:
    """The log of one stream. Compiled code appends, and `take` empties it, both with the interpreter lock held.

    Args:
        rings: ring ends of messages, by `RingEnd.counter`.
        events: how compiled code records events on the stream; None if it records none.

    Attributes:
        address: the log as `log_operation` takes it.
        events: as above.
    """

    __slots__ = ("_event", "_log", "_rings", "address", "events")

    def __init__(self, rings: Mapping[int, RingEnd], events: EnqueuedEvents | None = None) -> None:
        self._rings, self.events = rings, events
        self._event = event = self._another()
        self._log = log = _Log(deadline=math.inf)
        if events is not None and event is not None:
            log.function, log.argument, log.event = events.record, events.argument, event.handle
        self.address = ctypes.addressof(log)

    def __bool__(self) -> bool:
        """Whether it has entries."""
        found: bool = self._log.count > 0
        return found

    @property
    def deadline(self) -> float:
        """The earliest deadline of the operations that will share the event, on the monotonic clock."""
        found: float = self._log.deadline
        return found

    def note_deadline(self, deadline: float) -> None:
        """Take account of an operation that Python has begun, and that will share the event."""
        if deadline < self._log.deadline:
            self._log.deadline = deadline

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
        copy, following = np.empty((), _LOG), self._event
        count = _read_kernel(self.address, copy.ctypes.data, take, 0 if following is None else following.handle)
        return LoggedOperations(copy["entries"][:count], float(copy["deadline"]), self._rings, event) if count else None
