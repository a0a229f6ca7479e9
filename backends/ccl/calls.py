"""Calls of NCCL and RCCL by address: prepared once per shape of an operation, made by compiled code.

The signatures of both libraries are equal. The communicator's `STATE` tells the watchdog whether a call is inside the library,
and its deadline.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xvcomm.abc.launch import CAPTURED
from xvcomm.backends.ccl.routes import LibraryCall
from xvcomm.backends.gpu.kernels import CAPTURING, is_capturing
from xvcomm.jit.atomics import full_fence, load_acquire, store_release
from xvcomm.jit.ccall import call_11, let_go, take_back
from xvcomm.jit.compile import compiling, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type

_FUNCTIONS = {
    "all_reduce": "ncclAllReduce", "reduce": "ncclReduce", "reduce_scatter": "ncclReduceScatter",
    "all_gather": "ncclAllGather", "broadcast": "ncclBroadcast", "send": "ncclSend", "recv": "ncclRecv",
}  # fmt: skip

STOPPED = -1
"""Result besides the library's codes: the abort word is set, and the library was not called."""


_NULL = 2  # a null pointer instead of an array
_MOST = 8

STATE = np.dtype([
    ("abort", "i8"),  # the abort word
    ("inside", "f8"),  # deadline of the call that is inside the library; 0 if none is
])  # fmt: skip
"""Of a communicator."""

_CALL = np.dtype([
    ("function", "i8"),
    ("arrays", "i8"),  # number of arguments that are arrays: the first one or two
    ("places", [("array", "i8"), ("offset", "i8")], 2),  # input (0), output (1) or _NULL, and offset in bytes
    ("stream", "i8"),  # index of the argument that is the stream
    ("arguments", "i8", _MOST),
])  # fmt: skip

_CALLS = np.dtype([
    ("state", "i8"),  # address of the communicator's `STATE`
    ("ask", "i8"),  # the vendor's function that tells whether a stream is being captured
    ("status", "i8"),  # and its answer
    ("begin", "i8"),  # the library's ncclGroupStart and ncclGroupEnd
    ("end", "i8"),
    ("count", "i8"),
    ("first", "i8"),  # address of the `_CALL` records
])  # fmt: skip

State = python_type(STATE)
_Call, _Calls = python_type(_CALL), python_type(_CALLS)
_state_at, _call_at, _calls_at = compiled_at(STATE), compiled_at(_CALL), compiled_at(_CALLS)


@register_jitable
def _address(place: Any, src: int, dst: int) -> int:
    if place.array == _NULL:
        return 0
    return (src if place.array == 0 else dst) + place.offset


@register_jitable
def _one(call: Any, src: int, dst: int, stream: int) -> int:
    """Make one call of the library."""
    a = call.arguments
    for i in range(call.arrays):
        a[i] = _address(call.places[i], src, dst)
    a[call.stream] = stream
    return call_11(call.function, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], 0, 0, 0)


@register_jitable
def _all(calls: Any, src: int, dst: int, stream: int) -> int:
    """Make all calls, as a group if there are several."""
    code = 0
    if calls.count > 1:
        code = call_11(calls.begin, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    for i in range(calls.count):
        if code == 0:
            code = _one(_call_at(calls.first, i), src, dst, stream)
    if calls.count > 1:
        ended = call_11(calls.end, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        code = ended if ended != 0 else code
    return code


def _enqueue(address: int, src: int, dst: int, stream: int, deadline: int) -> int:
    """Call the library without the interpreter lock; returns its result code, CAPTURED or STOPPED."""
    calls = _calls_at(address)
    state = _state_at(calls.state)
    store_release(address_of(state, "inside"), deadline)
    full_fence()
    if load_acquire(address_of(state, "abort")) != 0:
        store_release(address_of(state, "inside"), 0)
        return STOPPED
    thread = let_go()
    captured = is_capturing(calls.ask, address_of(calls, "status"), stream) == CAPTURING
    code: int = _all(calls, src, dst, stream)
    take_back(thread)
    store_release(address_of(state, "inside"), 0)
    return CAPTURED if code == 0 and captured else code


with compiling():
    ENQUEUE = native("int64(int64, int64, int64, int64, int64)", _enqueue)
    """Address of the function that makes `prepared` calls, of: their address, input, output, stream, the bits of a deadline."""


def prepared(
    state: int, ask: int, calls: Sequence[LibraryCall], address: Callable[[str], int], comm: int
) -> tuple[int, object]:
    """Prepare calls that are made together; returns the argument of ENQUEUE, and what must be kept as long as it is used.

    Args:
        state: address of the communicator's `STATE`.
        ask: the vendor's function that tells whether a stream is being captured; see `Runtime.addresses`.
        address: returns the address of a function of the library.
    """
    records = (_Call * len(calls))()
    for record, (name, places, rest) in zip(records, calls, strict=True):
        arguments = *([0] * len(places)), *rest, comm
        record.function, record.arrays, record.stream = address(_FUNCTIONS[name]), len(places), len(arguments)
        record.arguments[: len(arguments)] = arguments
        for place, at in zip(record.places, places, strict=False):
            place.array, place.offset = (_NULL, 0) if at is None else at
    begin, end = (address("ncclGroupStart"), address("ncclGroupEnd")) if len(calls) > 1 else (0, 0)
    made = _Calls(state, ask, 0, begin, end, len(calls), ctypes.addressof(records))
    return ctypes.addressof(made), (made, records)
