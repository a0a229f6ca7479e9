"""The movers of host memory: copy between arrays and rings, many messages concurrently, in compiled code without the
interpreter lock.

A transfer is a row of 64-bit words. `drive` iterates over the rows, moves a slot wherever one is free or filled, and returns
when all are complete, when something stops, or after a while without progress, so that the caller can check signals and
deadlines. Rows keep their state, so `drive` can be called again to resume.
"""

from __future__ import annotations

import enum

from numba.extending import register_jitable

from xvcomm.backends.host import rendezvous
from xvcomm.backends.host.reducers import call_combine
from xvcomm.backends.host.rendezvous import copy_next, propose, through
from xvcomm.jit.atomics import (
    PENDING,
    READY,
    STOPPED,
    compare_and_swap,
    full_fence,
    hand_over,
    load,
    load_acquire,
    relax,
    store,
    store_release,
    stream_bytes,
)
from xvcomm.jit.compile import brief, compiling, kernel
from xvcomm.memory import ring

MISMATCH, SOME = 3, 4
"""Results of `drive` besides READY, PENDING and STOPPED: descriptions differ; at least one row is complete."""

ABORT, CONSUMED, COUNTERS = ring.ABORT, ring.CONSUMED, ring.COUNTERS
LINE, LEDGER, ENTRY = ring.LINE, ring.LEDGER, ring.ENTRY
MISMATCH_REASON = int(ring.Reason.MISMATCH)
MAX_LANES = ring.MAX_LANES
STREAM_BYTES = 64 << 20
"""Messages of at least this size exceed the caches and are written with nontemporal stores: 256 MB between two processes 16 ->
21 GB/s.
"""


class Kind(enum.IntEnum):
    """Operation of a row."""

    PUT = 1
    GET = 2
    GET_REDUCE = 3


class Word(enum.IntEnum):
    """Offsets of the words in a row."""

    KIND = 0
    RING = 1
    DATA = 2
    NBYTES = 3
    SEQUENCE = 4
    OP = 5  # the message's five fields, in the order of ring.Message
    DTYPE = 6
    LENGTH = 7
    TAG = 8
    DETAIL = 9
    PHASE = 10
    TURN = 11  # address of the ring end's number of completed messages
    LANES = 12
    SLOTS = 13
    SLOT_BYTES = 14
    LEDGER = 15
    SLOT_DATA = 16
    ITEMSIZE = 17
    COMBINE = 18
    REMOTE_FIRST = 19
    PEER = 20
    STATE = 21  # address of `rendezvous`'s state of the ring end; 0: messages are never copied directly
    LANE = 22  # index of the stream in its batch
    GATES = (
        23  # a word per stream of the batch: number of first rows of which those on this stream must be complete before
    )

    STARTS = 27


WIDTH = Word.STARTS + MAX_LANES
MAX_STREAMS = Word.STARTS - Word.GATES
NEW, POSTED, MOVING, STRAIGHT, DONE = 0, 1, 2, 3, 4

# Plain integers: numba treats an enum's members as constants only if they are globals.
_KIND, _RING, _DATA, _NBYTES = int(Word.KIND), int(Word.RING), int(Word.DATA), int(Word.NBYTES)
_SEQUENCE, _OP, _PHASE, _TURN = int(Word.SEQUENCE), int(Word.OP), int(Word.PHASE), int(Word.TURN)
_LANES, _SLOTS, _SLOT_BYTES = int(Word.LANES), int(Word.SLOTS), int(Word.SLOT_BYTES)
_LEDGER, _SLOT_DATA, _PEER = int(Word.LEDGER), int(Word.SLOT_DATA), int(Word.PEER)
_ITEMSIZE, _COMBINE, _REMOTE_FIRST = int(Word.ITEMSIZE), int(Word.COMBINE), int(Word.REMOTE_FIRST)
_STARTS, _STATE, _LANE, _GATES = int(Word.STARTS), int(Word.STATE), int(Word.LANE), int(Word.GATES)
_OFFER, _TOOK = 8 * ring.EntryWord.OFFER, 8 * ring.EntryWord.TOOK
_NOT_YET = rendezvous.NOT_YET
_PUT, _GET = int(Kind.PUT), int(Kind.GET)
_chunk_bytes, _lanes_used = register_jitable(ring.chunk_bytes), register_jitable(ring.lanes_used)
_part_bytes = register_jitable(ring.part_bytes)
_FIELDS = 5
_NOTHING, _PROGRESS, _COMPLETE, _STOPPED, _MISMATCH = 0, 1, 2, 3, 4


@register_jitable
def _entry(row: int, producer: bool) -> int:
    """Address of an end's ledger entry for the row's message."""
    index = load(row + 8 * _SEQUENCE) % LEDGER + (0 if producer else LEDGER)
    return load(row + 8 * _RING) + load(row + 8 * _LEDGER) + index * ENTRY


@register_jitable
def _post(row: int, producer: bool, offer: int) -> None:
    """Write and publish this end's description and its offer."""
    entry = _entry(row, producer)
    for i in range(_FIELDS):
        store(entry + 8 + 8 * i, load(row + 8 * (_OP + i)))
    store(entry + _OFFER, offer)
    store(entry + _TOOK, rendezvous.took(load(row + 8 * _STATE)))
    store_release(entry, load(row + 8 * _SEQUENCE) + 1)
    full_fence()


@register_jitable
def _compare(row: int, producer: bool) -> int:
    """Compare with the other end's description: _NOTHING if it is not published, _PROGRESS if equal, else _MISMATCH."""
    entry = _entry(row, not producer)
    if load_acquire(entry) != load(row + 8 * _SEQUENCE) + 1:
        return _NOTHING
    for i in range(_FIELDS):
        if load(entry + 8 + 8 * i) != load(row + 8 * (_OP + i)):
            compare_and_swap(load(row + 8 * _RING) + ABORT, 0, MISMATCH_REASON | (load(row + 8 * _PEER) << 8))
            return _MISMATCH
    return _PROGRESS


@register_jitable
def _offer(row: int, producer: bool) -> int:
    """Offer of this end's array in its description; see `rendezvous`."""
    state, data, nbytes = load(row + 8 * _STATE), load(row + 8 * _DATA), load(row + 8 * _NBYTES)
    if producer:
        capacity = load(row + 8 * _LANES) * load(row + 8 * _SLOTS) * load(row + 8 * _SLOT_BYTES)
        return propose(state, data, nbytes, _entry(row, False), load(row + 8 * _SEQUENCE), capacity)
    return rendezvous.offer(state, data, nbytes) if load(row + 8 * _KIND) == _GET else 0


@register_jitable
def _begin(row: int, producer: bool) -> int:
    """Publish this end's description, compare it with the other end's if that is published, and read the state of each lane."""
    base = load(row + 8 * _RING)
    sequence = load(row + 8 * _SEQUENCE)
    phase = load(row + 8 * _PHASE)
    if phase == NEW:
        if load_acquire(base + ABORT) != 0 and producer:
            return _STOPPED
        if sequence - load_acquire(base + CONSUMED) >= LEDGER:
            return _NOTHING
        offer = _offer(row, producer)
        if offer == _NOT_YET:
            return _NOTHING
        _post(row, producer, offer)
        store(row + 8 * _PHASE, POSTED)
    found = _compare(row, producer)
    offered = load(_entry(row, producer) + _OFFER) != 0
    if found == _MISMATCH or (found == _NOTHING and (offered or not producer)):
        return found
    if offered and not producer:
        rendezvous.begin_clock(load(row + 8 * _STATE))
    if offered and load(_entry(row, not producer) + _OFFER) != 0:
        store(row + 8 * _PHASE, STRAIGHT)
        return _PROGRESS
    for lane in range(load(row + 8 * _LANES)):
        counter = base + COUNTERS + (2 * lane + (0 if producer else 1)) * LINE
        store(row + 8 * (_STARTS + lane), load(counter))
    store(row + 8 * _PHASE, MOVING)
    return _PROGRESS


@register_jitable
def _move_lane(row: int, lane: int, low: int, high: int, chunk: int) -> int:
    """Move the next slot of a lane's part if possible; _COMPLETE when the part is complete."""
    base, producer = load(row + 8 * _RING), load(row + 8 * _KIND) == _PUT
    slots, slot_bytes = load(row + 8 * _SLOTS), load(row + 8 * _SLOT_BYTES)
    head = base + COUNTERS + 2 * lane * LINE
    tail = head + LINE
    mine = head if producer else tail
    count = load(mine)
    offset = low + (count - load(row + 8 * (_STARTS + lane))) * chunk
    if offset >= high:
        return _COMPLETE
    if producer:
        if count - load_acquire(tail) >= slots:
            return _NOTHING
    elif load_acquire(head) <= count:
        return _NOTHING
    nbytes = min(chunk, high - offset)
    data = load(row + 8 * _DATA) + offset
    slot = base + load(row + 8 * _SLOT_DATA) + (lane * slots + count % slots) * slot_bytes
    if producer:
        hand_over(slot, data, nbytes)
    elif load(row + 8 * _KIND) == _GET:
        if load(row + 8 * _NBYTES) >= STREAM_BYTES:
            stream_bytes(data, slot, nbytes)
        else:
            hand_over(data, slot, nbytes)
    else:
        items = nbytes // load(row + 8 * _ITEMSIZE)
        if load(row + 8 * _REMOTE_FIRST) != 0:
            call_combine(load(row + 8 * _COMBINE), data, slot, data, items)
        else:
            call_combine(load(row + 8 * _COMBINE), data, data, slot, items)
    store_release(mine, count + 1)
    return _COMPLETE if offset + nbytes >= high else _PROGRESS


@register_jitable
def _move_lanes(row: int) -> int:
    """Move at most one slot per lane."""
    nbytes = load(row + 8 * _NBYTES)
    lanes = load(row + 8 * _LANES)
    chunk = _chunk_bytes(nbytes, lanes, load(row + 8 * _SLOT_BYTES))
    used = _lanes_used(nbytes, lanes, chunk)
    part = _part_bytes(nbytes, used)
    complete, moved = 0, False
    for lane in range(used):
        low = lane * part
        result = _COMPLETE if low >= nbytes else _move_lane(row, lane, low, min(nbytes, low + part), chunk)
        complete += result == _COMPLETE
        moved = moved or result == _PROGRESS
    if complete == used:
        return _COMPLETE
    return _PROGRESS if moved else _NOTHING


@register_jitable
def _move_straight(row: int, producer: bool) -> int:
    """Copy at most one chunk directly between the two arrays."""
    state, sequence, nbytes = load(row + 8 * _STATE), load(row + 8 * _SEQUENCE), load(row + 8 * _NBYTES)
    theirs = load(_entry(row, not producer) + _OFFER)
    moved = copy_next(state, producer, sequence, load(row + 8 * _DATA), theirs, nbytes)
    if through(state, sequence, nbytes):
        return _COMPLETE
    return _PROGRESS if moved else _NOTHING


@register_jitable
def _advance(row: int) -> int:
    """Progress one row by at most one slot per lane, or one chunk."""
    producer = load(row + 8 * _KIND) == _PUT
    base = load(row + 8 * _RING)
    if load(row + 8 * _PHASE) < MOVING:
        begun = _begin(row, producer)
        if begun == _NOTHING and load_acquire(base + ABORT) != 0:
            # Data that the peer published before it left is still delivered: check once more.
            begun = _begin(row, producer)
            return begun if begun != _NOTHING else _STOPPED
        if begun != _PROGRESS:
            return begun
    aborted = load_acquire(base + ABORT) != 0
    result = _move_straight(row, producer) if load(row + 8 * _PHASE) == STRAIGHT else _move_lanes(row)
    if result == _COMPLETE:
        sequence = load(row + 8 * _SEQUENCE)
        state = load(row + 8 * _STATE)
        if producer:
            rendezvous.learn(state, load(row + 8 * _NBYTES), _entry(row, False), sequence)
        else:
            rendezvous.stop_clock(state)
            store_release(base + CONSUMED, sequence + 1)
        store(row + 8 * _PHASE, DONE)
        compare_and_swap(load(row + 8 * _TURN), sequence, sequence + 1)
    return _STOPPED if result == _NOTHING and aborted else result


@register_jitable
def _ready(rows: int, row: int) -> int:
    """Whether earlier transfers permit the row to begin: those of its ring end, and those of streams that
    its stream waits for.
    """
    turn = load_acquire(load(row + 8 * _TURN))
    if turn < 0:
        # An earlier transfer was given up. The ring is stopped next, with a reason that is not known before.
        return _STOPPED if load_acquire(load(row + 8 * _RING) + ABORT) != 0 else _NOTHING
    if turn != load(row + 8 * _SEQUENCE):
        return _NOTHING
    for lane in range(MAX_STREAMS):
        for i in range(load(row + 8 * (_GATES + lane))):
            earlier = rows + 8 * WIDTH * i
            if load(earlier + 8 * _LANE) == lane and load(earlier + 8 * _PHASE) != DONE:
                return _NOTHING
    return _PROGRESS


@register_jitable
def _step(rows: int, row: int) -> int:
    """Progress an incomplete row, if it may begin; a result of `_advance`."""
    ready = _ready(rows, row) if load(row + 8 * _PHASE) == NEW else _PROGRESS
    return _advance(row) if ready == _PROGRESS else ready


@register_jitable
def try_row(row: int) -> int:
    """Progress a single transfer without waiting: READY, PENDING, STOPPED or MISMATCH."""
    result = _PROGRESS
    while result == _PROGRESS:
        result = _step(row, row)
    if result == _COMPLETE:
        return READY
    if result == _NOTHING:
        return PENDING
    return STOPPED if result == _STOPPED else MISMATCH


@register_jitable
def take(counter: int) -> int:
    """Take the number of a ring end's next message; the caller holds the interpreter lock."""
    number = load(counter)
    store(counter, number + 1)
    return number


@register_jitable
def drive_all(rows: int, count: int, wake: int, seen: int, spins: int, budget: int) -> int:
    """Progress all transfers until they are complete.

    Args:
        rows: address of `count` rows of WIDTH words.
        count: number of rows.
        wake: address of a word; `drive` returns early once it differs from `seen`, or any row completes. 0: neither.
        seen: last value of that word.
        spins: tries before yielding the core.
        budget: total nanoseconds off the core before returning.

    Returns:
        READY, PENDING, SOME; or STOPPED or MISMATCH, with the row's index from bit 8 on.
    """
    idle = slept = 0
    while True:
        open_rows, progress, finished = 0, False, False
        for i in range(count):
            row = rows + 8 * WIDTH * i
            if load(row + 8 * _PHASE) == DONE:
                continue
            result = _step(rows, row)
            if result == _STOPPED or result == _MISMATCH:
                return (STOPPED if result == _STOPPED else MISMATCH) | (i << 8)
            finished = finished or result == _COMPLETE
            progress = progress or result != _NOTHING
            open_rows += result != _COMPLETE
        if open_rows == 0:
            return READY
        if wake != 0 and (finished or load_acquire(wake) != seen):
            return SOME
        if progress:
            idle = slept = 0
            continue
        if slept > budget:
            return PENDING
        slept += relax(idle, spins)
        idle += 1


with compiling():
    drive = kernel("int64(int64, int64, int64, int64, int64, int64)")(drive_all)
    next_number = brief("int64(int64)")(take)
