"""Large messages that both ends copy concurrently, directly between their arrays, if the system permits it.

The sender writes into the receiver's array from its first byte on, the receiver reads the sender's from the last one on, a
chunk at a time, until they meet: one copy instead of two, by two cores. Each end offers its array in its ledger entry, or not;
both read both entries, so they agree. Only the sender chooses: the first messages of a size class alternate between both
methods, and it offers its array once direct copies have proved faster.

A message that fits the ring does not wait long for its receiver: it is written to the ring as usual, and its sender continues.

An end may give up in the middle, after which its caller may reuse its array. So an end announces each copy, and then checks
whether the other end still takes part. An end that gives up publishes that, revokes the announced copy, and waits for one that
the kernel has begun.
"""

from __future__ import annotations

import ctypes
import threading
from functools import partial
from typing import Any

import numpy as np

from xvcomm.backends.host import processes
from xvcomm.backends.host.processes import ACCESS, PROCESS, TOUCH, copy, entered, exposed, reachable, revoke, verified
from xvcomm.backends.host.tuning import NEVER, TUNING, next_try, note_try
from xvcomm.jit.atomics import compare_and_swap, load_acquire, monotonic, store_release, usleep
from xvcomm.jit.compile import compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import ABORT, CLAIMS, LINE, MEETING, TURNS, RingEnd
from xvcomm.memory.segment import PAGE

LEAST = 512 << 10
"""Minimum bytes of a message for direct copies; below, both methods take as long in a ping-pong between processes."""

PATIENCE_NS = 50_000
"""How long a message that fits the ring waits for its receiver."""
_MARGIN = 8
_GIVE_UP_US, _PAUSE_US = 1_000_000, 100
_LEAST_CHUNK, _MOST_CHUNK = 128 << 10, 512 << 10
_MOST_CHUNKS = 4095
_CLASSES = 24

NOT_YET, STAGED = -1, 0
"""Results of `propose` instead of an address."""


END_LINE = np.dtype([
    ("process", PROCESS),
    ("done", "i8"),  # number of its newest directly copied message, and the chunks of it that this end has copied
    ("touch", TOUCH),  # its current copy from or to the other end
])  # fmt: skip
"""An end's line in page 0 of the ring."""

STATE = np.dtype([
    ("access", ACCESS),
    ("mine", "i8"),  # addresses of the two lines
    ("theirs", "i8"),
    ("ring", "i8"),
    ("their_turn", "i8"),
    ("began", "i8"),  # time at which the sender's current message began to wait, or the receiver's to arrive; else 0
    ("took", "i8"),  # nanoseconds of the receiver's newest message for which it offered its array
    ("trial", "i8"),  # of the sender's current message, if it is a try: 2 * (1 + index of its tuning) + the method; else 0
    ("last_trial", "i8"),  # the same for the previous large message
    ("willing", "i8"),  # whether the receiver had offered its array when the previous large message was complete
    ("aside", ACCESS),  # for a thread that gives up, while another one may be copying
    ("tunings", TUNING, _CLASSES),  # the sender's
])  # fmt: skip
"""Private to an end; functions for other modules take its address, 0 if messages are never copied directly."""

_line_at, _state_at = compiled_at(END_LINE), compiled_at(STATE)
_Line, _State = python_type(END_LINE), python_type(STATE)


def chunk_bytes(nbytes: int) -> int:
    """Bytes that one end claims at a time: an eighth of the message, in whole pages, so that both ends work until the end."""
    eighth = (nbytes + 8 * PAGE - 1) // (8 * PAGE) * PAGE
    least = (nbytes + _MOST_CHUNKS * PAGE - 1) // (_MOST_CHUNKS * PAGE) * PAGE
    return max(least, min(_MOST_CHUNK, max(_LEAST_CHUNK, eighth)))


_chunk_bytes = register_jitable(chunk_bytes)


@register_jitable
def _number(sequence: int) -> int:
    """Number of a message in words that also count chunks; it wraps around only after half a trillion messages."""
    return (sequence + 1) & ((1 << 39) - 1)


@register_jitable
def _reaches(state: Any) -> bool:
    """Whether the other end's memory can be read and written; determined once that end exists."""
    if state.access.reach == 0:
        process = _line_at(state.theirs).process
        if load_acquire(address_of(process, "value")) == 0:
            return False
        state.access.reach = 1 if reachable(state.access, process) else -1
    return state.access.reach > 0


@register_jitable
def _exposed(state: Any, data: int, nbytes: int) -> bool:
    return exposed(state.access, _line_at(state.mine).process, data, nbytes, 0, 0)


@register_jitable
def offer(state: int, data: int, nbytes: int) -> int:
    """Word that a receiver writes to its entry: its array's address, if the sender may write there; else STAGED."""
    if nbytes < LEAST or state == 0 or not _reaches(_state_at(state)):
        return STAGED
    return data if _exposed(_state_at(state), data, nbytes) else STAGED


@register_jitable
def _size_class(nbytes: int) -> int:
    """Number of the tuning of messages of this size."""
    size_class = 0
    while nbytes >= 2 * LEAST and size_class < _CLASSES - 1:
        nbytes //= 2
        size_class += 1
    return size_class


@register_jitable
def _choose(state: Any, nbytes: int) -> bool:
    """Whether a message is copied directly."""
    size_class = _size_class(nbytes)
    tuning = state.tunings[size_class]
    way = next_try(tuning)
    if way >= 0:
        state.trial = 2 * (1 + size_class) + way
        return way == 1
    staged, straight = tuning.best[0], tuning.best[1]
    return straight < staged - staged // _MARGIN


@register_jitable
def _waits(state: Any) -> bool:
    """Whether a sender continues to wait for a receiver that is not there."""
    if state.began == 0:
        state.began = monotonic()
    return monotonic() - state.began < PATIENCE_NS


@register_jitable
def propose(address: int, data: int, nbytes: int, theirs: Any, sequence: int, capacity: int) -> int:
    """Word that a sender writes to its entry: its array's address, or STAGED.

    Args:
        address: of this end's `STATE`, or 0.
        theirs: the receiver's entry.
        capacity: bytes that fit the ring.

    Returns:
        NOT_YET if it should wait a moment for the receiver before it writes an entry.
    """
    if nbytes < LEAST or address == 0:
        return STAGED
    state = _state_at(address)
    if not _reaches(state):
        return STAGED
    there = load_acquire(address_of(theirs, "number")) == sequence + 1
    willing = (theirs.offer if there else state.willing) != 0
    if willing and not there and nbytes <= capacity:
        if _waits(state):
            return NOT_YET
        # An offer would have to wait for the receiver, and programs that send before they receive rely on not waiting.
        willing = False
    state.began = 0
    if not willing or not _choose(state, nbytes):
        return STAGED
    if not _exposed(state, data, nbytes):
        state.trial = 0
        return STAGED
    return data


@register_jitable
def learn(address: int, nbytes: int, theirs: Any, sequence: int) -> None:
    """When a sender's message is complete, record the result of the last try, which the receiver writes to its next entry."""
    if nbytes < LEAST or address == 0:
        return
    state = _state_at(address)
    there = load_acquire(address_of(theirs, "number")) == sequence + 1
    if there and state.last_trial != 0:
        note_try(state.tunings[(state.last_trial >> 1) - 1], state.last_trial & 1, theirs.took)
    willing = there and theirs.offer != 0
    state.willing = willing
    # If the receiver has not come, or offers nothing, its next time belongs to another message.
    state.last_trial = state.trial if willing else 0
    state.trial = 0


@register_jitable
def begin_clock(address: int) -> None:
    """Record the start time of a message for which the receiver offered its array."""
    _state_at(address).began = monotonic()


@register_jitable
def stop_clock(address: int) -> None:
    """Record its duration."""
    if address != 0:
        state = _state_at(address)
        if state.began != 0:
            state.took, state.began = monotonic() - state.began, 0


@register_jitable
def took(address: int) -> int:
    """Word that a receiver writes to its entry beside its offer: the duration of its last message."""
    return _state_at(address).took if address != 0 else 0


@register_jitable
def _claim(claims: int, producer: bool, number: int, chunks: int) -> int:
    """Index of the next chunk for this end: the producer's from the first on, the consumer's from the last on; else -1."""
    while True:
        seen = load_acquire(claims)
        known = seen if seen >> 24 == number else number << 24
        front, back = (known >> 12) & 0xFFF, known & 0xFFF
        if front + back >= chunks:
            return -1
        if compare_and_swap(claims, seen, known + (1 << 12 if producer else 1)) == seen:
            return front if producer else chunks - 1 - back


@register_jitable
def _done(line: Any, number: int) -> int:
    """Chunks of a message that an end has copied."""
    word = load_acquire(address_of(line, "done"))
    return word & 0xFFFFFF if word >> 24 == number else 0


@register_jitable
def copy_next(address: int, producer: bool, sequence: int, mine: int, theirs: int, nbytes: int) -> bool:
    """Copy a chunk that no end has claimed; False if there is none, or it cannot be copied."""
    state = _state_at(address)
    number, chunk = _number(sequence), _chunk_bytes(nbytes)
    index = _claim(state.ring + CLAIMS, producer, number, (nbytes + chunk - 1) // chunk)
    if index < 0:
        return False
    offset, line = index * chunk, _line_at(state.mine)
    if not copy(
        producer, state.access, _line_at(state.theirs).process.pid, mine + offset, theirs + offset,
        min(chunk, nbytes - offset), line.touch, state.their_turn, 0, state.ring + ABORT,
    ):  # fmt: skip
        return False
    store_release(address_of(line, "done"), (number << 24) + _done(line, number) + 1)
    return True


@register_jitable
def through(address: int, sequence: int, nbytes: int) -> bool:
    """Whether both ends together have copied the whole message."""
    state, number, chunk = _state_at(address), _number(sequence), _chunk_bytes(nbytes)
    done = _done(_line_at(state.mine), number) + _done(_line_at(state.theirs), number)
    return done == (nbytes + chunk - 1) // chunk


def _await_untouched(address: int) -> None:
    """Stop the other end from accessing this end's array. This end has published that it gives up."""
    state = _state_at(address)
    theirs, waited = _line_at(state.theirs), 0
    revoke(theirs.touch)
    # The word stays set if the process has died, or was stopped outside of the kernel: a revoked copy cannot begin any more.
    while entered(theirs.touch) and waited < _GIVE_UP_US and verified(state.aside, theirs.process):
        usleep(_PAUSE_US)
        waited += _PAUSE_US


with compiling():
    await_untouched = kernel("void(int64)")(_await_untouched)

_joining = threading.Lock()


def join(end: RingEnd, allowed: bool) -> int:
    """Address of a ring end's words for compiled code; the first call publishes this process to the other end.

    0 if messages may not be copied directly. Thread-safe.
    """
    if not allowed or end.carrier:
        return 0
    if end.kept is None:
        with _joining:
            if end.kept is None:
                end.kept = _introduce(end)
    return ctypes.addressof(end.kept)


def _introduce(end: RingEnd) -> Any:
    """The `STATE` of a ring end, with which the other end can find this process."""
    mine, theirs = (end.address + MEETING + (0 if producer else LINE) for producer in (end.producer, not end.producer))
    turn = end.address + TURNS + (LINE if end.producer else 0)
    state = _State(mine=mine, theirs=theirs, ring=end.address, their_turn=turn)
    for tuning in state.tunings:
        tuning.best[:] = NEVER, NEVER
    processes.introduce(_Line.from_address(mine).process, state.access, True)
    end.gave_up = partial(await_untouched, ctypes.addressof(state))
    return state
