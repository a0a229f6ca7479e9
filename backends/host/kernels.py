"""The host's native collectives: compiled loops over an arena of shared memory that all ranks of an island map.

Each round a rank copies pieces of its input into its own stage, all meet at a barrier, and each copies or reduces
what it needs out of the others' stages; two stages alternate, so that one barrier a round is enough. Pieces are small
enough to stay in the caches: measured on two cores, staging this way beats mapping the peer's memory
(process_vm_readv) at every size, because the kernel's page pinning costs more than the second copy.

Every function resumes: it returns PENDING after a while without progress and is called again with the same state.
"""

from __future__ import annotations

import enum

from numba.extending import register_jitable

from xvcomm.atomics import READY, await_word, copy_bytes, fetch_add, load, load_acquire, store
from xvcomm.backends.host.reducers import call_scale, reduce_many
from xvcomm.jit import compiling, kernel
from xvcomm.ring import ABORT, LINE
from xvcomm.shm import PAGE

__all__ = ["Mode", "exchange", "join", "one_shot", "reduce", "scale", "stages"]


class Mode(enum.IntEnum):
    """Who gets the reduced blocks."""

    SCATTER = 0
    ALL = 1
    ROOT = 2


# State words of a call: round, phase, rounds in all. PIECES counts over the arena's life and picks the stage.
_ROUND, _PHASE, _ROUNDS, _PIECES = 0, 1, 2, 3
_COPY_IN, _MEET, _MEET_AGAIN = 0, 1, 2
_SCATTER, _ALL = int(Mode.SCATTER), int(Mode.ALL)


def stages(ranks: int) -> int:
    """Offset of the stages in an arena: after page 0 (its line 1 is the abort word) a line a rank."""
    return PAGE + -(-ranks * LINE // PAGE) * PAGE


@register_jitable
def _line(arena: int, rank: int) -> int:
    """A rank's line: word 0 counts its arrivals, words 1 and 2 tell its rounds for even and odd pieces."""
    return arena + PAGE + rank * LINE


@register_jitable
def _stage(arena: int, ranks: int, rank: int, stage: int, pieces: int) -> int:
    first = arena + PAGE + (ranks * LINE + PAGE - 1) // PAGE * PAGE
    return first + (2 * rank + pieces % 2) * stage


@register_jitable
def _arrive(arena: int, me: int) -> None:
    fetch_add(_line(arena, me), 1)


@register_jitable
def _meet(arena: int, ranks: int, me: int, spins: int, budget: int) -> int:
    """Wait until everybody arrived as often as I did."""
    target = load(_line(arena, me))
    for other in range(ranks):
        result = await_word(_line(arena, other), target, arena + ABORT, spins, budget)
        if result != READY:
            return result
    return READY


@register_jitable
def _window(total: int, round: int, piece: int) -> int:
    """Bytes of a range of `total` that fall into this round."""
    return max(0, min(piece, total - round * piece))


def _exchange(arena, ranks, me, stage, columns, src, dst, parts, state, spins, budget):  # type: ignore[no-untyped-def]
    """Move parts of inputs to parts of outputs: gathers, scatters, broadcasts, all-to-all.

    Args:
        arena, ranks, me, stage: the arena's address, its ranks, this rank's number, bytes of a stage.
        columns: 1 where all readers want the same of a rank, `ranks` where each wants its own.
        src, dst: addresses of input and output.
        parts: 4 x ranks table: offset and bytes of what I stage for each column, of what I take from each rank.
            What I take from myself is read straight from the input at my own column's offset.
        state: words that keep this call's place.
    """
    piece = stage // columns // 64 * 64
    own = me if columns > 1 else 0
    while True:
        k, pieces = state[_ROUND], state[_PIECES]
        if state[_PHASE] == _COPY_IN:
            base = _stage(arena, ranks, me, stage, pieces)
            most = 0
            for c in range(columns):
                most = max(most, parts[1, c] if (columns == 1 or c != me) else 0)
                if columns == 1 or c != me:
                    copy_bytes(base + c * piece, src + parts[0, c] + k * piece, _window(parts[1, c], k, piece))
            for r in range(ranks):
                most = max(most, parts[3, r] if r != me else 0)
            if k == 0:
                store(_line(arena, me) + 8 * (1 + pieces % 2), (most + piece - 1) // piece)
                if parts[3, me] > 0:
                    copy_bytes(dst + parts[2, me], src + parts[0, own], parts[3, me])
            _arrive(arena, me)
            state[_PHASE] = _MEET
        result = _meet(arena, ranks, me, spins, budget)
        if result != READY:
            return result
        if k == 0:
            rounds = 1
            for r in range(ranks):
                rounds = max(rounds, load_acquire(_line(arena, r) + 8 * (1 + pieces % 2)))
            state[_ROUNDS] = rounds
        for r in range(ranks):
            if r != me:
                base = _stage(arena, ranks, r, stage, pieces) + own * piece
                copy_bytes(dst + parts[2, r] + k * piece, base, _window(parts[3, r], k, piece))
        state[_PIECES] = pieces + 1
        state[_ROUND] = k + 1
        state[_PHASE] = _COPY_IN
        if state[_ROUND] >= state[_ROUNDS]:
            return READY


def _reduce(arena, ranks, me, stage, mode, root, src, dst, blocks, kit, scale, itemsize, work, state, spins, budget):  # type: ignore[no-untyped-def]
    """Reduce block r of all inputs at rank r; then leave it there, or hand it to all or to the root.

    Args:
        mode, root: see Mode; `root` counts only for ROOT.
        blocks: 2 x ranks table: offset and bytes of each block.
        kit: the five numbers of a `reducers.Kit`.
        scale: (address of a scaler or 0, factor, divisor), applied to the finished block.
        work: addresses of the sources' table (int64) and of the accumulator.
        Others: as in `exchange`.
    """
    piece = stage // ranks // 64 * 64
    while True:
        k, pieces = state[_ROUND], state[_PIECES]
        base = _stage(arena, ranks, me, stage, pieces)
        at = k * piece
        if state[_PHASE] == _COPY_IN:
            most = 0
            for r in range(ranks):
                most = max(most, blocks[1, r])
                if r != me:
                    copy_bytes(base + r * piece, src + blocks[0, r] + at, _window(blocks[1, r], k, piece))
            state[_ROUNDS] = (most + piece - 1) // piece
            _arrive(arena, me)
            state[_PHASE] = _MEET
        result = _meet(arena, ranks, me, spins, budget)
        if result != READY:
            return result
        if state[_PHASE] == _MEET:
            nbytes = _window(blocks[1, me], k, piece)
            direct = mode == _ALL or me == root
            target = dst + at if mode == _SCATTER else dst + blocks[0, me] + at if direct else base + me * piece
            if nbytes > 0:
                for r in range(ranks):
                    work[r] = _stage(arena, ranks, r, stage, pieces) + me * piece
                work[me] = src + blocks[0, me] + at
                reduce_many(kit, target, work, ranks, nbytes, itemsize, work[ranks])
                if scale[0] != 0:
                    call_scale(int(scale[0]), target, target, nbytes // itemsize, scale[1], int(scale[2]))
                if mode == _ALL:
                    copy_bytes(base + me * piece, target, nbytes)
            if mode != _SCATTER:
                _arrive(arena, me)
                state[_PHASE] = _MEET_AGAIN
                continue
        elif mode == _ALL or me == root:
            for r in range(ranks):
                if r != me:
                    theirs = _stage(arena, ranks, r, stage, pieces) + r * piece
                    copy_bytes(dst + blocks[0, r] + at, theirs, _window(blocks[1, r], k, piece))
        state[_PIECES] = pieces + 1
        state[_ROUND] = k + 1
        state[_PHASE] = _COPY_IN
        if state[_ROUND] >= state[_ROUNDS]:
            return READY


def _one_shot(arena, ranks, me, stage, src, dst, nbytes, kit, scale, itemsize, work, state, spins, budget):  # type: ignore[no-untyped-def]
    """All-reduce what fits a stage with one barrier: everybody stages all of it and reduces all of it."""
    pieces = state[_PIECES]
    if state[_PHASE] == _COPY_IN:
        copy_bytes(_stage(arena, ranks, me, stage, pieces), src, nbytes)
        _arrive(arena, me)
        state[_PHASE] = _MEET
    result = _meet(arena, ranks, me, spins, budget)
    if result != READY:
        return result
    for r in range(ranks):
        work[r] = _stage(arena, ranks, r, stage, pieces)
    reduce_many(kit, dst, work, ranks, nbytes, itemsize, work[ranks])
    if scale[0] != 0:
        call_scale(int(scale[0]), dst, dst, nbytes // itemsize, scale[1], int(scale[2]))
    state[_PIECES] = pieces + 1
    return READY


def _join(counter: int) -> int:
    """Count one more member; gives how many were there before."""
    return fetch_add(counter, 1)


def _scale(function, dst, src, count, factor, divisor):  # type: ignore[no-untyped-def]
    """Call a scaler."""
    call_scale(function, dst, src, count, factor, divisor)


_KIT = "UniTuple(int64, 5)"
_TAIL = f"{_KIT}, Tuple((int64, float64, int64)), int64, int64[::1], int64[::1], int64, int64"
with compiling():
    join = kernel("int64(int64)")(_join)
    scale = kernel("void(int64, int64, int64, int64, float64, int64)")(_scale)
    exchange = kernel(
        "int64(int64, int64, int64, int64, int64, int64, int64, int64[:, ::1], int64[::1], int64, int64)"
    )(_exchange)
    reduce = kernel(
        f"int64(int64, int64, int64, int64, int64, int64, int64, int64, int64[:, ::1], {_TAIL})"
    )(_reduce)
    one_shot = kernel(f"int64(int64, int64, int64, int64, int64, int64, int64, {_TAIL})")(_one_shot)
