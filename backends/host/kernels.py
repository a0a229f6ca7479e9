"""The native collectives of host memory: compiled loops over an arena of shared memory that all ranks of an island map.

In each round a rank copies pieces of its input into its own stage, all ranks meet at a barrier, and each copies or reduces what
it needs from the others' stages; a rank alternates between its stages, so that one barrier per round suffices. Pieces are small
enough to stay in the caches. Large reductions may use another method, see `direct`.

The parameters of a collective of given shape are in a plan, a block of 64-bit words created once, so that a call passes three
numbers. Every kernel can be resumed: it returns PENDING after a while without progress and is called again with the same plan.
"""

from __future__ import annotations

import enum
from functools import cache
from typing import Any

import numpy as np
from numba import carray
from numba.extending import register_jitable

from xvcomm.backends.host.reducers import average_many, call_scale, reduce_many
from xvcomm.jit.atomics import READY, as_pointer, await_word, copy_bytes, fetch_add, load, load_acquire, store
from xvcomm.jit.compile import compiling, kernel, native
from xvcomm.memory.ring import ABORT, LINE
from xvcomm.memory.segment import PAGE

__all__ = [
    "Mode", "Word", "address", "arrive", "combine", "exchange", "join", "line", "meet", "one_shot", "open_plan", "plan_words",
    "reduce", "scale", "stage_count", "stages",
]  # fmt: skip


class Mode(enum.IntEnum):
    """Which ranks get the reduced blocks."""

    SCATTER = 0
    ALL = 1
    ROOT = 2


class Word(enum.IntEnum):
    """Offsets of the words in a plan."""

    ARENA = 0
    RANKS = 1
    ME = 2
    STAGE = 3  # bytes that a rank stages at a time
    SPINS = 4
    BUDGET = 5  # nanoseconds off the core before returning
    PIECES = 6  # address of the number of pieces over the arena's lifetime, which selects the stage
    ROUND = 7  # state of a call, with ROUNDS; ROUND and PHASE are 0 between calls
    PHASE = 8
    ROUNDS = 9
    COLUMNS = 10  # 1 if all readers need the same data of a rank, otherwise one column per reader
    MODE = 11
    ROOT = 12
    PAIR = 13  # these four: the addresses in a reducers.Kit
    FIRST = 14
    MORE = 15
    LAST = 16
    FINISHER = 17  # address of the function that divides, or 0
    DIVISOR = 18
    ITEMSIZE = 19
    NBYTES = 20
    SCRATCH = 21  # address of the reducers' accumulator
    STEP = 22  # from here on for `direct`: state of a call; 0 between calls
    BEGAN = 23  # start time in nanoseconds
    ACCESS = 24  # address of `processes.AccessWord`s
    TUNING = 25  # address of `direct.TuningWord`s for this size class
    ROOM = 26  # address of memory for a piece of each other member
    RESULT_SIZE = 27  # bytes per element of a result that stays where it is reduced
    TABLES = 32  # five rows of RANKS words: offsets and bytes to stage, offsets and bytes to take; sources


def plan_words(ranks: int) -> int:
    """Number of words of a plan."""
    return int(Word.TABLES) + 5 * ranks


# Plain integers: numba treats an enum's members as constants only if they are globals.
_ARENA, _RANKS, _ME, _STAGE, _SPINS, _BUDGET = (int(w) for w in tuple(Word)[:6])
_PIECES, _ROUND, _PHASE, _ROUNDS, _COLUMNS, _MODE, _ROOT = (int(w) for w in tuple(Word)[6:13])
_PAIR, _FIRST, _MORE, _LAST, _FINISHER, _DIVISOR = (int(w) for w in tuple(Word)[13:19])
_ITEMSIZE, _NBYTES, _SCRATCH = (int(w) for w in tuple(Word)[19:22])
_RESULT_SIZE, _TABLES = int(Word.RESULT_SIZE), int(Word.TABLES)
_COPY_IN, _MEET, _MEET_AGAIN = 0, 1, 2
_ROOM = 16 << 10
_SCATTER, _ALL = int(Mode.SCATTER), int(Mode.ALL)


def stage_count(ranks: int) -> int:
    """Number of stages of each rank.

    Two would suffice; but writing a cache line that readers still cache takes long, so that small islands alternate between
    more memory than one core's caches hold: 256 KiB 32 -> 20 µs.
    """
    return max(2, 16 // ranks)


_stage_count = register_jitable(stage_count)


def stages(ranks: int) -> int:
    """Offset of the stages in an arena: after page 0 (its line 1 is the abort word) and one line per rank."""
    return PAGE + -(-ranks * LINE // PAGE) * PAGE


@register_jitable
def open_plan(plan: int) -> Any:
    """A plan's words as an array."""
    return carray(as_pointer(plan), _TABLES + 5 * load(plan + 8 * _RANKS), np.int64)


@register_jitable
def line(p: Any, rank: int) -> int:
    """Address of a rank's line: word 0 counts its arrivals, words 1 and 2 are its rounds for even and odd pieces; for the rest
    see `direct`.
    """
    return p[_ARENA] + PAGE + rank * LINE


@register_jitable
def _stage(p: Any, rank: int, pieces: int) -> int:
    count = _stage_count(p[_RANKS])
    first = p[_ARENA] + PAGE + (p[_RANKS] * LINE + PAGE - 1) // PAGE * PAGE
    return first + (count * rank + pieces % count) * p[_STAGE]


@register_jitable
def arrive(p: Any) -> None:
    """Announce that this rank has reached the next barrier."""
    fetch_add(line(p, p[_ME]), 1)


@register_jitable
def meet(p: Any) -> int:
    """Wait until all ranks have arrived as often as this one."""
    target = load(line(p, p[_ME]))
    for other in range(p[_RANKS]):
        result = await_word(line(p, other), target, p[_ARENA] + ABORT, p[_SPINS], p[_BUDGET])
        if result != READY:
            return result
    return READY


@register_jitable
def _next_round(p: Any) -> bool:
    """Continue with the next piece; returns whether that was the last."""
    store(p[_PIECES], load(p[_PIECES]) + 1)
    p[_ROUND] += 1
    p[_PHASE] = _COPY_IN
    if p[_ROUND] < p[_ROUNDS]:
        return False
    p[_ROUND] = 0
    return True


@register_jitable
def _window(total: int, at: int, piece: int) -> int:
    """Bytes of a range of `total` bytes that are in the piece from `at` on."""
    return max(0, min(piece, total - at))


def _exchange(plan: int, src: int, dst: int) -> int:
    """Copy parts of inputs to parts of outputs: gather, scatter, broadcast, all-to-all.

    The plan's tables contain what this rank stages for each column and what it takes from each rank. Its own part is read
    directly from the input, at its own column's offset.
    """
    p = open_plan(plan)
    ranks, me, columns = p[_RANKS], p[_ME], p[_COLUMNS]
    piece = p[_STAGE] // columns // 64 * 64
    own = me if columns > 1 else 0
    put_at, put_n, get_at, get_n = _TABLES, _TABLES + ranks, _TABLES + 2 * ranks, _TABLES + 3 * ranks
    while True:
        pieces = load(p[_PIECES])
        at = p[_ROUND] * piece
        if p[_PHASE] == _COPY_IN:
            most = 0
            for c in range(columns):
                if columns == 1 or c != me:
                    most = max(most, p[put_n + c])
                    stage = _stage(p, me, pieces) + c * piece
                    copy_bytes(stage, src + p[put_at + c] + at, _window(p[put_n + c], at, piece))
            if p[_ROUND] == 0:
                for r in range(ranks):
                    most = max(most, p[get_n + r] if r != me else 0)
                store(line(p, me) + 8 * (1 + pieces % 2), (most + piece - 1) // piece)
                copy_bytes(dst + p[get_at + me], src + p[put_at + own], p[get_n + me])
            arrive(p)
            p[_PHASE] = _MEET
        result = meet(p)
        if result != READY:
            return result
        if p[_ROUND] == 0:
            p[_ROUNDS] = 1
            for r in range(ranks):
                p[_ROUNDS] = max(p[_ROUNDS], load_acquire(line(p, r) + 8 * (1 + pieces % 2)))
        for r in range(ranks):
            if r != me:
                stage = _stage(p, r, pieces) + own * piece
                copy_bytes(dst + p[get_at + r] + at, stage, _window(p[get_n + r], at, piece))
        if _next_round(p):
            return READY


@register_jitable
def combine(p: Any, dst: int, nbytes: int) -> None:
    """Reduce `nbytes` of each of the plan's sources into `dst`, in rank order, and divide."""
    kit = (p[_PAIR], p[_FIRST], p[_MORE], p[_LAST])
    ranks, itemsize, scratch = p[_RANKS], p[_ITEMSIZE], p[_SCRATCH]
    sources, count = p[_TABLES + 4 * ranks :], nbytes // itemsize
    if p[_FINISHER] != 0:
        average_many(kit, p[_FINISHER], dst, sources, ranks, count, itemsize, p[_DIVISOR], scratch)
    else:
        reduce_many(kit, dst, sources, ranks, count, itemsize, p[_RESULT_SIZE], scratch)


def _reduce(plan: int, src: int, dst: int) -> int:
    """Reduce block r of all inputs on rank r; then keep it there, or pass it to all ranks or to the root (see Mode).

    The plan's first two tables are the blocks' offsets and bytes.
    """
    p = open_plan(plan)
    ranks, me, mode = p[_RANKS], p[_ME], p[_MODE]
    everywhere = mode == _ALL or me == p[_ROOT]
    piece = p[_STAGE] // ranks // 64 * 64
    block_at, block_n, sources = _TABLES, _TABLES + ranks, _TABLES + 4 * ranks
    while True:
        pieces = load(p[_PIECES])
        mine, at = _stage(p, me, pieces), p[_ROUND] * piece
        if p[_PHASE] == _COPY_IN:
            most = 0
            for r in range(ranks):
                most = max(most, p[block_n + r])
                if r != me:
                    copy_bytes(mine + r * piece, src + p[block_at + r] + at, _window(p[block_n + r], at, piece))
            p[_ROUNDS] = (most + piece - 1) // piece
            arrive(p)
            p[_PHASE] = _MEET
        result = meet(p)
        if result != READY:
            return result
        if p[_PHASE] == _MEET:
            nbytes = _window(p[block_n + me], at, piece)
            where = dst + p[block_at + me] + at if everywhere else mine + me * piece
            target = dst + at // p[_ITEMSIZE] * p[_RESULT_SIZE] if mode == _SCATTER else where
            if nbytes > 0:
                for r in range(ranks):
                    p[sources + r] = _stage(p, r, pieces) + me * piece
                p[sources + me] = src + p[block_at + me] + at
                combine(p, target, nbytes)
                if mode == _ALL:
                    copy_bytes(mine + me * piece, target, nbytes)
            if mode != _SCATTER:
                arrive(p)
                p[_PHASE] = _MEET_AGAIN
                continue
        elif everywhere:
            for r in range(ranks):
                if r != me:
                    stage = _stage(p, r, pieces) + r * piece
                    copy_bytes(dst + p[block_at + r] + at, stage, _window(p[block_n + r], at, piece))
        if _next_round(p):
            return READY


def _one_shot(plan: int, src: int, dst: int) -> int:
    """All-reduce with one barrier, for an array that fits a stage: every rank stages its array and reduces all of them."""
    p = open_plan(plan)
    pieces, ranks = load(p[_PIECES]), p[_RANKS]
    # Calls also alternate within a stage, for the same reason as between stages: 64 KiB 13 -> 8.5 µs.
    room = max(1, (p[_NBYTES] + _ROOM - 1) // _ROOM) * _ROOM
    within = pieces // _stage_count(ranks) % max(1, p[_STAGE] // room) * room
    if p[_PHASE] == _COPY_IN:
        copy_bytes(_stage(p, p[_ME], pieces) + within, src, p[_NBYTES])
        arrive(p)
        p[_PHASE] = _MEET
    result = meet(p)
    if result != READY:
        return result
    for r in range(ranks):
        p[_TABLES + 4 * ranks + r] = _stage(p, r, pieces) + within if r != p[_ME] else src
    combine(p, dst, p[_NBYTES])
    p[_ROUNDS] = 1
    _next_round(p)
    return READY


def _join(counter: int) -> int:
    """Count one more member; returns the previous count."""
    return fetch_add(counter, 1)


def _scale(function: int, dst: int, src: int, count: int, factor: float, divisor: int) -> None:
    """Call a scaler."""
    call_scale(function, dst, src, count, factor, divisor)


with compiling():
    join = kernel("int64(int64)")(_join)
    scale = kernel("void(int64, int64, int64, int64, float64, int64)")(_scale)
    exchange = kernel("int64(int64, int64, int64)")(_exchange)
    reduce = kernel("int64(int64, int64, int64)")(_reduce)
    one_shot = kernel("int64(int64, int64, int64)")(_one_shot)


@cache
def address(function: Any) -> int:
    """Address of `exchange`, `reduce` or `one_shot` for compiled code; compiled again on first use."""
    with compiling():
        return native("int64(int64, int64, int64)", function.py_func)
