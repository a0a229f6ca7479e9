"""Ordering between streams in compiled code: wait for another stream, record an event, make other streams wait for it."""

from __future__ import annotations

import ctypes
import enum

from numba.extending import register_jitable

from xvcomm.backends.gpu.guard import on_device
from xvcomm.backends.gpu.kernels import is_capturing
from xvcomm.backends.gpu.pools import Event, EventPool
from xvcomm.backends.gpu.vendor import Runtime
from xvcomm.jit.atomics import load, store
from xvcomm.jit.ccall import call_11, let_go, take_back
from xvcomm.jit.compile import compiling, native

ELSEWHERE = -3
"""Result besides the vendors' codes, which are not negative: another device is current on the thread."""


class Word(enum.IntEnum):
    """Words of one stream's events."""

    ASK = 0  # the first four: the vendor's functions, see `Addresses`
    RECORD = 1
    WAIT = 2
    WHERE = 3
    HERE = 4  # the value that must be current
    FORK = 5  # the event that the stream waits for before it begins
    ANSWER = 6
    STATUS = 7


_ASK, _RECORD, _WAIT, _WHERE, _HERE, _FORK, _ANSWER, _STATUS = (8 * int(w) for w in Word)


@register_jitable
def _elsewhere(words: int) -> bool:
    """Whether handles of default streams refer to another device; called with the interpreter lock, which protects the answer's
    word.
    """
    answer = words + _ANSWER
    store(answer, 0)
    code = call_11(load(words + _WHERE), answer, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return code != 0 or load(answer) != load(words + _HERE)


@register_jitable
def _recorded(words: int, event: int, stream: int) -> int:
    return call_11(load(words + _RECORD), event, stream, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@register_jitable
def _waits(words: int, stream: int, event: int) -> int:
    return call_11(load(words + _WAIT), stream, event, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def _branch(words: int, behind: int, stream: int) -> int:
    if _elsewhere(words):
        return ELSEWHERE
    thread = let_go()
    code = is_capturing(load(words + _ASK), words + _STATUS, behind)
    if code == 0:
        code = is_capturing(load(words + _ASK), words + _STATUS, stream)
    if code == 0:
        code = _recorded(words, load(words + _FORK), behind)
    if code == 0:
        code = _waits(words, stream, load(words + _FORK))
    take_back(thread)
    return code


def _record(words: int, event: int, stream: int) -> int:
    thread = let_go()
    code: int = _recorded(words, event, stream)
    take_back(thread)
    return code


def _follow(words: int, event: int, stream: int) -> int:
    if _elsewhere(words):
        return ELSEWHERE
    thread = let_go()
    code: int = is_capturing(
        load(words + _ASK), words + _STATUS, stream
    )  # a wait for what is outside would spoil the graph
    if code == 0:
        code = _waits(words, stream, event)
    take_back(thread)
    return code


with compiling():
    BRANCH = native("int64(int64, int64, int64)", _branch)
    RECORD = native("int64(int64, int64, int64)", _record)
    FOLLOW = native("int64(int64, int64, int64)", _follow)


class StreamEvents:
    """Events on one stream, for compiled code. Created while the device is current on the thread.

    Args:
        runtime: the vendor's functions.
        index: index of the device.
        stream: the stream's handle.
        place: see `Kernels.place`.
        at_once: number of events to create when the pool is empty.

    Attributes:
        address: argument of BRANCH, RECORD and FOLLOW.
    """

    def __init__(self, runtime: Runtime, index: int, stream: int, place: tuple[int, int], at_once: int) -> None:
        self.runtime, self.index = runtime, index
        self._events = EventPool(runtime, stream, at_once)
        self._fork = self._events.take()
        calls = runtime.addresses()
        words = calls.capturing, calls.record, calls.wait, *place, self._fork.handle, 0, 0
        self._words = (ctypes.c_int64 * len(Word))(*words)
        self.address = ctypes.addressof(self._words)

    def take(self) -> Event:
        """An event that compiled code will record on the stream."""
        return self._events.take() if self._events.free else self._take_another()

    @on_device
    def _take_another(self) -> Event:
        return self._events.take()
