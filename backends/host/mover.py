"""The movers of host memory: copy between arrays and rings, many messages concurrently, in compiled code without the
interpreter lock.

A transfer is a record, called row. `drive` iterates over the rows, moves a slot wherever one is free or filled, and returns
when all are complete, when something stops, or after a while without progress, so that the caller can check signals and
deadlines. Rows keep their state, so `drive` can be called again to resume.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from xvcomm.backends.host import rendezvous
from xvcomm.backends.host.from_array import LEAST_CARRIED, copy_if_late, goes_from_array, is_received, note_message_end
from xvcomm.backends.host.reducers import call_combine
from xvcomm.backends.host.rendezvous import copy_next, propose, through
from xvcomm.jit.atomics import (
    BUDGET,
    LONG_BUDGET,
    PENDING,
    READY,
    STOPPED,
    compare_and_swap,
    full_fence,
    hand_over,
    load,
    load_acquire,
    monotonic,
    relax,
    rest,
    store,
    store_release,
    stream_bytes,
)
from xvcomm.jit.ccall import call_3
from xvcomm.jit.compile import brief, compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at
from xvcomm.memory.ring import (
    ABORT,
    CARRIER,
    CONSUMED,
    COPIES,
    COUNTERS,
    DIRECT,
    EXPECTS,
    GEOMETRY,
    LEDGER,
    LEDGER_ENTRY,
    LINE,
    MAX_LANES,
    MESSAGE,
    Reason,
    chunk_bytes,
    lanes_used,
    part_bytes,
)
from xvcomm.trace.contract import agree

MISMATCH, SOME = 3, 4
"""Results of `drive` besides READY, PENDING and STOPPED: descriptions differ; at least one row is complete."""

STREAM_BYTES = 64 << 20
"""Messages from this size on are written past the caches: 256 MB between two processes took 16, then 21 GB/s."""


class Kind(enum.IntEnum):
    """Operation of a row."""

    PUT = 1
    GET = 2
    GET_REDUCE = 3


MAX_STREAMS = 4
_LEAST_SHARED = 256 << 10  # bytes of a message during whose copies other threads carry
_TRIES_OF_A_CALL = 500  # tries that take as long as one call of the carrier
_SOON = 100  # calls of the carrier without progress, until which it looks at a few connections
_ROUNDS = 16  # calls of the carrier between two looks at the clock, which may be a system call

ROW = np.dtype([
    ("kind", "i8"),
    ("ring", "i8"),
    ("data", "i8"),
    ("sequence", "i8"),
    ("message", MESSAGE),
    ("phase", "i8"),
    ("turn", "i8"),  # address of the ring end's number of completed messages
    ("geometry", GEOMETRY),
    ("itemsize", "i8"),
    ("combine", "i8"),  # address of the function that reduces
    ("remote_first", "i8"),
    ("apart", "i8"),  # bytes from the array to the own elements that are reduced with those that come
    ("peer", "i8"),  # rank at the other end
    ("state", "i8"),  # address of a `rendezvous.STATE`; 0: messages are never copied directly
    ("carrier", "i8"),  # as in `RingEnd`
    ("direct", "i8"),
    ("lane", "i8"),  # index of the stream in its batch
    ("gates", "i8", MAX_STREAMS),  # per stream of the batch: number of first rows of which those on it must be complete before
    ("starts", "i8", MAX_LANES),  # each lane's counter at the beginning
    ("copy_at", "i8"),  # when a message that goes from its array is copied to the ring; 0: never
])  # fmt: skip

NEW, POSTED, MOVING, STRAIGHT, CARRIED, DONE = 0, 1, 2, 3, 4, 5
_row_at, _entry_at, _carrier_at, _direct_at = map(compiled_at, (ROW, LEDGER_ENTRY, CARRIER, DIRECT))
# Plain integers: numba treats an enum's members as constants only if they are globals.
_PUT, _GET, _GET_REDUCE, _MISMATCH_REASON = int(Kind.PUT), int(Kind.GET), int(Kind.GET_REDUCE), int(Reason.MISMATCH)
_NOT_YET = rendezvous.NOT_YET
_chunk_bytes, _lanes_used = register_jitable(chunk_bytes), register_jitable(lanes_used)
_part_bytes = register_jitable(part_bytes)
_NOTHING, _PROGRESS, _COMPLETE, _STOPPED, _MISMATCH = 0, 1, 2, 3, 4


@register_jitable
def _entry(row: Any, producer: bool) -> Any:
    """An end's ledger entry for the row's message."""
    index = row.sequence % LEDGER + (0 if producer else LEDGER)
    return _entry_at(row.ring + row.geometry.ledger, index)


@register_jitable
def _post(row: Any, producer: bool, offer: int) -> None:
    """Write and publish this end's description and its offer."""
    entry = _entry(row, producer)
    entry.message = row.message
    entry.offer, entry.took = offer, rendezvous.took(row.state)
    store_release(address_of(entry, "number"), row.sequence + 1)
    full_fence()


@register_jitable
def _compare(row: Any, producer: bool) -> int:
    """Compare with the other end's description: _NOTHING if it is not published, _PROGRESS if equal, else _MISMATCH."""
    entry = _entry(row, not producer)
    if load_acquire(address_of(entry, "number")) != row.sequence + 1:
        return _NOTHING
    if agree(entry.message, row.message):
        return _PROGRESS
    compare_and_swap(row.ring + ABORT, 0, _MISMATCH_REASON | (row.peer << 8))
    return _MISMATCH


@register_jitable
def _offer(row: Any, producer: bool) -> int:
    """Offer of this end's array in its description: to the other end, see `rendezvous`, or to the carrier."""
    nbytes, ring = row.message.nbytes, row.geometry
    capacity = ring.lanes * ring.slots * ring.slot_bytes
    if row.carrier != 0:
        if producer:
            return row.data if goes_from_array(row, capacity) else 0
        return row.data if nbytes >= LEAST_CARRIED and row.kind != _GET_REDUCE else 0
    if producer:
        return propose(row.state, row.data, nbytes, _entry(row, False), row.sequence, capacity)
    return rendezvous.offer(row.state, row.data, nbytes) if row.kind == _GET else 0


@register_jitable
def _note_starts(row: Any, producer: bool) -> None:
    """Read the state of each lane: of a producer before the carrier sends any slot of what goes from the array."""
    for lane in range(row.geometry.lanes):
        row.starts[lane] = load(row.ring + COUNTERS + (2 * lane + (0 if producer else 1)) * LINE)


@register_jitable
def _begin(row: Any, producer: bool) -> int:
    """Publish this end's description, compare it with the other end's if that is published, and read the state of each lane."""
    base = row.ring
    if row.phase == NEW:
        if load_acquire(base + ABORT) != 0 and producer:
            return _STOPPED
        if row.sequence - load_acquire(base + CONSUMED) >= LEDGER:
            return _NOTHING
        row.copy_at = 0
        offer = _offer(row, producer)
        if offer == _NOT_YET:
            return _NOTHING
        _note_starts(row, producer)
        _post(row, producer, offer)
        row.phase = POSTED
    offered = _entry(row, producer).offer != 0
    if offered and producer and row.carrier != 0:
        row.phase = CARRIED
        return _PROGRESS
    found = _compare(row, producer)
    if found == _MISMATCH or (found == _NOTHING and (offered or not producer)):
        return found
    if row.state != 0 and offered and not producer:
        rendezvous.begin_clock(row.state)
    if offered and _entry(row, not producer).offer != 0:
        row.phase = STRAIGHT
        return _PROGRESS
    if not producer:
        _note_starts(row, producer)
    row.phase = MOVING
    return _PROGRESS


@register_jitable
def _carried(row: Any, lane: int, count: int) -> bool:
    """Whether the carrier has received a slot of this message into the array."""
    if row.direct == 0:
        return False
    direct = _direct_at(row.direct)
    return load_acquire(address_of(direct, "message")) == row.sequence + 1 and count >= direct.first[lane]


@register_jitable
def _move_lane(row: Any, lane: int, low: int, high: int, chunk: int) -> int:
    """Move the next slot of a lane's part if possible; _COMPLETE when the part is complete."""
    producer, ring = row.kind == _PUT, row.geometry
    head = row.ring + COUNTERS + 2 * lane * LINE
    tail = head + LINE
    mine = head if producer else tail
    count = load(mine)
    offset = low + (count - row.starts[lane]) * chunk
    if offset >= high:
        return _COMPLETE
    if producer:
        if count - load_acquire(tail) >= ring.slots:
            return _NOTHING
    elif load_acquire(head) <= count:
        return _NOTHING
    nbytes = min(chunk, high - offset)
    data = row.data + offset
    slot = row.ring + ring.data + (lane * ring.slots + count % ring.slots) * ring.slot_bytes
    if producer:
        hand_over(slot, data, nbytes)
    elif row.kind == _GET_REDUCE:
        own = data + row.apart
        a, b = (slot, own) if row.remote_first != 0 else (own, slot)
        call_combine(row.combine, data, a, b, nbytes // row.itemsize)
    elif not _carried(row, lane, count):
        if row.message.nbytes >= STREAM_BYTES:
            stream_bytes(data, slot, nbytes)
        else:
            hand_over(data, slot, nbytes)
    store_release(mine, count + 1)
    return _COMPLETE if offset + nbytes >= high else _PROGRESS


@register_jitable
def _move_lanes(row: Any) -> int:
    """Move at most one slot per lane."""
    nbytes, ring = row.message.nbytes, row.geometry
    chunk = _chunk_bytes(nbytes, ring.lanes, ring.slot_bytes, ring.least_chunk)
    used = _lanes_used(nbytes, ring.lanes, chunk)
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
def _move_straight(row: Any, producer: bool) -> int:
    """Copy at most one chunk directly between the two arrays."""
    nbytes, theirs = row.message.nbytes, _entry(row, not producer).offer
    moved = copy_next(row.state, producer, row.sequence, row.data, theirs, nbytes)
    if through(row.state, row.sequence, nbytes):
        return _COMPLETE
    return _PROGRESS if moved else _NOTHING


@register_jitable
def _advance(row: Any) -> int:
    """Progress one row by at most one slot per lane, or one chunk."""
    producer, abort = row.kind == _PUT, row.ring + ABORT
    if row.phase < MOVING:
        begun = _begin(row, producer)
        if begun == _NOTHING and load_acquire(abort) != 0:
            # Data that the peer published before it left is still delivered: check once more.
            begun = _begin(row, producer)
            return begun if begun != _NOTHING else _STOPPED
        if begun != _PROGRESS:
            return begun
    aborted = load_acquire(abort) != 0
    if row.phase == CARRIED:
        result = _COMPLETE if is_received(row) else _NOTHING
        if result == _NOTHING and copy_if_late(row):
            row.phase, result = MOVING, _PROGRESS
    elif row.phase == STRAIGHT:
        result = _move_straight(row, producer)
    else:
        result = _move_lanes(row)
    if result == _COMPLETE:
        if producer:
            if row.carrier != 0:
                note_message_end(row)
            rendezvous.learn(row.state, row.message.nbytes, _entry(row, False), row.sequence)
        else:
            rendezvous.stop_clock(row.state)
            store_release(row.ring + CONSUMED, row.sequence + 1)
        row.phase = DONE
        compare_and_swap(row.turn, row.sequence, row.sequence + 1)
    return _STOPPED if result == _NOTHING and aborted else result


@register_jitable
def _ready(rows: int, row: Any) -> int:
    """Whether earlier transfers permit the row to begin: of its ring end, and of streams that its stream waits for."""
    turn = load_acquire(row.turn)
    if turn < 0:
        # An earlier transfer was given up. The ring is stopped next, with a reason that is not known before.
        return _STOPPED if load_acquire(row.ring + ABORT) != 0 else _NOTHING
    if turn != row.sequence:
        return _NOTHING
    for lane in range(MAX_STREAMS):
        for i in range(row.gates[lane]):
            earlier = _row_at(rows, i)
            if earlier.lane == lane and earlier.phase != DONE:
                return _NOTHING
    return _PROGRESS


@register_jitable
def _copies(row: Any) -> bool:
    """Whether a thread copies much for a row between hosts. For `GET` it does not: most is received into the array."""
    return bool(row.phase == MOVING and row.carrier != 0 and row.kind != _GET and row.message.nbytes >= _LEAST_SHARED)


@register_jitable
def _step(rows: int, row: Any) -> int:
    """Progress an incomplete row, if it may begin; a result of `_advance`."""
    ready = _ready(rows, row) if row.phase == NEW else _PROGRESS
    return _advance(row) if ready == _PROGRESS else ready


@register_jitable
def try_row(address: int) -> int:
    """Progress a single transfer without waiting: READY, PENDING, STOPPED or MISMATCH."""
    row, result = _row_at(address), _PROGRESS
    while result == _PROGRESS:
        result = _step(address, row)
    if result == _COMPLETE:
        return READY
    if result == _NOTHING:
        return PENDING
    return STOPPED if result == _STOPPED else MISMATCH


@register_jitable
def take(counter: int) -> int:
    """Take the number of a ring end's next message; nobody else may take one at the same time."""
    number = load(counter)
    store(counter, number + 1)
    return number


@register_jitable
def drive_all(rows: int, count: int, wake: int, seen: int, spins: int, budget: int) -> int:
    """Progress all transfers until they are complete.

    Args:
        rows: address of the rows.
        wake: address of a word; `drive` returns early once it differs from `seen`, or any row completes. 0: neither.
        seen: last value of that word.
        spins: tries before yielding the core.
        budget: total nanoseconds off the core before returning. Of rows between hosts total nanoseconds, and `LONG_BUDGET` in
            place of `BUDGET` while something comes: a return to Python costs 5 ms if another thread holds the interpreter lock.

    Returns:
        READY, PENDING, SOME; or STOPPED or MISMATCH, with the row's index from bit 8 on.
    """
    carrier = 0
    for i in range(count):
        carrier = max(carrier, _row_at(rows, i).carrier)
    if carrier == 0:
        return _drive(rows, count, wake, seen, spins, budget, 0)
    call_3(_carrier_at(carrier).progress, carrier, 1, 0)
    result = _drive(rows, count, wake, seen, spins // _TRIES_OF_A_CALL, budget, carrier)
    call_3(_carrier_at(carrier).progress, carrier, -1, 0)
    return result


@register_jitable
def _drive(rows: int, count: int, wake: int, seen: int, spins: int, budget: int, carrier: int) -> int:
    """See `drive_all`; carries frames between hosts meanwhile, if `carrier` is set."""
    idle = slept = rounds = began = 0
    while True:
        open_rows, progress, finished, copies = 0, False, False, False
        for i in range(count):
            row = _row_at(rows, i)
            if row.phase == DONE:
                continue
            result = _step(rows, row)
            if result == _STOPPED or result == _MISMATCH:
                return (STOPPED if result == _STOPPED else MISMATCH) | (i << 8)
            finished = finished or result == _COMPLETE
            progress = progress or result != _NOTHING
            copies = copies or (result == _PROGRESS and _copies(row))
            open_rows += result != _COMPLETE
        if open_rows == 0:
            return READY
        if wake != 0 and (finished or load_acquire(wake) != seen):
            return SOME
        if carrier != 0:
            haste = COPIES if copies else EXPECTS if idle < _SOON else 0
            progress = call_3(_carrier_at(carrier).progress, carrier, 0, haste) != 0 or progress
            rounds += 1
            if rounds % _ROUNDS == 0:
                now = monotonic()
                began = began if began != 0 else now
                if now - began > (LONG_BUDGET if idle < _SOON and budget == BUDGET else budget):
                    return PENDING  # a network may bring a little all the time: deadlines and signals must not wait for the end
        if progress:
            idle = slept = 0
            continue
        if slept > budget:
            return PENDING
        if carrier != 0:
            rest(idle, spins)
        else:
            slept += relax(idle, spins)
        idle += 1


with compiling():
    drive = kernel("int64(int64, int64, int64, int64, int64, int64)")(drive_all)
    next_number = brief("int64(int64)")(take)
