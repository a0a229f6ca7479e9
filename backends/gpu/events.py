"""Ordering between streams in compiled code: wait for another stream, record an event, make other streams wait for it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from xvcomm.backends.gpu.guard import on_device
from xvcomm.backends.gpu.kernels import is_capturing
from xvcomm.backends.gpu.pools import Event, EventPool
from xvcomm.backends.gpu.vendor import Runtime
from xvcomm.jit.ccall import call_11, let_go, take_back
from xvcomm.jit.compile import compiling, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type

ELSEWHERE = -3
"""Result besides the vendors' codes, which are not negative: another device is current on the thread."""


_EVENTS = np.dtype([
    ("ask", "i8"),  # the first four: the vendor's functions, see `Addresses`
    ("record", "i8"),
    ("wait", "i8"),
    ("where", "i8"),
    ("here", "i8"),  # the value that must be current
    ("fork", "i8"),  # the event that the stream waits for before it begins
    ("answer", "i8"),
    ("status", "i8"),
])  # fmt: skip
_Events, _events_at = python_type(_EVENTS), compiled_at(_EVENTS)


@register_jitable
def _elsewhere(events: Any) -> bool:
    """Whether handles of default streams refer to another device; called with the interpreter lock, which protects `answer`."""
    events.answer = 0
    code = call_11(events.where, address_of(events, "answer"), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    return code != 0 or events.answer != events.here


@register_jitable
def _capturing(events: Any, stream: int) -> int:
    return is_capturing(events.ask, address_of(events, "status"), stream)


@register_jitable
def _recorded(events: Any, event: int, stream: int) -> int:
    return call_11(events.record, event, stream, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@register_jitable
def _waits(events: Any, stream: int, event: int) -> int:
    return call_11(events.wait, stream, event, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def _branch(address: int, behind: int, stream: int) -> int:
    events = _events_at(address)
    if _elsewhere(events):
        return ELSEWHERE
    thread = let_go()
    code = _capturing(events, behind)
    if code == 0:
        code = _capturing(events, stream)
    if code == 0:
        code = _recorded(events, events.fork, behind)
    if code == 0:
        code = _waits(events, stream, events.fork)
    take_back(thread)
    return code


def _record(address: int, event: int, stream: int) -> int:
    thread = let_go()
    code: int = _recorded(_events_at(address), event, stream)
    take_back(thread)
    return code


def _follow(address: int, event: int, stream: int) -> int:
    events = _events_at(address)
    if _elsewhere(events):
        return ELSEWHERE
    thread = let_go()
    code: int = _capturing(events, stream)  # a wait for what is outside would spoil the graph
    if code == 0:
        code = _waits(events, stream, event)
    take_back(thread)
    return code


with compiling():
    BRANCH = native("int64(int64, int64, int64)", _branch)
    RECORD = native("int64(int64, int64, int64)", _record)
    FOLLOW = native("int64(int64, int64, int64)", _follow)


class StreamEvents:
    """Events on one stream, for compiled code. Created while the device is current on the thread.

    Args:
        place: see `Kernels.place`.
        events: of this stream.

    Attributes:
        address: argument of BRANCH, RECORD and FOLLOW.
    """

    def __init__(self, runtime: Runtime, index: int, place: tuple[int, int], events: EventPool) -> None:
        self.runtime, self.index, self._events = runtime, index, events
        self._fork = self._events.take()
        calls = runtime.addresses()
        self._record = _Events(calls.capturing, calls.record, calls.wait, *place, self._fork.handle)
        self.address = ctypes.addressof(self._record)

    def take(self) -> Event:
        """An event that compiled code will record on the stream."""
        return self._events.find() or self._take_another()

    @on_device
    def _take_another(self) -> Event:
        return self._events.take()
