"""The native collectives of host memory: compiled loops over an arena of shared memory that all ranks of an island map.

In each round a rank copies pieces of its input into its own stage, all ranks meet at a barrier, and each copies or reduces what
it needs from the others' stages; a rank alternates between its stages, so that one barrier per round suffices. Pieces are small
enough to stay in the caches. Large reductions may use another method, see `direct`.

The parameters of a collective of given shape are in a plan, a record created once, so that a call passes three numbers. Every
kernel can be resumed: it returns PENDING after a while without progress and is called again with the same plan.
"""

from __future__ import annotations

import enum
from functools import cache
from typing import Any

import numpy as np
from numba import carray

from xvcomm.backends.host.processes import PROCESS, TOUCH
from xvcomm.backends.host.reducers import average_many, call_scale, reduce_many
from xvcomm.jit.atomics import READY, as_pointer, await_word, copy_bytes, fetch_add, load, store
from xvcomm.jit.compile import compiling, kernel, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at
from xvcomm.memory.ring import ABORT, LINE
from xvcomm.memory.segment import PAGE

__all__ = [
    "MEMBER", "PART", "PLAN", "Mode", "address", "arrive", "combine", "exchange", "join", "meet", "member", "one_shot",
    "parts_of", "plan_at", "reduce", "scale", "stage_count", "stages",
]  # fmt: skip


class Mode(enum.IntEnum):
    """Which ranks get the reduced blocks."""

    SCATTER = 0
    ALL = 1
    ROOT = 2


PLAN = np.dtype([
    ("arena", "i8"),
    ("ranks", "i8"),
    ("me", "i8"),
    ("stage", "i8"),  # bytes that a rank stages at a time
    ("spins", "i8"),
    ("budget", "i8"),  # nanoseconds off the core before returning
    ("pieces", "i8"),  # address of the number of pieces over the arena's lifetime, which selects the stage
    ("round", "i8"),  # state of a call, with `rounds`; `round` and `phase` are 0 between calls
    ("phase", "i8"),
    ("rounds", "i8"),
    ("columns", "i8"),  # 1 if all readers need the same data of a rank, otherwise one column per reader
    ("mode", "i8"),
    ("root", "i8"),
    ("pair", "i8"),  # these four: the addresses in a reducers.Kit
    ("first", "i8"),
    ("more", "i8"),
    ("last", "i8"),
    ("finisher", "i8"),  # address of the function that divides, or 0
    ("divisor", "i8"),
    ("itemsize", "i8"),
    ("result_size", "i8"),  # bytes per element of a result that stays where it is reduced
    ("nbytes", "i8"),
    ("scratch", "i8"),  # address of the reducers' accumulator
    ("parts", "i8"),  # address of a `PART` per rank
    ("step", "i8"),  # from here on for `direct`: state of a call; 0 between calls
    ("began", "i8"),  # start time in nanoseconds
    ("access", "i8"),  # address of a `processes.ACCESS`
    ("tuning", "i8"),  # address of the `TUNING` for this size class
    ("room", "i8"),  # address of memory for a piece of each other member
])  # fmt: skip

PART = np.dtype([
    ("put_offset", "i8"),  # in the input: what to stage for that rank (for all ranks: the first part), or the rank's block
    ("put_bytes", "i8"),
    ("get_offset", "i8"),  # in the output: what to take from that rank
    ("get_bytes", "i8"),
    ("source", "i8"),  # address of its operand in the current piece
])  # fmt: skip
"""What a plan contains per rank."""

MEMBER = np.dtype([
    ("arrivals", "i8"),
    ("rounds", "i8", 2),  # of the current call, at an even or an odd number of pieces
    ("process", PROCESS),  # from here on for `direct`
    ("src", "i8"),  # its arrays in the current call; 0 for the input: not offered
    ("dst", "i8"),
    ("took", "i8"),  # nanoseconds of its last try in this size class
    ("touch", TOUCH),  # its current copy from or to another member
])  # fmt: skip
"""A rank's line in the arena."""

plan_at, _member_at = compiled_at(PLAN), compiled_at(MEMBER)
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
def parts_of(p: Any) -> Any:
    """A plan's parts as an array."""
    return carray(as_pointer(p.parts), p.ranks, PART)


@register_jitable
def member(p: Any, rank: int) -> Any:
    """A rank's line."""
    return _member_at(p.arena + PAGE + rank * LINE)


@register_jitable
def _stage(p: Any, rank: int, pieces: int) -> int:
    count = _stage_count(p.ranks)
    first = p.arena + PAGE + (p.ranks * LINE + PAGE - 1) // PAGE * PAGE
    return first + (count * rank + pieces % count) * p.stage


@register_jitable
def arrive(p: Any) -> None:
    """Announce that this rank has reached the next barrier."""
    fetch_add(address_of(member(p, p.me), "arrivals"), 1)


@register_jitable
def meet(p: Any) -> int:
    """Wait until all ranks have arrived as often as this one."""
    target = member(p, p.me).arrivals
    for other in range(p.ranks):
        arrivals = address_of(member(p, other), "arrivals")
        result = await_word(arrivals, target, p.arena + ABORT, p.spins, p.budget)
        if result != READY:
            return result
    return READY


@register_jitable
def _next_round(p: Any) -> bool:
    """Continue with the next piece; returns whether that was the last."""
    store(p.pieces, load(p.pieces) + 1)
    p.round += 1
    p.phase = _COPY_IN
    if p.round < p.rounds:
        return False
    p.round = 0
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
    p = plan_at(plan)
    ranks, me, columns = p.ranks, p.me, p.columns
    piece = p.stage // columns // 64 * 64
    own = me if columns > 1 else 0
    parts = parts_of(p)
    while True:
        pieces = load(p.pieces)
        at = p.round * piece
        if p.phase == _COPY_IN:
            most = 0
            for c in range(columns):
                if columns == 1 or c != me:
                    part, stage = parts[c], _stage(p, me, pieces) + c * piece
                    most = max(most, part.put_bytes)
                    copy_bytes(stage, src + part.put_offset + at, _window(part.put_bytes, at, piece))
            if p.round == 0:
                for r in range(ranks):
                    most = max(most, parts[r].get_bytes if r != me else 0)
                member(p, me).rounds[pieces % 2] = (most + piece - 1) // piece
                copy_bytes(dst + parts[me].get_offset, src + parts[own].put_offset, parts[me].get_bytes)
            arrive(p)
            p.phase = _MEET
        result = meet(p)
        if result != READY:
            return result
        if p.round == 0:
            p.rounds = 1
            for r in range(ranks):
                p.rounds = max(p.rounds, member(p, r).rounds[pieces % 2])
        for r in range(ranks):
            if r != me:
                stage = _stage(p, r, pieces) + own * piece
                copy_bytes(dst + parts[r].get_offset + at, stage, _window(parts[r].get_bytes, at, piece))
        if _next_round(p):
            return READY


@register_jitable
def combine(p: Any, dst: int, nbytes: int) -> None:
    """Reduce `nbytes` of each of the plan's sources into `dst`, in rank order, and divide."""
    kit = (p.pair, p.first, p.more, p.last)
    ranks, itemsize, scratch = p.ranks, p.itemsize, p.scratch
    sources, count = parts_of(p).source, nbytes // itemsize
    if p.finisher != 0:
        average_many(kit, p.finisher, dst, sources, ranks, count, itemsize, p.divisor, scratch)
    else:
        reduce_many(kit, dst, sources, ranks, count, itemsize, p.result_size, scratch)


def _reduce(plan: int, src: int, dst: int) -> int:
    """Reduce block r of all inputs on rank r; then keep it there, or pass it to all ranks or to the root (see Mode)."""
    p = plan_at(plan)
    ranks, me, mode = p.ranks, p.me, p.mode
    everywhere = mode == _ALL or me == p.root
    piece = p.stage // ranks // 64 * 64
    parts = parts_of(p)
    while True:
        pieces = load(p.pieces)
        mine, at = _stage(p, me, pieces), p.round * piece
        if p.phase == _COPY_IN:
            most = 0
            for r in range(ranks):
                block = parts[r]
                most = max(most, block.put_bytes)
                if r != me:
                    copy_bytes(mine + r * piece, src + block.put_offset + at, _window(block.put_bytes, at, piece))
            p.rounds = (most + piece - 1) // piece
            arrive(p)
            p.phase = _MEET
        result = meet(p)
        if result != READY:
            return result
        if p.phase == _MEET:
            block = parts[me]
            nbytes = _window(block.put_bytes, at, piece)
            where = dst + block.put_offset + at if everywhere else mine + me * piece
            target = dst + at // p.itemsize * p.result_size if mode == _SCATTER else where
            if nbytes > 0:
                for r in range(ranks):
                    parts[r].source = _stage(p, r, pieces) + me * piece
                block.source = src + block.put_offset + at
                combine(p, target, nbytes)
                if mode == _ALL:
                    copy_bytes(mine + me * piece, target, nbytes)
            if mode != _SCATTER:
                arrive(p)
                p.phase = _MEET_AGAIN
                continue
        elif everywhere:
            for r in range(ranks):
                if r != me:
                    stage = _stage(p, r, pieces) + r * piece
                    copy_bytes(dst + parts[r].put_offset + at, stage, _window(parts[r].put_bytes, at, piece))
        if _next_round(p):
            return READY


def _one_shot(plan: int, src: int, dst: int) -> int:
    """All-reduce with one barrier, for an array that fits a stage: every rank stages its array and reduces all of them."""
    p = plan_at(plan)
    pieces, ranks = load(p.pieces), p.ranks
    # Calls also alternate within a stage, for the same reason as between stages: 64 KiB 13 -> 8.5 µs.
    room = max(1, (p.nbytes + _ROOM - 1) // _ROOM) * _ROOM
    within = pieces // _stage_count(ranks) % max(1, p.stage // room) * room
    if p.phase == _COPY_IN:
        copy_bytes(_stage(p, p.me, pieces) + within, src, p.nbytes)
        arrive(p)
        p.phase = _MEET
    result = meet(p)
    if result != READY:
        return result
    parts = parts_of(p)
    for r in range(ranks):
        parts[r].source = _stage(p, r, pieces) + within if r != p.me else src
    combine(p, dst, p.nbytes)
    p.rounds = 1
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
