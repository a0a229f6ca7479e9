"""Compiled code that makes the frames of messages: the slots which a producer has filled, and those that a lost rail had.

A slot stays in the ring until the consumer's credit has come, and remembers its rail: if that is lost, the slot goes over another
one. A WRITE of RDMA that was posted may change its slot on the other side until it has ended: as long as it flies, no rail sends
to that slot.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import copy_bytes, load, load_acquire, store, store_release
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.memory.ring import CONSUMED, chunk_bytes, lanes_used, part_bytes
from xvcomm.wire.control_frames import control, offer
from xvcomm.wire.counters import entry_of, flies, head_of, tail_of
from xvcomm.wire.delivery import another_is_sooner
from xvcomm.wire.frames import HEADER, Kind
from xvcomm.wire.records import AGAIN, MOST_RUN, UNTOLD, frame_at
from xvcomm.wire.shares import count_slot

_chunk_bytes, _lanes_used = register_jitable(chunk_bytes), register_jitable(lanes_used)
_part_bytes = register_jitable(part_bytes)
_SLOT, _ENTRY = int(Kind.SLOT), int(Kind.ENTRY)

_RUN_BYTES = 1 << 20
"""Slots that lie one behind the other go by one system call, up to about so many bytes. The last packet of a call is short, and
costs much of what one of 64 KiB costs: in calls of 256 KiB a message of 4 MiB took 1.13 of its time in calls of 1 MiB."""


@register_jitable
def _take_slot(rail: Any, rail_index: int, wire: Any, place: int) -> int:
    """Note that a rail carries a slot; the bytes of its frame."""
    store(wire.owners + 8 * place, 1 + rail_index)
    frame = frame_at(wire.frames, place)
    count_slot(wire, rail, frame.entry.number, frame.length)
    rail.out_again = 0
    return HEADER + frame.length


@register_jitable
def _send_slot(rail: Any, rail_index: int, wire: Any, place: int) -> None:
    _take_slot(rail, rail_index, wire, place)
    offer(rail, wire.frames + place * HEADER, load(wire.sources + 8 * place))


@register_jitable
def copy_slot(wire: Any, place: int) -> None:
    """Copy a slot from its array to the ring. One that is sent again may be read after it was consumed, and its array be gone."""
    slot, source = wire.slots + place * wire.geometry.slot_bytes, load(wire.sources + 8 * place)
    if wire.apart == 0 and source != slot:
        copy_bytes(slot, source, frame_at(wire.frames, place).length)
        store(wire.sources + 8 * place, slot)


@register_jitable
def _send_again(rail: Any, rail_index: int, wire: Any) -> bool:
    """Send a slot again that a lost rail had; False if there is none that the consumer may still want and that can be sent."""
    ring, left = wire.geometry, 0
    for lane in range(ring.lanes):
        for number in range(load_acquire(tail_of(wire, lane)), wire.sent[lane]):
            place = lane * ring.slots + number % ring.slots
            if load(wire.owners + 8 * place) == AGAIN:
                if not flies(wire, place):
                    frame_at(wire.frames, place).attempt += 1
                    copy_slot(wire, place)
                    _take_slot(rail, rail_index, wire, place)
                    # The rail copies the header: if the lost rail has delivered the slot, a new message may take its place.
                    copy_bytes(address_of(rail, "header"), wire.frames + place * HEADER, HEADER)
                    offer(rail, address_of(rail, "header"), load(wire.sources + 8 * place))
                    rail.out_again = 1
                    rail.repeated += 1
                    return True
                left = 1
    wire.again = left
    return False


@register_jitable
def _next_entry(wire: Any) -> int:
    """The message whose description is the next to be sent again."""
    return max(wire.entries, load_acquire(wire.ring + CONSUMED))


@register_jitable
def unsent(wire: Any) -> bool:
    """Whether there are slots, or descriptions of messages, to be sent again that the consumer may still want."""
    return bool(wire.again != 0 or (wire.entries >= 0 and _next_entry(wire) < wire.message))


@register_jitable
def _send_entry(rail: Any, wire: Any, message: int) -> None:
    entry = entry_of(wire, message, True)
    frame = control(rail, _ENTRY, wire.there, 0, 0)
    frame.entry.number, frame.entry.message = entry.number, entry.message


@register_jitable
def _send_entry_again(rail: Any, wire: Any) -> bool:
    """Send the description of a message again, whose frame a lost rail may have had."""
    message = _next_entry(wire)
    if message >= wire.message:
        wire.entries = -1
        return False
    wire.entries = message + 1
    _send_entry(rail, wire, message)
    return True


@register_jitable
def begun(wire: Any) -> bool:
    """Whether the producer has described the message that is to be sent next."""
    return load_acquire(address_of(entry_of(wire, wire.message, True), "number")) == wire.message + 1


@register_jitable
def _filled(wire: Any, array: int, lane: int, number: int) -> bool:
    """Whether a slot can be sent: its data is there. That of a message which goes from its array needs only a place."""
    if array == 0:
        return load_acquire(head_of(wire, lane)) > number
    return number - load_acquire(tail_of(wire, lane)) < wire.geometry.slots


@register_jitable
def _declines(link: Any, rail: Any, nbytes: int, rest: int, whole: int) -> bool:
    """Whether a rail leaves a slot to another one that would deliver it sooner; see `another_is_sooner`."""
    if link.routes < 2 or link.rdma_rails > 0 or link.chosen > 0:
        return False
    rail.declined = 1 if another_is_sooner(link, rail, nbytes, rest, whole) else 0
    return bool(rail.declined != 0)


@register_jitable
def _describe(wire: Any, entry: Any, lane: int, number: int, offset: int, length: int) -> None:
    """Fill in the frame of the next slot of a lane, and note where its data is."""
    ring = wire.geometry
    place = lane * ring.slots + number % ring.slots
    data = wire.slots + place * ring.slot_bytes
    if entry.offer != 0:
        data = entry.offer + offset
        store_release(head_of(wire, lane), number + 1)
    store(wire.sources + 8 * place, data)
    frame = frame_at(wire.frames, place)
    frame.kind, frame.wire, frame.lane, frame.slot, frame.number = _SLOT, wire.there, lane, number, offset
    frame.length, frame.attempt = length, 0
    frame.entry.number, frame.entry.message = entry.number, entry.message
    wire.sent[lane] = number + 1


@register_jitable
def _extend(rail: Any, rail_index: int, wire: Any, entry: Any, lane: int, chunk: int, offset: int, high: int) -> None:
    """Let the slots behind the one that a rail sends go by the same system call, as far as they are filled.

    Args:
        chunk: bytes of each slot but the last.
        offset: of the next slot in the message.
        high: end of the lane's part.
    """
    ring = wire.geometry
    rail.out_step = chunk if entry.offer != 0 else ring.slot_bytes
    while offset < high and rail.out_size < _RUN_BYTES and rail.out_count < MOST_RUN:
        number = wire.sent[lane]
        place = lane * ring.slots + number % ring.slots
        if number % ring.slots == 0 or flies(wire, place) or not _filled(wire, entry.offer, lane, number):
            return
        _describe(wire, entry, lane, number, offset, min(chunk, high - offset))
        rail.out_size += _take_slot(rail, rail_index, wire, place)
        rail.out_count += 1
        offset += chunk


@register_jitable
def send_data(rail: Any, rail_index: int, link: Any, wire: Any) -> bool:
    """Send the next slot that the producer has filled; False if there is none for this rail, or the ring has stopped."""
    if wire.stop != UNTOLD:
        return False
    if wire.again != 0 and _send_again(rail, rail_index, wire):
        return True
    if wire.entries >= 0 and _send_entry_again(rail, wire):
        return True
    while begun(wire):
        entry, ring = entry_of(wire, wire.message, True), wire.geometry
        nbytes = entry.message.nbytes
        chunk = _chunk_bytes(nbytes, ring.lanes, ring.slot_bytes, ring.least_chunk)
        used = _lanes_used(nbytes, ring.lanes, chunk)
        part = _part_bytes(nbytes, used)
        complete = True
        for lane in range(used):
            high, number = min(nbytes, (lane + 1) * part), wire.sent[lane]
            offset = lane * part + (number - wire.starts[lane]) * chunk
            if offset >= high:
                continue
            complete = False
            place = lane * ring.slots + number % ring.slots
            if not flies(wire, place) and _filled(wire, entry.offer, lane, number):
                length = min(chunk, high - offset)
                rest = used * min(high - offset, ring.slots * chunk // 2)
                if _declines(link, rail, length, rest, nbytes):
                    return False
                _describe(wire, entry, lane, number, offset, length)
                _send_slot(rail, rail_index, wire, place)
                if link.socket_count == 1 and rail.rdma == 0 and rail.tls == 0:
                    _extend(rail, rail_index, wire, entry, lane, chunk, offset + chunk, high)
                return True
        if not complete:
            return False
        for lane in range(ring.lanes):
            wire.starts[lane] = wire.sent[lane]
        wire.message += 1
        if nbytes == 0:
            _send_entry(rail, wire, wire.message - 1)
            return True
    return False
