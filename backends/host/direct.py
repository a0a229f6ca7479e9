"""Large reductions that access the other members' arrays directly, if the system permits it (process_vm_readv).

Each member reads its share of the others' inputs piece by piece into memory that stays in its caches, reduces it there in the
same order as `kernels.reduce`, and writes the result into the others' outputs: two barriers in total, and half the copies of
staging. Which method is faster depends on the machine and on the size. So the first calls of each size class alternate between
the two, and then all members use the one that was faster for the slowest of them. Both give the same bits.

A member may give up in the middle, after which its caller may reuse its arrays. So a member announces each copy, and then
checks whether the other one still offers its arrays. A member that gives up withdraws its offer, revokes announced copies, and
waits for those that the kernel has begun.
"""

from __future__ import annotations

import ctypes
import enum
import os
from typing import Any

import numpy as np
from numba.extending import register_jitable

from xvcomm.backends.host.kernels import Mode, Word, arrive, combine, line, meet, open_plan, reduce
from xvcomm.backends.host.processes import copy, exposed, nonce, now, reachable, revoke, verified
from xvcomm.jit.atomics import (
    READY,
    await_word,
    load,
    load_acquire,
    store,
    store_release,
    usleep,
)  # fmt: skip
from xvcomm.jit.compile import compiling, kernel
from xvcomm.memory.ring import ABORT, LINE
from xvcomm.memory.segment import PAGE

LEAST = 256 << 10
"""Minimum total bytes of all shares for this method; below, the additional barrier costs more than it saves."""

TRIES = 4
"""Tries of each method per size class; more until they took long enough that no short disturbance can have affected all of
them.
"""
_TRIAL_NS = 20_000_000
_CHOSEN = -1
_PIECE = 256 << 10
"""Compared with 128 and 512 KiB by measurement."""
_PATIENCE_US, _PAUSE_US = 1_000_000, 100
NEVER = np.iinfo(np.int64).max


class LineWord(enum.IntEnum):
    """Words of a member's line in the arena, after those of `kernels`."""

    PROCESS = 3  # its pid
    NONCE = 4  # address of a word in its memory
    VALUE = 5  # value of that word
    SRC = 6  # its arrays in the current call; 0 for the input: not offered
    DST = 7
    TOOK = 8  # nanoseconds of its last try in this size class
    TOUCH = 9  # a `processes.TouchWord`: its current copy from or to another member


class TuningWord(enum.IntEnum):
    """Comparison of the two methods for arrays of about one size, equal on all members except for TOOK."""

    TRIALS = 0  # number of tries begun; -1 once a method is chosen
    TOOK = 1  # nanoseconds of this member's last try
    SPENT = 2  # these three are the slowest member's: of all tries, of the best staged and the best direct one
    BEST = 3


class Step(enum.IntEnum):
    """State of a call."""

    ENTER = 0
    MEET = 1
    STAGED = 2
    DIRECT = 3
    LEAVE = 4
    FAILED = 5


# Plain integers: numba treats an enum's members as constants only if they are globals.
_RANKS, _ME, _SPINS, _BUDGET, _ARENA = (int(w) for w in (Word.RANKS, Word.ME, Word.SPINS, Word.BUDGET, Word.ARENA))
_MODE, _ROOT, _TABLES = int(Word.MODE), int(Word.ROOT), int(Word.TABLES)
_ITEMSIZE, _RESULT_SIZE = int(Word.ITEMSIZE), int(Word.RESULT_SIZE)
_STEP, _BEGAN, _ACCESS, _TUNING, _ROOM = (int(w) for w in tuple(Word)[22:27])
_PROCESS, _NONCE, _VALUE, _SRC, _DST, _TOOK, _TOUCH = (8 * int(w) for w in LineWord)
_LAST, _SPENT, _BEST = (8 * int(w) for w in tuple(TuningWord)[1:])
_SCATTER, _ALL = int(Mode.SCATTER), int(Mode.ALL)
_ENTER, _MEET, _STAGED, _DIRECT, _LEAVE, _FAILED = (int(s) for s in Step)


def piece_bytes(ranks: int) -> int:
    """Bytes of each other member's share that are read at a time: together they fit the second-level cache."""
    return max(PAGE, _PIECE // (ranks - 1) // PAGE * PAGE)


_piece_bytes = register_jitable(piece_bytes)


def room(ranks: int) -> np.ndarray:
    """Memory for the pieces that a member reads."""
    memory = np.empty((ranks - 1) * (piece_bytes(ranks) + PAGE) + PAGE, np.uint8)
    return memory[-memory.ctypes.data % PAGE :]


def introduce(arena: int, me: int, access: np.ndarray) -> None:
    """Publish this member's pid and nonce in the arena."""
    words = (ctypes.c_int64 * len(LineWord)).from_address(arena + PAGE + me * LINE + _PROCESS)
    words[:3] = [os.getpid(), *nonce(access)]


def tuning() -> np.ndarray:
    """The words of `TuningWord` for a size class."""
    return np.array([0, 0, 0, NEVER, NEVER], np.int64)


@register_jitable
def _verified(p: Any, rank: int) -> bool:
    """Whether a member's memory can be read."""
    peer = line(p, rank)
    return verified(p[_ACCESS], load(peer + _PROCESS), load(peer + _NONCE), load(peer + _VALUE))


@register_jitable
def _try_others(p: Any) -> int:
    """1 if the memory of all others can be read and written, else -1."""
    for r in range(p[_RANKS]):
        peer = line(p, r)
        if r != p[_ME] and not reachable(p[_ACCESS], load(peer + _PROCESS), load(peer + _NONCE), load(peer + _VALUE)):
            return -1
    return 1


@register_jitable
def _exposed(p: Any, src: int, dst: int) -> bool:
    """Whether the system lets other processes access these arrays."""
    count = 0
    for r in range(p[_RANKS]):
        count += p[_TABLES + p[_RANKS] + r]
    writes = p[_MODE] == _ALL or (p[_MODE] != _SCATTER and p[_ME] == p[_ROOT])
    return exposed(p[_ACCESS], load(line(p, p[_ME]) + _PROCESS), src, count, dst, count if writes else 0)


@register_jitable
def _offer(p: Any, src: int, dst: int) -> None:
    """Publish this member's arrays, if they are accessible, and the duration of its last try."""
    mine = line(p, p[_ME])
    offered = load(p[_ACCESS]) > 0 and _exposed(p, src, dst)
    store(mine + _SRC, src if offered else 0)
    store(mine + _DST, dst)
    store(mine + _TOOK, load(p[_TUNING] + _LAST))


@register_jitable
def _choose(p: Any) -> int:
    """The method for this call, which all members derive from the same words; in the first call, no member
    has offered arrays.
    """
    p[_BEGAN] = 0
    slowest = 0
    for r in range(p[_RANKS]):
        if load_acquire(line(p, r) + _SRC) == 0:
            if load(p[_ACCESS]) == 0:
                store(p[_ACCESS], _try_others(p))
            return _STAGED
        slowest = max(slowest, load(line(p, r) + _TOOK))
    tuning = p[_TUNING]
    trials, best = load(tuning), tuning + _BEST
    if trials > 0:
        store(best + 8 * ((trials - 1) % 2), min(load(best + 8 * ((trials - 1) % 2)), slowest))
        store(tuning + _SPENT, load(tuning + _SPENT) + slowest)
    if trials >= 0 and (trials % 2 == 1 or trials < 2 * TRIES or load(tuning + _SPENT) < _TRIAL_NS):
        store(tuning, trials + 1)
        p[_BEGAN] = now(p[_ACCESS])
        return _DIRECT if trials % 2 == 1 else _STAGED
    store(tuning, _CHOSEN)
    return _DIRECT if load(best + 8) < load(best) else _STAGED


@register_jitable
def _copy(p: Any, rank: int, write: bool, mine: int, theirs: int, count: int) -> bool:
    """Copy from or to a member's array; False if it has given up, everything stops, or its memory is not accessible."""
    touch, peer = line(p, p[_ME]) + _TOUCH, line(p, rank)
    process, abort = load(peer + _PROCESS), p[_ARENA] + ABORT
    return copy(write, p[_ACCESS], process, mine, theirs, count, touch, peer + _SRC, 1, abort)


@register_jitable
def _reduce_piece(p: Any, src: int, dst: int, offset: int, count: int) -> bool:
    """Read `count` bytes at `offset` of all inputs, reduce them, and write the result to the outputs."""
    ranks, me, mode = p[_RANKS], p[_ME], p[_MODE]
    sources, room = _TABLES + 4 * ranks, p[_ROOM]
    for r in range(ranks):
        if r == me:
            p[sources + r] = src + offset
            continue
        theirs = load(line(p, r) + _SRC) + offset
        p[sources + r] = room + theirs % PAGE  # same page offset as the source, which the kernel copies page by page
        if not _copy(p, r, False, p[sources + r], theirs, count):
            return False
        room += _piece_bytes(ranks) + PAGE
    target = dst + offset
    if mode == _SCATTER:
        target = dst + (offset - p[_TABLES + me]) // p[_ITEMSIZE] * p[_RESULT_SIZE]
    elif mode != _ALL and me != p[_ROOT]:
        target = p[sources + p[_ROOT]]
    combine(p, target, count)
    for r in range(ranks):
        wants = mode == _ALL or (mode != _SCATTER and r == p[_ROOT])
        if r != me and wants and not _copy(p, r, True, target, load(line(p, r) + _DST) + offset, count):
            return False
    return True


@register_jitable
def _reduce_direct(p: Any, src: int, dst: int) -> int:
    if p[_STEP] == _DIRECT:
        p[_STEP] = _LEAVE
        me, piece = p[_ME], _piece_bytes(p[_RANKS])
        start, total = p[_TABLES + me], p[_TABLES + p[_RANKS] + me]
        for at in range(0, total, piece):
            if not _reduce_piece(p, src, dst, start + at, min(piece, total - at)):
                p[_STEP] = _FAILED
                break
        if p[_STEP] == _LEAVE:
            arrive(p)
    if p[_STEP] == _FAILED:
        # The failure is detected and reported elsewhere.
        mine = line(p, p[_ME])
        return await_word(mine, load(mine) + 1, p[_ARENA] + ABORT, p[_SPINS], p[_BUDGET])
    return meet(p)


def _reduce(plan: int, src: int, dst: int) -> int:
    """Like `kernels.reduce`, with either method."""
    p = open_plan(plan)
    if p[_STEP] == _ENTER:
        _offer(p, src, dst)
        arrive(p)
        p[_STEP] = _MEET
    if p[_STEP] == _MEET:
        result = meet(p)
        if result != READY:
            return result
        p[_STEP] = _choose(p)
    result = reduce(plan, src, dst) if p[_STEP] == _STAGED else _reduce_direct(p, src, dst)
    if result == READY:
        p[_STEP] = _ENTER
        if p[_BEGAN] != 0:
            store(p[_TUNING] + _LAST, now(p[_ACCESS]) - p[_BEGAN])
    return result


def _withdraw(plan: int) -> None:
    """Withdraw this member's arrays before the end of a call; returns when no other member accesses them."""
    p = open_plan(plan)
    store_release(line(p, p[_ME]) + _SRC, 0)
    for r in range(p[_RANKS]):
        if r != p[_ME]:
            revoke(line(p, r) + _TOUCH)
    waited = 0
    for r in range(p[_RANKS]):
        # The word stays set if the process has died, or was stopped outside of the kernel: a revoked copy cannot begin any
        # more.
        while r != p[_ME] and load_acquire(line(p, r) + _TOUCH) != 0 and waited < _PATIENCE_US and _verified(p, r):
            usleep(_PAUSE_US)
            waited += _PAUSE_US


with compiling():
    reduce_either = kernel("int64(int64, int64, int64)")(_reduce)
    withdraw = kernel("void(int64)")(_withdraw)
