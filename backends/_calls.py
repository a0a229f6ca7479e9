"""NCCL's and RCCL's collectives by their functions' addresses: prepared once for a shape, called from compiled code.

Their signatures are equal. What a call shares with its communicator lies in two words, by which a thread that watches
knows that somebody is inside the library, and until when.
"""

from __future__ import annotations

import enum

import numpy as np

from xvcomm.abc.device import CAPTURED
from xvcomm.atomics import full_fence, load, load_acquire, store, store_release
from xvcomm.backends._kernels import CAPTURING, is_capturing
from xvcomm.calling import call_11, let_go, take_back
from xvcomm.jit import compiling, native
from xvcomm.opcode import OpCode

FUNCTIONS = {
    OpCode.ALL_REDUCE: "ncclAllReduce", OpCode.BARRIER: "ncclAllReduce", OpCode.REDUCE_SCATTER: "ncclReduceScatter",
    OpCode.ALL_GATHER: "ncclAllGather", OpCode.BROADCAST: "ncclBroadcast",
}  # fmt: skip
"""Which of the library's functions an operation is one call of."""

STOPPED = -1
"""Beside the library's result codes: the abort word is set, and the library was not called."""


class State(enum.IntEnum):
    """Words of a communicator."""

    ABORT = 0  # the abort word
    INSIDE = 1  # the deadline of the call that is inside, the bits of a float; 0 while nobody is


class Word(enum.IntEnum):
    """Words of a prepared call."""

    STATE = 0  # address of the communicator's
    FUNCTION = 1
    ASK = 2  # the vendor's, whether a stream is capturing
    STATUS = 3  # and its answer
    STREAM = 4  # which argument is the stream
    ARGUMENTS = 5  # eight, of which the first two are the arrays


_ABORT, _INSIDE = (8 * int(w) for w in State)
_STATE, _FUNCTION, _ASK, _STATUS, _STREAM, _ARGUMENTS = (8 * int(w) for w in Word)
_COUNT = 8


def _enqueue(words: int, src: int, dst: int, stream: int, deadline: int) -> int:
    """Call the library, with the interpreter lock let go; gives its result code, CAPTURED or STOPPED."""
    state, a = load(words + _STATE), words + _ARGUMENTS
    store_release(state + _INSIDE, deadline)
    full_fence()
    if load_acquire(state + _ABORT) != 0:
        store_release(state + _INSIDE, 0)
        return STOPPED
    store(a, src)
    store(a + 8, dst)
    store(a + 8 * load(words + _STREAM), stream)
    thread = let_go()
    captured = is_capturing(load(words + _ASK), words + _STATUS, stream) == CAPTURING
    code: int = call_11(
        load(words + _FUNCTION), load(a), load(a + 8), load(a + 16), load(a + 24), load(a + 32), load(a + 40), load(a + 48),
        load(a + 56), 0, 0, 0,
    )  # fmt: skip
    take_back(thread)
    store_release(state + _INSIDE, 0)
    return CAPTURED if code == 0 and captured else code


with compiling():
    ENQUEUE = native("int64(int64, int64, int64, int64, int64)", _enqueue)
    """Address of what calls the library with a `prepared` call: its address, two arrays, a stream, the bits of a deadline."""


def prepared(state: int, function: int, ask: int, *arguments: int) -> np.ndarray:
    """A call's words.

    Args:
        state: address of the communicator's words.
        function: the library's.
        ask: the vendor's, whether a stream is capturing; see `Runtime.addresses`.
        arguments: all that come between the arrays and the stream, which is the last one.
    """
    words = np.zeros(Word.ARGUMENTS + _COUNT, np.int64)
    first = Word.ARGUMENTS + 2
    words[[Word.STATE, Word.FUNCTION, Word.ASK, Word.STREAM]] = state, function, ask, 2 + len(arguments)
    words[first : first + len(arguments)] = arguments
    return words
