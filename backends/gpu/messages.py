"""Messages of fixed shapes through one ring end each, launched by compiled code as long as the circumstances do not change.

The general path, `GpuStream.transfer`, determines what a launch must wait for and how many blocks it may use. It arms the
messages that it has launched for their stream; from then on compiled code launches the next ones of the same shape there. They
are disarmed when the answers change: by a transfer of the ring on another stream, or by launches that use more or less of the
device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from xvcomm.abc.launch import ITEM
from xvcomm.backends.gpu.kernels import Prepared, asked_capturing, fill, launched, prepared_at, recorded
from xvcomm.jit.atomics import load, store
from xvcomm.jit.ccall import call_3, call_11, let_go, take_back
from xvcomm.jit.compile import compiling, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import CARRIER

NOBODY = -1
"""In place of a stream's handle: not armed."""


_MESSAGES = np.dtype([
    ("prepared", "i8"),  # address of the `PREPARED` launch
    ("room", "i8"),  # version of the device's `Room` when it was armed
    ("room_now", "i8"),  # address of the current version
    ("where", "i8"),  # the vendor's function that returns the current device or context
    ("here", "i8"),  # the value that it must return
    ("answer", "i8"),
    ("count", "i8"),  # number of messages
    ("ends", "i8"),  # address of an `_END` for each
])  # fmt: skip
_END = np.dtype([
    ("counter", "i8"),  # address of `RingEnd.counter`
    ("carrier", "i8"),  # `RingEnd.carrier`
    ("armed", "i8"),  # address of the handle of the stream that it is armed for
    ("replays", "i8"),  # `RingEnd.replays`
    ("turn", "i8"),  # `RingEnd.turn`
    ("event", "i8"),  # event recorded after its newest message
])  # fmt: skip
_Messages, _End = python_type(_MESSAGES), python_type(_END)
_messages_at, _end_at, _item_at, _carrier_at = (compiled_at(kind) for kind in (_MESSAGES, _END, ITEM, CARRIER))


def _ready(address: int, stream: int, _: int) -> int:
    """Whether the messages may be launched on a stream."""
    messages = _messages_at(address)
    for i in range(messages.count):
        if load(_end_at(messages.ends, i).armed) != stream:
            return 0
    if load(messages.room_now) != messages.room:
        return 0
    messages.answer = 0
    thread = let_go()
    code = call_11(messages.where, address_of(messages, "answer"), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    if code == 0:
        code = asked_capturing(prepared_at(messages.prepared), stream)
    take_back(thread)
    return 1 if code == 0 and messages.answer == messages.here else 0


@register_jitable
def _catch_up(end: Any) -> None:
    """Count the messages of graphs that have finished: the host does not see them start."""
    if load(end.replays) != 0:
        store(end.counter, max(load(end.counter), load(end.turn)))


def _launch(address: int, items: int, _: int, stream: int, __: int) -> int:
    """Launch messages that are ready; `items` is the address of an `ITEM` for each.

    Returns:
        0, or an error code of the vendor.
    """
    messages = _messages_at(address)
    prepared, thread = prepared_at(messages.prepared), let_go()
    for i in range(messages.count):
        item = _item_at(items, i)
        fill(prepared, i, item.address, item.apart, item.tag)
        _catch_up(_end_at(messages.ends, i))
    code = launched(prepared, stream)
    for i in range(messages.count):
        if code == 0:
            code = recorded(prepared, stream, _end_at(messages.ends, i).event)
    take_back(thread)
    if code == 0:
        for i in range(messages.count):
            end = _end_at(messages.ends, i)
            store(end.counter, load(end.counter) + 1)
            if end.carrier != 0:
                call_3(_carrier_at(end.carrier).wake, end.carrier, 0, 0)
    return code


with compiling():
    READY = native("int64(int64, int64, int64)", _ready)
    LAUNCH = native("int64(int64, int64, int64, int64, int64)", _launch)


class ArmedMessages:
    """Messages that compiled code launches together.

    Args:
        ends: for each message's ring end `counter`, `carrier`, the address of the handle that it is armed for, or of NOBODY,
            `replays` and `turn`.
        room: address of the version of `Room`.
        where: address of the vendor's function that returns the current device or context of a thread; see `Runtime.addresses`.
        here: its value for the rings' device.

    Attributes:
        address: argument of READY and LAUNCH.
    """

    __slots__ = ("_ends", "_prepared", "_record", "address")

    def __init__(self, ends: Sequence[tuple[int, int, int, int, int]], room: int, where: int, here: int) -> None:
        self._ends = (_End * len(ends))(*ends)
        self._record = _Messages(0, NOBODY, room, where, here, 0, len(ends), ctypes.addressof(self._ends))
        self.address = ctypes.addressof(self._record)
        self._prepared: Prepared | None = None

    def arm(self, prepared: Prepared, events: Sequence[int], room: int) -> None:
        """Set the launch to use, as long as the version of `Room` does not change."""
        self._prepared = prepared
        self._record.prepared, self._record.room = prepared.address, room
        for end, event in zip(self._ends, events, strict=True):
            end.event = event
