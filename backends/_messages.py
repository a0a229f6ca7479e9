"""Messages of one shape through one ring end, launched by compiled code for as long as nothing else changes.

The way that all transfers go, `GpuStream.transfer`, looks what a launch must wait for and how much room it has. It arms a
message for the stream that it was on; from then on compiled code launches the next one there. Whatever changes the
answers disarms it: a transfer of the ring on another stream, or launches that take more or less of the device.
"""

from __future__ import annotations

import ctypes
import enum

from xvcomm.atomics import load, store
from xvcomm.backends._kernels import Prepared, asked_capturing, launched
from xvcomm.calling import call_11, let_go, take_back
from xvcomm.jit import compiling, native

NOBODY = -1
"""In place of a stream's handle: not armed."""


class Word(enum.IntEnum):
    """Words of a message."""

    COUNTER = 0  # address of `RingEnd.counter`
    PREPARED = 1  # address of the transfer's words
    EVENT = 2  # that marks the stream behind it
    ARMED = 3  # address of the handle of the stream that the ring is armed for
    ROOM = 4  # state of the device's room when it was armed
    ROOM_NOW = 5  # address of that state
    WHERE = 6  # the vendor's: what is current on this thread
    HERE = 7  # what must be
    ANSWER = 8


_COUNTER, _PREPARED, _EVENT, _ARMED, _ROOM, _ROOM_NOW, _WHERE, _HERE, _ANSWER = (8 * int(w) for w in Word)


def _ready(words: int, stream: int, _: int) -> int:
    """Whether a message may be launched on a stream."""
    if load(load(words + _ARMED)) != stream or load(load(words + _ROOM_NOW)) != load(words + _ROOM):
        return 0
    answer = words + _ANSWER
    store(answer, 0)
    thread = let_go()
    code = call_11(load(words + _WHERE), answer, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    if code == 0:
        code = asked_capturing(load(words + _PREPARED), stream)
    take_back(thread)
    return 1 if code == 0 and load(answer) == load(words + _HERE) else 0


def _launch(words: int, data: int, tag: int, stream: int, _: int) -> int:
    """Launch one that is ready; 0, or what one of the vendor's functions gave."""
    thread = let_go()
    code = launched(load(words + _PREPARED), data, tag, stream, load(words + _EVENT))
    take_back(thread)
    if code == 0:
        counter = load(words + _COUNTER)
        store(counter, load(counter) + 1)
    return code


with compiling():
    READY = native("int64(int64, int64, int64)", _ready)
    LAUNCH = native("int64(int64, int64, int64, int64, int64)", _launch)


class ArmedMessage:
    """A message as compiled code launches it.

    Args:
        counter: see `RingEnd.counter`.
        armed: address of the handle that the ring is armed for, or of NOBODY.
        room: address of a word that changes with the room that launches have.
        where: address of the vendor's function that says what is current on a thread; see `Runtime.addresses`.
        here: what it says on the ring's device.

    Attributes:
        address: what READY and LAUNCH take.
    """

    __slots__ = ("_prepared", "_words", "address")

    def __init__(self, counter: int, armed: int, room: int, where: int, here: int) -> None:
        self._words = (ctypes.c_int64 * len(Word))(counter, 0, 0, armed, NOBODY, room, where, here, 0)
        self.address = ctypes.addressof(self._words)
        self._prepared: Prepared | None = None

    def arm(self, prepared: Prepared, event: int, room: int) -> None:
        """Say how it is to be launched, as long as there is the same room."""
        self._prepared = prepared
        self._words[Word.PREPARED], self._words[Word.EVENT], self._words[Word.ROOM] = prepared.address, event, room
