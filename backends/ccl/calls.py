"""Calls of NCCL and RCCL by address: prepared once per shape of an operation, made by compiled code.

The signatures of both libraries are equal. Two words of the communicator tell the watchdog whether a call is inside the
library, and its deadline.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import numpy as np
from numba.extending import register_jitable

from xvcomm.abc.launch import CAPTURED
from xvcomm.backends.ccl.routes import At, LibraryCall
from xvcomm.backends.gpu.kernels import CAPTURING, is_capturing
from xvcomm.jit.atomics import full_fence, load, load_acquire, store, store_release
from xvcomm.jit.ccall import call_11, let_go, take_back
from xvcomm.jit.compile import compiling, native

_FUNCTIONS = {
    "all_reduce": "ncclAllReduce", "reduce": "ncclReduce", "reduce_scatter": "ncclReduceScatter",
    "all_gather": "ncclAllGather", "broadcast": "ncclBroadcast", "send": "ncclSend", "recv": "ncclRecv",
}  # fmt: skip

STOPPED = -1
"""Result besides the library's codes: the abort word is set, and the library was not called."""


class State(enum.IntEnum):
    """Words of a communicator."""

    ABORT = 0  # the abort word
    INSIDE = 1  # deadline of the call that is inside the library, as bits of a float; 0 if none is


class Word(enum.IntEnum):
    """Words of prepared calls that are made together."""

    STATE = 0  # address of the communicator's words
    ASK = 1  # the vendor's function that tells whether a stream is being captured
    STATUS = 2  # and its answer
    BEGIN = 3  # the library's ncclGroupStart and ncclGroupEnd
    END = 4
    COUNT = 5  # number of calls
    FIRST = 6  # the words of each call


class CallWord(enum.IntEnum):
    """Words of a call."""

    FUNCTION = 0
    STREAM = 1  # index of the argument that is the stream
    ARRAY = 2  # array of the first argument: 0 for the input, 1 for the output
    OFFSET = 3  # and its offset in bytes
    SECOND = 4  # 1 if the second argument is an array too
    OTHER_ARRAY = 5
    OTHER_OFFSET = 6
    ARGUMENTS = 7  # eight


_ABORT, _INSIDE = (8 * int(w) for w in State)
_STATE, _ASK, _STATUS, _BEGIN, _END, _COUNT, _FIRST = (8 * int(w) for w in Word)
_FUNCTION, _STREAM, _PLACE, _, _SECOND, _OTHER, _, _ARGUMENTS = (8 * int(w) for w in CallWord)
_MOST = 8
_CALL = _ARGUMENTS + 8 * _MOST
_NULL = 2  # a null pointer instead of an array


@register_jitable
def _address(place: int, src: int, dst: int) -> int:
    array, offset = load(place), load(place + 8)
    if array == _NULL:
        return 0
    return (src if array == 0 else dst) + offset


@register_jitable
def _one(call: int, src: int, dst: int, stream: int) -> int:
    """Make one call of the library."""
    a = call + _ARGUMENTS
    store(a, _address(call + _PLACE, src, dst))
    if load(call + _SECOND) != 0:
        store(a + 8, _address(call + _OTHER, src, dst))
    store(a + 8 * load(call + _STREAM), stream)
    return call_11(
        load(call + _FUNCTION), load(a), load(a + 8), load(a + 16), load(a + 24), load(a + 32), load(a + 40), load(a + 48),
        load(a + 56), 0, 0, 0,
    )  # fmt: skip


@register_jitable
def _all(words: int, src: int, dst: int, stream: int) -> int:
    """Make all calls, as a group if there are several."""
    count, first, code = load(words + _COUNT), words + _FIRST, 0
    if count > 1:
        code = call_11(load(words + _BEGIN), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    for call in range(first, first + count * _CALL, _CALL):
        if code == 0:
            code = _one(call, src, dst, stream)
    if count > 1:
        ended = call_11(load(words + _END), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        code = ended if ended != 0 else code
    return code


def _enqueue(words: int, src: int, dst: int, stream: int, deadline: int) -> int:
    """Call the library without the interpreter lock; returns its result code, CAPTURED or STOPPED."""
    state = load(words + _STATE)
    store_release(state + _INSIDE, deadline)
    full_fence()
    if load_acquire(state + _ABORT) != 0:
        store_release(state + _INSIDE, 0)
        return STOPPED
    thread = let_go()
    captured = is_capturing(load(words + _ASK), words + _STATUS, stream) == CAPTURING
    code: int = _all(words, src, dst, stream)
    take_back(thread)
    store_release(state + _INSIDE, 0)
    return CAPTURED if code == 0 and captured else code


with compiling():
    ENQUEUE = native("int64(int64, int64, int64, int64, int64)", _enqueue)
    """Address of the function that makes `prepared` calls. Arguments: their address, input and output, a stream, the bits of a
    deadline.
    """


def prepared(
    state: int, ask: int, calls: Sequence[LibraryCall], address: Callable[[str], int], comm: int
) -> np.ndarray:
    """The words of calls that are made together.

    Args:
        state: address of the communicator's words.
        ask: the vendor's function that tells whether a stream is being captured; see `Runtime.addresses`.
        calls: the calls.
        address: returns the address of a function of the library.
        comm: handle of the library's communicator.
    """
    group = [address("ncclGroupStart"), address("ncclGroupEnd")] if len(calls) > 1 else [0, 0]
    functions = {name: address(_FUNCTIONS[name]) for name in {call.name for call in calls}}
    words = [state, ask, 0, *group, len(calls)]
    for name, places, rest in calls:
        arguments, second = [0] * len(places) + [*rest, comm], len(places) > 1
        words += functions[name], len(arguments), *_place(places[0]), second, *_place(places[-1])
        words += [*arguments, *[0] * (_MOST - len(arguments))]
    return np.array(words, np.int64)


def _place(at: At | None) -> tuple[int, int]:
    return (_NULL, 0) if at is None else at
