"""Messages of fixed shapes through one ring end each, launched by compiled code as long as the circumstances do not change.

The general path, `GpuStream.transfer`, determines what a launch must wait for and how many blocks it may use. It arms the
messages that it has launched for their stream; from then on compiled code launches the next ones of the same shape there. They
are disarmed when the answers change: by a transfer of the ring on another stream, or by launches that use more or less of the
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
    ROOM = 1  # version of the device's `Room` when it was armed
    ROOM_NOW = 2  # address of the current version
    WHERE = 3  # the vendor's function that returns the current device or context
    HERE = 4  # the value that it must return
    ANSWER = 5
    COUNT = 6  # number of messages
    FIRST = 7  # the words of each ring end


class EndWord(enum.IntEnum):
    """Words of a ring end."""

    COUNTER = 0  # address of `RingEnd.counter`
    ARMED = 1  # address of the handle of the stream that it is armed for
    EVENT = 2  # event recorded after its newest message


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
    """Launch messages that are ready; `items` points to the words of each, the first of which are its array and its tag.

    Returns:
        0, or an error code of the vendor.
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
    """Messages that compiled code launches together.

    Args:
        ends: for each message's ring end: the address of `RingEnd.counter`, and that of the handle that it is armed for, or of
            NOBODY.
        room: address of the version of `Room`.
        where: address of the vendor's function that returns the current device or context of a thread; see `Runtime.addresses`.
        here: its value for the rings' device.

    Attributes:
        address: argument of READY and LAUNCH.
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
        """Set the launch to use, as long as the version of `Room` does not change."""
        self._prepared = prepared
        self._words[Word.PREPARED], self._words[Word.ROOM] = prepared.address, room
        for number, event in enumerate(events):
            self._words[Word.FIRST + number * len(EndWord) + EndWord.EVENT] = event
