"""Messages of fixed shapes through one ring end each, launched by compiled code for as long as nothing else changes.

The way that all transfers go, `GpuStream.transfer`, looks what a launch must wait for and how much room it has. It arms
what it has launched for the stream that it was on; from then on compiled code launches the next of the kind there.
Whatever changes the answers disarms it: a transfer of a ring on another stream, or launches that take more or less of the
device.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

from xvcomm.backends.gpu.kernels import Prepared, asked_capturing, fill, launched, recorded
from xvcomm.jit.atomics import load, store
from xvcomm.jit.ccall import call_11, let_go, take_back
from xvcomm.jit.compile import compiling, native

NOBODY = -1
"""In place of a stream's handle: not armed."""


class Word(enum.IntEnum):
    """Words of messages that are launched together."""

    PREPARED = 0  # address of the launch's words
    ROOM = 1  # state of the device's room when it was armed
    ROOM_NOW = 2  # address of that state
    WHERE = 3  # the vendor's: what is current on this thread
    HERE = 4  # what must be
    ANSWER = 5
    COUNT = 6  # how many messages
    FIRST = 7  # the words of the ring ends


class EndWord(enum.IntEnum):
    """Words of a ring end."""

    COUNTER = 0  # address of `RingEnd.counter`
    ARMED = 1  # address of the handle of the stream that it is armed for
    EVENT = 2  # recorded after its newest message


_PREPARED, _ROOM, _ROOM_NOW, _WHERE, _HERE, _ANSWER, _COUNT, _FIRST = (8 * int(w) for w in Word)
_COUNTER, _ARMED, _EVENT = (8 * int(w) for w in EndWord)
_END = 8 * len(EndWord)
_ITEM = 24


def _ready(words: int, stream: int, _: int) -> int:
    """Whether the messages may be launched on a stream."""
    first = words + _FIRST
    for end in range(first, first + load(words + _COUNT) * _END, _END):
        if load(load(end + _ARMED)) != stream:
            return 0
    if load(load(words + _ROOM_NOW)) != load(words + _ROOM):
        return 0
    answer = words + _ANSWER
    store(answer, 0)
    thread = let_go()
    code = call_11(load(words + _WHERE), answer, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    if code == 0:
        code = asked_capturing(load(words + _PREPARED), stream)
    take_back(thread)
    return 1 if code == 0 and load(answer) == load(words + _HERE) else 0


def _launch(words: int, items: int, _: int, stream: int, __: int) -> int:
    """Launch those that are ready; at `items` are the words of each, of which the first are its array and its tag.

    Returns:
        0, or what one of the vendor's functions gave.
    """
    prepared, first, count = load(words + _PREPARED), words + _FIRST, load(words + _COUNT)
    ends = range(first, first + count * _END, _END)
    thread = let_go()
    for number in range(count):
        item = items + number * _ITEM
        fill(prepared, number, load(item), load(item + 8))
    code = launched(prepared, stream)
    for end in ends:
        if code == 0:
            code = recorded(prepared, stream, load(end + _EVENT))
    take_back(thread)
    if code == 0:
        for end in ends:
            counter = load(end + _COUNTER)
            store(counter, load(counter) + 1)
    return code


with compiling():
    READY = native("int64(int64, int64, int64)", _ready)
    LAUNCH = native("int64(int64, int64, int64, int64, int64)", _launch)


class ArmedMessages:
    """Messages as compiled code launches them together.

    Args:
        ends: of each its ring end: the address of `RingEnd.counter`, and that of the handle that it is armed for, or of
            NOBODY.
        room: address of a word that changes with the room that launches have.
        where: address of the vendor's function that says what is current on a thread; see `Runtime.addresses`.
        here: what it says on the rings' device.

    Attributes:
        address: what READY and LAUNCH take.
    """

    __slots__ = ("_prepared", "_words", "address")

    def __init__(self, ends: Sequence[tuple[int, int]], room: int, where: int, here: int) -> None:
        words = [0, NOBODY, room, where, here, 0, len(ends)]
        for counter, armed in ends:
            words += counter, armed, 0
        self._words = (ctypes.c_int64 * len(words))(*words)
        self.address = ctypes.addressof(self._words)
        self._prepared: Prepared | None = None

    def arm(self, prepared: Prepared, events: Sequence[int], room: int) -> None:
        """Say how they are to be launched, as long as there is the same room."""
        self._prepared = prepared
        self._words[Word.PREPARED], self._words[Word.ROOM] = prepared.address, room
        for number, event in enumerate(events):
            self._words[Word.FIRST + number * len(EndWord) + EndWord.EVENT] = event
