"""Compiled code that sends and receives frames over a rail of RDMA.

A frame goes by a SEND into the next buffer that the other side has posted. A slot's payload goes before it, by a WRITE into the
ring there, or into the consumer's array, on the same queue pair: so it is there when the frame is received. Every frame tells how
many the sender has received and handled: so many buffers it has posted again, and so many frames more may be sent.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import copy_bytes, load, store, store_release
from xvcomm.jit.compile import compiling, kernel
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.trace.contract import agree
from xvcomm.wire.frames import BUFFER_BYTES, BUFFERS, CONTROL_BYTES, HEADER, SHORT_BYTES, Kind
from xvcomm.wire.incoming import NEWS, PROTOCOL, REFUSED, end_slot, handle
from xvcomm.wire.locks import begin_copy, end_copy, enter_rail, leave_rail
from xvcomm.wire.outgoing import choose_frame
from xvcomm.wire.records import FLIGHTS, flight_at, frame_at, rail_at, rdma_at, region_at, wire_at
from xvcomm.wire.regions import find_region
from xvcomm.wire.slot_frames import copy_slot
from xvcomm.wire.verbs import completions_at, failed, flush, offer, post, queue_at, room, send, send_inline, take, write
from xvcomm.wire.visibility import make_visible

BROKEN = -1001
"""Failure of `take_frames` and `post_frames`: a request has failed; the queue pair's record says why."""

_SLOT, _TAKEN, _WRITTEN, _PLACED = int(Kind.SLOT), int(Kind.TAKEN), int(Kind.WRITTEN), int(Kind.PLACED)
_KEPT = 2
"""Buffers of the other side that are kept for TAKEN, which frees others."""
_OWED = BUFFERS // 2
"""Handled frames of which the other side does not know, that are worth a frame of their own."""
_FLYING_BYTES = 1 << 20
"""Bytes of WRITEs under way that keep a device busy. A rail takes no more, so that faster ones carry more."""
_TURN_BYTES = 512 << 10
"""Bytes that a rail takes before the other rails have their turn."""


@register_jitable
def _may_send(rdma: Any, queue: Any, kept: int) -> bool:
    """Whether there is room for a frame and its slot: in the queue, in the buffers here and in those there."""
    free = rdma.tickets[rdma.sent % BUFFERS] <= queue.ended
    return bool(free and rdma.sent - rdma.known < BUFFERS - kept) and room(queue) >= 2


@register_jitable
def _fill(rdma: Any, queue: Any, kind: int, header: int, data: int, nbytes: int) -> None:
    """Add the SEND of a frame of a kind, with its payload, to the chain."""
    place = rdma.sent % BUFFERS
    buffer, size = rdma.outbox + place * BUFFER_BYTES, 8 + HEADER + nbytes
    store(buffer, rdma.handled)
    copy_bytes(buffer + 8, header, HEADER)
    frame_at(buffer + 8).kind = kind
    if nbytes > 0:
        copy_bytes(buffer + 8 + HEADER, data, nbytes)
    if size <= rdma.inline:
        send_inline(queue, buffer, size)
    else:
        send(queue, buffer, rdma.outbox_key, size)
    rdma.told = rdma.handled
    rdma.tickets[place] = queue.posted + queue.filled
    rdma.sent += 1


@register_jitable
def _by_write(wire: Any, nbytes: int) -> bool:
    """Whether a slot's payload goes by a WRITE: it is not short, or compiled code cannot read or write it."""
    return bool(nbytes > SHORT_BYTES or wire.apart != 0 or wire.apart_there != 0)


@register_jitable
def _takes(wire: Any, rdma: Any, rail: Any, frame: Any) -> bool:
    """Whether a slot's payload goes into the array that the consumer has advertised: at most once, and never after a rail that
    had the slot was lost, since the consumer may have it, and be done with the array.
    """
    if wire.direct.message != frame.entry.number or not agree(wire.array_message, frame.entry.message):
        return False
    return bool(rail.out_again == 0 and wire.apart == 0 and wire.array_keys[rdma.there] != 0)


@register_jitable
def _write_slot(carrier: Any, rdma: Any, queue: Any, rail: Any, frame: Any) -> int:
    """Add the WRITE of a slot to the chain; the kind of its frame."""
    wire = wire_at(load(carrier.wires + 8 * rail.out_wire))
    ring = wire.geometry
    place = frame.lane * ring.slots + frame.slot % ring.slots
    offset = place * ring.slot_bytes
    here, key, source = wire.slots + offset, wire.keys[rdma.device], rail.out_data
    if source != here:  # a message that goes from its array
        index = find_region(carrier, source - frame.number, frame.entry.message.nbytes)
        if index >= 0 and region_at(carrier.regions, index).keys[rdma.device] != 0:
            region = region_at(carrier.regions, index)
            here, key = region.iova + source - region.address, region.keys[rdma.device]
        else:
            copy_slot(wire, place)
            source = here
    there, there_key, kind = wire.slots_there + offset, wire.keys_there[rdma.there], _WRITTEN
    if _takes(wire, rdma, rail, frame):
        there, there_key, kind = wire.array + frame.number, wire.array_keys[rdma.there], _PLACED
    write(queue, here, key, there, there_key, frame.length)
    flight = flight_at(rdma.flights, rdma.next % FLIGHTS)
    flight.request, flight.wire = queue.posted + queue.filled, rail.out_wire
    flight.place, flight.bytes, flight.source = place, frame.length, source
    rdma.next += 1
    rdma.flying += frame.length
    store(wire.flights + 8 * place, load(wire.flights + 8 * place) + 1)
    return kind


@register_jitable
def _stage(carrier: Any, rdma: Any, queue: Any, rail: Any) -> int:
    """Add the frame that the rail sends next to the chain; its bytes."""
    frame = frame_at(rail.out)
    nbytes = frame.length
    if frame.kind == _SLOT and _by_write(wire_at(load(carrier.wires + 8 * rail.out_wire)), nbytes):
        kind = _write_slot(carrier, rdma, queue, rail, frame)
        _fill(rdma, queue, kind, rail.out, 0, 0)
    else:
        _fill(rdma, queue, frame.kind, rail.out, rail.out_data, nbytes)
    rail.out = 0
    return HEADER + nbytes


@register_jitable
def _fill_taken(rdma: Any, queue: Any, rail: Any) -> None:
    """Add a frame that only tells what was handled."""
    frame = rail.header
    frame.kind, frame.length = _TAKEN, 0
    _fill(rdma, queue, _TAKEN, address_of(rail, "header"), 0, 0)


@register_jitable
def post_frames(carrier: Any, rail: Any, rail_index: int, idle: bool) -> int:
    """Send frames until the rail has enough under way or there is nothing to send; the number of bytes, or a failure.

    The caller holds the locks of the rail and of the carrier.

    Args:
        idle: whether to send credits that could wait, too.
    """
    rdma = rdma_at(rail.rdma)
    queue = queue_at(rdma.queue)
    total = 0
    while total < _TURN_BYTES and rdma.flying < _FLYING_BYTES and _may_send(rdma, queue, _KEPT):
        if not choose_frame(carrier, rail, rail_index, idle):
            break
        total += _stage(carrier, rdma, queue, rail)
    if total == 0 and rdma.handled - rdma.told >= _OWED and _may_send(rdma, queue, 0):
        _fill_taken(rdma, queue, rail)
        total = HEADER
    if total > 0:
        begin_copy(carrier, rail)
        error = post(queue)
        end_copy(carrier, rail)
        rail.sent += total
        if error != 0:
            return BROKEN
    return total


@register_jitable
def _land(carrier: Any, rdma: Any, until: int) -> None:
    """Note that the WRITEs up to a request have ended."""
    while rdma.first < rdma.next:
        flight = flight_at(rdma.flights, rdma.first % FLIGHTS)
        if flight.request > until:
            return
        wire = wire_at(load(carrier.wires + 8 * flight.wire))
        store(wire.flights + 8 * flight.place, load(wire.flights + 8 * flight.place) - 1)
        rdma.flying -= flight.bytes
        rdma.first += 1


@register_jitable
def _take_slot(carrier: Any, rail: Any, frame: Any, written: bool) -> None:
    """Publish a slot that has come: its payload is in the array or the ring already, or behind the frame."""
    nbytes, data = rail.slot_left, rail.slot_data
    rail.slot_left = 0
    if data != 0:
        wire = wire_at(load(carrier.wires + 8 * rail.slot_wire))
        source = address_of(frame, "kind") + HEADER
        if rail.slot_placed != 0:
            source = data
        elif written:
            ring = wire.geometry
            place = rail.slot_lane * ring.slots + rail.slot_number % ring.slots
            source = wire.slots + place * ring.slot_bytes
        if source != data:
            begin_copy(carrier, rail)
            copy_bytes(data, source, nbytes)
            end_copy(carrier, rail)
    end_slot(carrier, rail)


@register_jitable
def take_frames(carrier: Any, rail: Any, rail_index: int) -> int:
    """Handle the frames and the completions that have come; the number of bytes, or a failure.

    The caller holds the locks of the rail and of the carrier.
    """
    rdma = rdma_at(rail.rdma)
    queue = queue_at(rdma.queue)
    begin_copy(carrier, rail)
    taken = take(completions_at(rdma.completions))
    end_copy(carrier, rail)
    _land(carrier, rdma, queue.written)
    total, news, visible = 0, 0, False
    while rdma.handled < queue.received:
        buffer = rdma.inbox + rdma.handled % BUFFERS * BUFFER_BYTES
        frame = frame_at(buffer + 8)
        known = load(buffer)
        if known < rdma.known or known > rdma.sent:
            return PROTOCOL
        rdma.known = known
        rail.slot_placed = 1 if frame.kind == _PLACED else 0
        written = frame.kind == _WRITTEN or frame.kind == _PLACED
        if written:
            frame.kind = _SLOT
        if frame.kind != _SLOT and (frame.length < 0 or frame.length > CONTROL_BYTES):
            return PROTOCOL
        result = handle(carrier, rail, rail_index, frame)
        if result == REFUSED:
            return PROTOCOL
        if rail.slot_left > 0:
            wire = wire_at(load(carrier.wires + 8 * rail.slot_wire))
            wanted = rail.slot_data != 0
            if wanted and wire.apart != 0 and not visible:
                if not make_visible(carrier, rail, rdma, wire):
                    return BROKEN
                visible = True  # and so is all that this call handles, which has arrived before
            if wanted and not written and (rail.slot_left > SHORT_BYTES or wire.apart != 0):
                return PROTOCOL  # such a payload cannot be behind the frame
            _take_slot(carrier, rail, frame, written)
        news = NEWS if result == NEWS else news
        rdma.handled += 1
        total += HEADER + frame.length
    if total > 0:
        rail.received += total
        if news != 0:
            store_release(address_of(carrier, "has_news"), 1)
        offer(queue, rdma.handled + BUFFERS - queue.offered)
    return BROKEN if taken < 0 or failed(queue) else total


@register_jitable
def land_all(carrier: Any, rail: Any) -> None:
    """Note that no WRITE of a failed queue pair can arrive any more. Without effect if that is noted already."""
    rdma = rdma_at(rail.rdma)
    _land(carrier, rdma, flight_at(rdma.flights, (rdma.next - 1) % FLIGHTS).request)


def _greet(rail_address: int) -> int:
    """Send a first frame over a rail that is not in use yet; 0, or an errno."""
    rail = rail_at(rail_address)
    rdma = rdma_at(rail.rdma)
    queue = queue_at(rdma.queue)
    _fill_taken(rdma, queue, rail)
    return post(queue)


def _greeted(rail_address: int) -> int:
    """Whether the first frames have gone both ways: 1, 0 as long as one is under way, -1 if one has failed."""
    rdma = rdma_at(rail_at(rail_address).rdma)
    queue = queue_at(rdma.queue)
    take(completions_at(rdma.completions))
    if failed(queue):
        return -1
    return 1 if queue.received > 0 and queue.written == queue.posted else 0


def _drain(rail_address: int) -> int:
    """Take the completions of a lost rail, whose queue pair is in the error state; 1 if all have come."""
    rail = rail_at(rail_address)
    rdma = rdma_at(rail.rdma)
    queue, completions = queue_at(rdma.queue), completions_at(rdma.completions)
    enter_rail(rail)
    while take(completions) > 0:
        pass
    if queue.ended < queue.posted and rdma.flushed == 0 and flush(queue) == 0:
        rdma.flushed = 1
        while take(completions) > 0:
            pass
    leave_rail(rail)
    return 1 if queue.ended >= queue.posted else 0


with compiling():
    drain = kernel("int64(int64)")(_drain)
    greet = kernel("int64(int64)")(_greet)
    greeted = kernel("int64(int64)")(_greeted)
