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
import enum
import os
import threading
from functools import partial

import numpy as np
from numba.extending import register_jitable

from xvcomm.backends.host import processes
from xvcomm.backends.host.processes import ACCESS_WORDS, copy, exposed, now, reachable, revoke, verified
from xvcomm.jit.atomics import compare_and_swap, load, load_acquire, store, store_release, usleep
from xvcomm.jit.compile import compiling, kernel
from xvcomm.memory import ring
from xvcomm.memory.ring import ABORT, CLAIMS, LINE, MEETING, TURNS, RingEnd
from xvcomm.memory.segment import PAGE

LEAST = 512 << 10
"""Minimum bytes of a message for direct copies; below, both methods take as long in a ping-pong between processes."""

TRIES = 4
"""Tries of each method per size class; more until they took long enough that no short disturbance can have affected all of
them.
"""
_TRIAL_NS = 20_000_000
PATIENCE_NS = 50_000
"""How long a message that fits the ring waits for its receiver."""
_MARGIN = 8
_GIVE_UP_US, _PAUSE_US = 1_000_000, 100
_NEVER = int(np.iinfo(np.int64).max)
_LEAST_CHUNK, _MOST_CHUNK = 128 << 10, 512 << 10
_MOST_CHUNKS = 4095
_CLASSES = 24

NOT_YET, STAGED = -1, 0
"""Results of `propose` instead of an address."""


class LineWord(enum.IntEnum):
    """Words of an end's line in page 0 of the ring."""

    PROCESS = 0  # its pid
    NONCE = 1  # address of a word in its memory
    VALUE = 2  # value of that word; 0 until the end exists
    DONE = 3  # number of its newest directly copied message, and the chunks of it that this end has copied
    TOUCH = 4  # a `processes.TouchWord`: its current copy from or to the other end


class Word(enum.IntEnum):
    """Private words of an end, after `processes.AccessWord`."""

    MINE = ACCESS_WORDS  # addresses of the two lines
    THEIRS = ACCESS_WORDS + 1
    RING = ACCESS_WORDS + 2
    THEIR_TURN = ACCESS_WORDS + 3
    BEGAN = (
        ACCESS_WORDS + 4
    )  # time at which the sender's current message began to wait, or the receiver's to arrive; else 0

    TOOK = ACCESS_WORDS + 5  # nanoseconds of the receiver's newest message for which it offered its array
    TRIES = ACCESS_WORDS + 6  # tuning (address, plus the method) of which the sender's current message is a try; or 0
    TRIED = ACCESS_WORDS + 7  # the same for the previous large message
    WILLING = (
        ACCESS_WORDS + 8
    )  # whether the receiver had offered its array when the previous large message was complete

    ASIDE = ACCESS_WORDS + 9  # a second `processes.AccessWord`: while a thread gives up, another one may be copying
    TUNINGS = 2 * ACCESS_WORDS + 9


class TuningWord(enum.IntEnum):
    """The sender's comparison of the two methods for messages of about one size."""

    TRIALS = 0  # number of tries begun; -1 once a method is chosen
    SPENT = 1  # nanoseconds of all tries, of the best staged one, of the best direct one
    BEST = 2


_TUNING_WORDS = 4

# Plain integers: numba treats an enum's members as constants only if they are globals.
_PROCESS, _NONCE, _VALUE, _DONE, _TOUCH = (8 * int(w) for w in LineWord)
_MINE, _THEIRS, _RING, _THEIR_TURN, _BEGAN = (8 * int(w) for w in tuple(Word)[:5])
_TOOK, _TRIES, _TRIED, _WILLING, _ASIDE, _TUNINGS = (8 * int(w) for w in tuple(Word)[5:])
_SPENT, _BEST = (8 * int(w) for w in tuple(TuningWord)[1:])
_CLAIMS, _ABORT = CLAIMS, ABORT
_OFFER, _ENTRY_TOOK = 8 * ring.EntryWord.OFFER, 8 * ring.EntryWord.TOOK


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
def _reaches(state: int) -> bool:
    """Whether the other end's memory can be read and written; determined once that end exists."""
    reach = load(state)
    if reach == 0:
        theirs = load(state + _THEIRS)
        value = load_acquire(theirs + _VALUE)
        if value == 0:
            return False
        found = reachable(state, load(theirs + _PROCESS), load(theirs + _NONCE), value)
        reach = 1 if found else -1
        store(state, reach)
    return reach > 0


@register_jitable
def _exposed(state: int, data: int, nbytes: int) -> bool:
    return exposed(state, load(load(state + _MINE) + _PROCESS), data, nbytes, 0, 0)


@register_jitable
def offer(state: int, data: int, nbytes: int) -> int:
    """Word that a receiver writes to its entry: its array's address, if the sender may write there; else STAGED."""
    return data if nbytes >= LEAST and state != 0 and _reaches(state) and _exposed(state, data, nbytes) else STAGED


@register_jitable
def _tuning(state: int, nbytes: int) -> int:
    """Address of the tuning of messages of this size."""
    size_class = 0
    while nbytes >= 2 * LEAST and size_class < _CLASSES - 1:
        nbytes //= 2
        size_class += 1
    return state + _TUNINGS + 8 * _TUNING_WORDS * size_class


@register_jitable
def _choose(state: int, nbytes: int) -> bool:
    """Whether a message is copied directly."""
    tuning = _tuning(state, nbytes)
    trials = load(tuning)
    if trials >= 0 and (trials % 2 == 1 or trials < 2 * TRIES or load(tuning + _SPENT) < _TRIAL_NS):
        store(tuning, trials + 1)
        store(state + _TRIES, tuning + trials % 2)
        return trials % 2 == 1
    store(tuning, -1)
    staged, straight = load(tuning + _BEST), load(tuning + _BEST + 8)
    return straight < staged - staged // _MARGIN


@register_jitable
def _waits(state: int) -> bool:
    """Whether a sender continues to wait for a receiver that is not there."""
    if load(state + _BEGAN) == 0:
        store(state + _BEGAN, now(state))
    return now(state) - load(state + _BEGAN) < PATIENCE_NS


@register_jitable
def propose(state: int, data: int, nbytes: int, theirs: int, sequence: int, capacity: int) -> int:
    """Word that a sender writes to its entry: its array's address, or STAGED.

    Args:
        state: address of this end's words.
        data, nbytes: the array.
        theirs: address of the receiver's entry.
        sequence: number of the message.
        capacity: bytes that fit the ring.

    Returns:
        NOT_YET if it should wait a moment for the receiver before it writes an entry.
    """
    if nbytes < LEAST or state == 0 or not _reaches(state):
        return STAGED
    there = load_acquire(theirs) == sequence + 1
    willing = load(theirs + _OFFER if there else state + _WILLING) != 0
    if willing and not there and nbytes <= capacity:
        if _waits(state):
            return NOT_YET
        # An offer would have to wait for the receiver, and programs that send before they receive rely on not waiting.
        willing = False
    store(state + _BEGAN, 0)
    if not willing or not _choose(state, nbytes):
        return STAGED
    if not _exposed(state, data, nbytes):
        store(state + _TRIES, 0)
        return STAGED
    return data


@register_jitable
def learn(state: int, nbytes: int, theirs: int, sequence: int) -> None:
    """When a sender's message is complete, record the result of the last try, which the receiver writes to its next entry."""
    if nbytes < LEAST or state == 0:
        return
    there = load_acquire(theirs) == sequence + 1
    way = load(state + _TRIED) % 8
    tuning = load(state + _TRIED) - way
    if there and tuning != 0:
        took, best = load(theirs + _ENTRY_TOOK), tuning + _BEST + 8 * way
        store(best, min(load(best), took))
        store(tuning + _SPENT, load(tuning + _SPENT) + took)
    willing = there and load(theirs + _OFFER) != 0
    store(state + _WILLING, 1 if willing else 0)
    # If the receiver has not come, or offers nothing, its next time belongs to another message.
    store(state + _TRIED, load(state + _TRIES) if willing else 0)
    store(state + _TRIES, 0)


@register_jitable
def begin_clock(state: int) -> None:
    """Record the start time of a message for which the receiver offered its array."""
    store(state + _BEGAN, now(state))


@register_jitable
def stop_clock(state: int) -> None:
    """Record its duration."""
    if state != 0 and load(state + _BEGAN) != 0:
        store(state + _TOOK, now(state) - load(state + _BEGAN))
        store(state + _BEGAN, 0)


@register_jitable
def took(state: int) -> int:
    """Word that a receiver writes to its entry beside its offer: the duration of its last message."""
    return load(state + _TOOK) if state != 0 else 0


@register_jitable
def _claim(claims: int, producer: bool, number: int, chunks: int) -> int:
    """Index of the next chunk for this end, the producer from the first on, the consumer from the last on;
    -1 if none is left.
    """
    while True:
        seen = load_acquire(claims)
        known = seen if seen >> 24 == number else number << 24
        front, back = (known >> 12) & 0xFFF, known & 0xFFF
        if front + back >= chunks:
            return -1
        if compare_and_swap(claims, seen, known + (1 << 12 if producer else 1)) == seen:
            return front if producer else chunks - 1 - back


@register_jitable
def _done(line: int, number: int) -> int:
    """Chunks of a message that an end has copied."""
    word = load_acquire(line + _DONE)
    return word & 0xFFFFFF if word >> 24 == number else 0


@register_jitable
def _copy_chunk(state: int, producer: bool, mine: int, theirs: int, count: int) -> bool:
    """Copy a chunk to or from the other array; False if the other end has given up, everything stops, or its memory is not
    accessible.
    """
    touch, turn, abort = load(state + _MINE) + _TOUCH, load(state + _THEIR_TURN), load(state + _RING) + _ABORT
    return copy(producer, state, load(load(state + _THEIRS) + _PROCESS), mine, theirs, count, touch, turn, 0, abort)


@register_jitable
def copy_next(state: int, producer: bool, sequence: int, mine: int, theirs: int, nbytes: int) -> bool:
    """Copy a chunk that no end has claimed; False if there is none, or it cannot be copied."""
    number, chunk = _number(sequence), _chunk_bytes(nbytes)
    chunks = (nbytes + chunk - 1) // chunk
    index = _claim(load(state + _RING) + _CLAIMS, producer, number, chunks)
    offset = index * chunk
    if index < 0 or not _copy_chunk(state, producer, mine + offset, theirs + offset, min(chunk, nbytes - offset)):
        return False
    line = load(state + _MINE)
    store_release(line + _DONE, (number << 24) + _done(line, number) + 1)
    return True


@register_jitable
def through(state: int, sequence: int, nbytes: int) -> bool:
    """Whether both ends together have copied the whole message."""
    number, chunk = _number(sequence), _chunk_bytes(nbytes)
    done = _done(load(state + _MINE), number) + _done(load(state + _THEIRS), number)
    return done == (nbytes + chunk - 1) // chunk


def _await_untouched(state: int) -> None:
    """Stop the other end from accessing this end's array. This end has published that it gives up."""
    waited, theirs, aside = 0, load(state + _THEIRS), state + _ASIDE
    revoke(theirs + _TOUCH)
    # The word stays set if the process has died, or was stopped outside of the kernel: a revoked copy cannot begin any more.
    while load_acquire(theirs + _TOUCH) != 0 and waited < _GIVE_UP_US:
        if not verified(aside, load(theirs + _PROCESS), load(theirs + _NONCE), load(theirs + _VALUE)):
            return
        usleep(_PAUSE_US)
        waited += _PAUSE_US


with compiling():
    await_untouched = kernel("void(int64)")(_await_untouched)

_joining = threading.Lock()


def join(end: RingEnd, allowed: bool) -> int:
    """Address of a ring end's words for compiled code; the first call publishes this process to the other end.

    0 if messages may not be copied directly. Thread-safe.
    """
    if not allowed:
        return 0
    if end.kept is None:
        with _joining:
            if end.kept is None:
                end.kept = _introduce(end)
    return int(end.kept.ctypes.data)


def _introduce(end: RingEnd) -> np.ndarray:
    """The words of `Word` for a ring end, with which the other end can find this process."""
    mine, theirs = (end.address + MEETING + (0 if producer else LINE) for producer in (end.producer, not end.producer))
    state = processes.access(True, Word.TUNINGS + _TUNING_WORDS * _CLASSES)
    address = int(state.ctypes.data)
    turn = end.address + TURNS + (LINE if end.producer else 0)
    state[Word.MINE : Word.BEGAN] = (mine, theirs, end.address, turn)
    for way in range(2):
        state[Word.TUNINGS + TuningWord.BEST + way :: _TUNING_WORDS] = _NEVER
    line = (ctypes.c_int64 * len(LineWord)).from_address(mine)
    line[LineWord.PROCESS] = os.getpid()
    line[LineWord.NONCE], line[LineWord.VALUE] = processes.nonce(state)
    end.gave_up = partial(await_untouched, address)
    return state
