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

import enum
from typing import Any

import numpy as np

from xvcomm.backends.host.kernels import Mode, arrive, combine, meet, member, parts_of, plan_at, reduce
from xvcomm.backends.host.processes import ACCESS, copy, entered, exposed, reachable, revoke, verified
from xvcomm.backends.host.tuning import NEVER, TUNING, next_try, note_try
from xvcomm.jit.atomics import READY, await_word, load_acquire, monotonic, store_release, usleep
from xvcomm.jit.compile import compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.ring import ABORT
from xvcomm.memory.segment import PAGE

LEAST = 256 << 10
"""Minimum total bytes of all shares for this method; below, the additional barrier costs more than it saves."""

_PIECE = 256 << 10
"""Compared with 128 and 512 KiB by measurement."""
_PATIENCE_US, _PAUSE_US = 1_000_000, 100


class Step(enum.IntEnum):
    """State of a call."""

    ENTER = 0
    MEET = 1
    STAGED = 2
    DIRECT = 3
    LEAVE = 4
    FAILED = 5


# Plain integers: numba treats an enum's members as constants only if they are globals.
_SCATTER, _ALL = int(Mode.SCATTER), int(Mode.ALL)
_ENTER, _MEET, _STAGED, _DIRECT, _LEAVE, _FAILED = (int(s) for s in Step)
_tuning_at, _access_at, _Tuning = compiled_at(TUNING), compiled_at(ACCESS), python_type(TUNING)


def piece_bytes(ranks: int) -> int:
    """Bytes of each other member's share that are read at a time: together they fit the second-level cache."""
    return max(PAGE, _PIECE // (ranks - 1) // PAGE * PAGE)


_piece_bytes = register_jitable(piece_bytes)


def room(ranks: int) -> np.ndarray:
    """Memory for the pieces that a member reads."""
    memory = np.empty((ranks - 1) * (piece_bytes(ranks) + PAGE) + PAGE, np.uint8)
    return memory[-memory.ctypes.data % PAGE :]


def tuning() -> Any:
    """A `TUNING` for a size class, the same on all members except for `took`: the slowest of them counts."""
    return _Tuning(best=(NEVER, NEVER))


@register_jitable
def _try_others(p: Any) -> int:
    """1 if the memory of all others can be read and written, else -1."""
    for r in range(p.ranks):
        if r != p.me and not reachable(_access_at(p.access), member(p, r).process):
            return -1
    return 1


@register_jitable
def _exposed(p: Any, src: int, dst: int) -> bool:
    """Whether the system lets other processes access these arrays."""
    count, parts = 0, parts_of(p)
    for r in range(p.ranks):
        count += parts[r].put_bytes
    writes = p.mode == _ALL or (p.mode != _SCATTER and p.me == p.root)
    return exposed(_access_at(p.access), member(p, p.me).process, src, count, dst, count if writes else 0)


@register_jitable
def _offer(p: Any, src: int, dst: int) -> None:
    """Publish this member's arrays, if they are accessible, and the duration of its last try."""
    mine = member(p, p.me)
    offered = _access_at(p.access).reach > 0 and _exposed(p, src, dst)
    mine.src, mine.dst, mine.took = src if offered else 0, dst, _tuning_at(p.tuning).took


@register_jitable
def _choose(p: Any) -> int:
    """The method for this call, by words that are the same for all members; none of them has offered arrays in the first."""
    p.began = 0
    slowest, access = 0, _access_at(p.access)
    for r in range(p.ranks):
        if load_acquire(address_of(member(p, r), "src")) == 0:
            if access.reach == 0:
                access.reach = _try_others(p)
            return _STAGED
        slowest = max(slowest, member(p, r).took)
    tuning = _tuning_at(p.tuning)
    if tuning.trials > 0:
        note_try(tuning, (tuning.trials - 1) % 2, slowest)
    way = next_try(tuning)
    if way >= 0:
        p.began = monotonic()
    else:
        way = 1 if tuning.best[1] < tuning.best[0] else 0
    return _DIRECT if way == 1 else _STAGED


@register_jitable
def _copy(p: Any, rank: int, write: bool, mine: int, theirs: int, count: int) -> bool:
    """Copy from or to a member's array; False if it has given up, everything stops, or its memory is not accessible."""
    peer = member(p, rank)
    pid, touch, offer = peer.process.pid, member(p, p.me).touch, address_of(peer, "src")
    return copy(write, _access_at(p.access), pid, mine, theirs, count, touch, offer, 1, p.arena + ABORT)


@register_jitable
def _reduce_piece(p: Any, src: int, dst: int, offset: int, count: int) -> bool:
    """Read `count` bytes at `offset` of all inputs, reduce them, and write the result to the outputs."""
    ranks, me, mode, parts, room = p.ranks, p.me, p.mode, parts_of(p), p.room
    for r in range(ranks):
        if r == me:
            parts[r].source = src + offset
            continue
        theirs = member(p, r).src + offset
        parts[r].source = room + theirs % PAGE  # same page offset as the source, which the kernel copies page by page
        if not _copy(p, r, False, parts[r].source, theirs, count):
            return False
        room += _piece_bytes(ranks) + PAGE
    target = dst + offset
    if mode == _SCATTER:
        target = dst + (offset - parts[me].put_offset) // p.itemsize * p.result_size
    elif mode != _ALL and me != p.root:
        target = parts[p.root].source
    combine(p, target, count)
    for r in range(ranks):
        wants = mode == _ALL or (mode != _SCATTER and r == p.root)
        if r != me and wants and not _copy(p, r, True, target, member(p, r).dst + offset, count):
            return False
    return True


@register_jitable
def _reduce_direct(p: Any, src: int, dst: int) -> int:
    if p.step == _DIRECT:
        p.step = _LEAVE
        piece = _piece_bytes(p.ranks)
        block = parts_of(p)[p.me]
        start, total = block.put_offset, block.put_bytes
        for at in range(0, total, piece):
            if not _reduce_piece(p, src, dst, start + at, min(piece, total - at)):
                p.step = _FAILED
                break
        if p.step == _LEAVE:
            arrive(p)
    if p.step == _FAILED:
        # The failure is detected and reported elsewhere.
        mine = member(p, p.me)
        return await_word(address_of(mine, "arrivals"), mine.arrivals + 1, p.arena + ABORT, p.spins, p.budget)
    return meet(p)


def _reduce(plan: int, src: int, dst: int) -> int:
    """Like `kernels.reduce`, with either method."""
    p = plan_at(plan)
    if p.step == _ENTER:
        _offer(p, src, dst)
        arrive(p)
        p.step = _MEET
    if p.step == _MEET:
        result = meet(p)
        if result != READY:
            return result
        p.step = _choose(p)
    result = reduce(plan, src, dst) if p.step == _STAGED else _reduce_direct(p, src, dst)
    if result == READY:
        p.step = _ENTER
        if p.began != 0:
            _tuning_at(p.tuning).took = monotonic() - p.began
    return result


def _withdraw(plan: int) -> None:
    """Withdraw this member's arrays before the end of a call; returns when no other member accesses them."""
    p = plan_at(plan)
    store_release(address_of(member(p, p.me), "src"), 0)
    for r in range(p.ranks):
        if r != p.me:
            revoke(member(p, r).touch)
    waited, access = 0, _access_at(p.access)
    for r in range(p.ranks):
        other = member(p, r)
        # The word stays set if the process has died, or was stopped outside of the kernel: a revoked copy cannot begin any
        # more.
        while r != p.me and entered(other.touch) and waited < _PATIENCE_US and verified(access, other.process):
            usleep(_PAUSE_US)
            waited += _PAUSE_US


with compiling():
    reduce_either = kernel("int64(int64, int64, int64)")(_reduce)
    withdraw = kernel("void(int64)")(_withdraw)
