"""Compiled code that chooses what a rail sends next.

A rail takes the next frame whenever it has room, so faster rails carry more; but a socket leaves a slot to another one that would
deliver it sooner, see `delivery`. A slot stays in the ring until the consumer's credit has come, and remembers its rail: if that
is lost, the slot goes over another one.

Where a link has rails of RDMA, these carry the wires' frames, and sockets only the slots of rings that no device may write to. A
WRITE that was posted may change its slot on the other side until it has ended: as long as it flies, no rail sends to that slot.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load, load_acquire, store, store_release
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.memory.ring import ABORT, CONSUMED, LEDGER, Reason, chunk_bytes, lanes_used, part_bytes
from xvcomm.trace.recorder import following, quote
from xvcomm.wire.counters import entry_of, finished, head_of, tail_of
from xvcomm.wire.delivery import another_is_sooner, look
from xvcomm.wire.frames import ARRAY_WORDS, HEADER, MAX_DEVICES, OPEN_WORDS, Kind
from xvcomm.wire.records import AGAIN, DUE, MOST_RUN, SENT, TOLD, UNTOLD, frame_at, link_at, wire_at
from xvcomm.wire.regions import advertise
from xvcomm.wire.shares import count_slot

_chunk_bytes, _lanes_used = register_jitable(chunk_bytes), register_jitable(lanes_used)
_part_bytes = register_jitable(part_bytes)
_OPEN, _SLOT, _ENTRY, _CREDIT, _STOP, _STOPPED, _PING, _PONG, _LEAVE, _ASK, _TELL, _, _FAILED, _, _ARRAY, _ = map(
    int, Kind
)
_LEFT = int(Reason.LEFT)

_RUN_BYTES = 1 << 20
"""Slots that lie one behind the other go by one system call, up to about so many bytes. The last packet of a call is short, and
costs much of what one of 64 KiB costs: in calls of 256 KiB a message of 4 MiB took 1.13 of its time in calls of 1 MiB."""


@register_jitable
def _carries(link: Any, rail: Any, wire: Any) -> bool:
    """Whether a rail may carry the slots: where RDMA devices reach both ends', rails of RDMA do; if some are chosen, these."""
    by_rdma = link.rdma_rails > 0 and wire.registered != 0 and wire.slots_there != 0
    by_socket = wire.apart == 0 and wire.apart_there == 0
    if not by_socket and link.rdma_chosen > 0:
        return bool(by_rdma and rail.rdma != 0 and rail.chosen != 0)
    if by_socket and link.chosen > 0 and (by_rdma or link.rdma_rails == 0):
        return bool(rail.chosen != 0)
    return bool(rail.rdma != 0) if by_rdma else bool(rail.rdma == 0 and by_socket)


@register_jitable
def _flies(wire: Any, place: int) -> bool:
    """Whether a WRITE to a slot there may still arrive."""
    return bool(load(wire.flights + 8 * place) != 0)


@register_jitable
def any_flies(wire: Any) -> bool:
    """Whether a WRITE to any slot there may still arrive."""
    count = 0
    for place in range(wire.geometry.lanes * wire.geometry.slots):
        count += load(wire.flights + 8 * place)
    return count != 0


@register_jitable
def _offer(rail: Any, frame: int, data: int) -> None:
    """Let a rail send a frame next."""
    rail.out, rail.out_data, rail.out_at, rail.out_count = frame, data, 0, 1
    rail.out_size = rail.out_each = HEADER + frame_at(frame).length


@register_jitable
def _control(rail: Any, kind: int, wire: int, number: int, words: int) -> Any:
    """Let a rail send a frame whose payload, so many words, is at `rail.payload`."""
    frame = rail.header
    frame.kind, frame.wire, frame.lane, frame.slot, frame.number, frame.length = kind, wire, 0, 0, number, 8 * words
    frame.entry.number = 0
    _offer(rail, address_of(rail, "header"), address_of(rail, "payload"))
    return frame


@register_jitable
def _send_open(rail: Any, wire: Any) -> None:
    ring = wire.geometry
    rail.payload[0], rail.payload[1], rail.payload[2] = ring.lanes, ring.slots, ring.slot_bytes
    rail.payload[3], rail.payload[4] = wire.producer, wire.group
    rail.payload[5], rail.payload[6] = wire.peer, wire.apart
    rail.payload[7] = wire.slots if wire.registered != 0 else 0
    for device in range(MAX_DEVICES):
        rail.payload[8 + device] = wire.given[device]
    frame = _control(rail, _OPEN, 1 if wire.open == 2 else 0, wire.name, OPEN_WORDS)
    frame.slot = wire.number
    wire.open = 0


@register_jitable
def _stranded(link: Any, wire: Any) -> bool:
    """Whether no rail that is up can carry the slots: they are in a GPU's memory, and there is no rail of RDMA."""
    return bool(link.rdma_rails == 0 and (wire.apart != 0 or wire.apart_there != 0))


@register_jitable
def _next_entry(wire: Any) -> int:
    """The message whose description is the next to be sent again."""
    return max(wire.entries, load_acquire(wire.ring + CONSUMED))


@register_jitable
def _unsent(wire: Any) -> bool:
    """Whether there are slots, or descriptions of messages, to be sent again that the consumer may still want."""
    return bool(wire.again != 0 or (wire.entries >= 0 and _next_entry(wire) < wire.message))


@register_jitable
def _stop_due(link: Any, wire: Any) -> bool:
    """Whether this side's abort word is to be sent now: that a producer has left, only after all that it has finished."""
    if wire.stop != UNTOLD:
        return False
    word = load_acquire(wire.ring + ABORT)
    if word == 0:
        return False
    if wire.producer == 0:
        return True
    if any_flies(wire):
        return False  # a consumer that knows the word gives the slots' memory back
    if _unsent(wire):
        return _stranded(link, wire) and word & 0xFF != _LEFT
    return bool(word & 0xFF != _LEFT or wire.message >= finished(wire))


@register_jitable
def _send_stop(rail: Any, wire: Any) -> None:
    """The abort word; of a producer also what it has sent before, of a consumer its description of the next message."""
    frame = _control(rail, _STOP, wire.there, load_acquire(wire.ring + ABORT), 0)
    lanes = wire.geometry.lanes
    if wire.producer != 0:
        whole = not _unsent(wire)  # else what was lost is not sent again, and the other side need not wait for it
        frame.entry.number, frame.length = wire.message if whole else 0, 8 * lanes
        for lane in range(lanes):
            rail.payload[lane] = wire.sent[lane] if whole else 0
    else:
        entry = entry_of(wire, finished(wire), False)
        frame.entry.number, frame.entry.message = entry.number, entry.message
    _offer(rail, address_of(rail, "header"), address_of(rail, "payload"))
    wire.stop = TOLD


@register_jitable
def _credit_due(wire: Any, idle: bool) -> bool:
    """Whether the producer should hear what was consumed: when it is much, or when there is nothing else to do."""
    ring = wire.geometry
    new = load_acquire(wire.ring + CONSUMED) - wire.credited
    if new >= LEDGER // 4 or (idle and new > 0) or wire.credited < wire.waits <= wire.credited + new:
        return True
    for lane in range(ring.lanes):
        new = load_acquire(tail_of(wire, lane)) - wire.sent[lane]
        if new > 0 and (idle or new >= ring.slots // 4):
            return True
    return False


@register_jitable
def _send_credit(rail: Any, wire: Any) -> None:
    lanes = wire.geometry.lanes
    wire.credited = load_acquire(wire.ring + CONSUMED)
    for lane in range(lanes):
        rail.payload[lane] = wire.sent[lane] = load_acquire(tail_of(wire, lane))
    _control(rail, _CREDIT, wire.there, wire.credited, lanes)


@register_jitable
def _send_array(carrier: Any, rail: Any, link: Any, wire: Any) -> bool:
    """Advertise the consumer's array, withdraw it, or confirm that; False if none of these is due."""
    if wire.producer != 0:
        if wire.confirm == 0 or any_flies(wire):
            return False
        _control(rail, _ARRAY, wire.there, 0, 0).entry.number = wire.withdrawn
        wire.confirm = 0
        return True
    if wire.withdrawal == DUE:
        _control(rail, _ARRAY, wire.there, 0, 0).entry.number = wire.advertised
        wire.withdrawal = SENT
        return True
    if carrier.region_count == 0 or not advertise(carrier, link, wire, rail):
        return False
    entry = _control(rail, _ARRAY, wire.there, 0, ARRAY_WORDS).entry
    entry.number, entry.message = wire.advertised, entry_of(wire, wire.advertised - 1, False).message
    return True


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
    _offer(rail, wire.frames + place * HEADER, load(wire.sources + 8 * place))


@register_jitable
def _send_again(rail: Any, rail_index: int, wire: Any) -> bool:
    """Send a slot again that a lost rail had; False if there is none that the consumer may still want and that can be sent."""
    ring, left = wire.geometry, 0
    for lane in range(ring.lanes):
        for number in range(load_acquire(tail_of(wire, lane)), wire.sent[lane]):
            place = lane * ring.slots + number % ring.slots
            if load(wire.owners + 8 * place) == AGAIN:
                if not _flies(wire, place):
                    _send_slot(rail, rail_index, wire, place)
                    rail.out_again = 1
                    rail.repeated += 1
                    return True
                left = 1
    wire.again = left
    return False


@register_jitable
def _send_entry(rail: Any, wire: Any, message: int) -> None:
    entry = entry_of(wire, message, True)
    frame = _control(rail, _ENTRY, wire.there, 0, 0)
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
def _begun(wire: Any) -> bool:
    """Whether the producer has described the message that is to be sent next."""
    return load_acquire(address_of(entry_of(wire, wire.message, True), "number")) == wire.message + 1


@register_jitable
def _filled(wire: Any, array: int, lane: int, number: int) -> bool:
    """Whether a slot can be sent: its data is there. That of a message which goes from its array needs only a place."""
    if array == 0:
        return load_acquire(head_of(wire, lane)) > number
    return number - load_acquire(tail_of(wire, lane)) < wire.geometry.slots


@register_jitable
def _declines(link: Any, rail: Any, nbytes: int, rest: int) -> bool:
    """Whether a rail leaves a slot to another one that would deliver it sooner; see `another_is_sooner`."""
    if link.socket_count < 2 or link.rdma_rails > 0 or link.chosen > 0:
        return False
    rail.declined = 1 if another_is_sooner(link, rail, nbytes, rest) else 0
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
    frame.length = length
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
        if number % ring.slots == 0 or _flies(wire, place) or not _filled(wire, entry.offer, lane, number):
            return
        _describe(wire, entry, lane, number, offset, min(chunk, high - offset))
        rail.out_size += _take_slot(rail, rail_index, wire, place)
        rail.out_count += 1
        offset += chunk


@register_jitable
def _send_data(rail: Any, rail_index: int, link: Any, wire: Any) -> bool:
    """Send the next slot that the producer has filled; False if there is none for this rail, or the ring has stopped."""
    if wire.stop != UNTOLD:
        return False
    if wire.again != 0 and _send_again(rail, rail_index, wire):
        return True
    if wire.entries >= 0 and _send_entry_again(rail, wire):
        return True
    while _begun(wire):
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
            if not _flies(wire, place) and _filled(wire, entry.offer, lane, number):
                length = min(chunk, high - offset)
                if _declines(link, rail, length, used * min(high - offset, ring.slots * chunk // 2)):
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


@register_jitable
def _choose_of(carrier: Any, rail: Any, rail_index: int, link: Any, wire: Any, place: int, idle: bool) -> bool:
    """Let a rail send a frame of a wire, if it has any for this rail."""
    if wire.ring == 0:
        return False
    if rail.rdma != 0 or link.rdma_rails == 0:
        if wire.open != 0:
            _send_open(rail, wire)
            return True
        if wire.there < 0:
            return False
        if _stop_due(link, wire):
            _send_stop(rail, wire)
            return True
        if wire.answer != 0 and not any_flies(wire):
            wire.answer = 0
            _control(rail, _STOPPED, wire.there, 0, 0)
            return True
        if wire.producer == 0 and _credit_due(wire, idle):
            _send_credit(rail, wire)
            return True
        if _send_array(carrier, rail, link, wire):
            return True
    if wire.there < 0 or wire.producer == 0 or wire.confirm != 0 or not _carries(link, rail, wire):
        return False
    rail.out_wire = place
    return _send_data(rail, rail_index, link, wire)


@register_jitable
def _send_tell(rail: Any, recorder: int) -> None:
    """The next part of an answer, or that there is none."""
    words = quote(recorder, rail.topic, rail.about, rail.first, rail.last, address_of(rail, "payload"))
    frame = _control(rail, _TELL, 0, rail.asked, words)
    rail.first = following(recorder, rail.topic, rail.about, rail.first, rail.last, rail.wanted)
    frame.slot = max(0, rail.last - rail.first)
    if frame.slot == 0:
        rail.asked = 0


@register_jitable
def _send_failed(rail: Any, link: Any) -> None:
    """Tell of the newest queue pair that has failed."""
    link.failed_count -= 1
    failed = link.failed[link.failed_count]
    frame = _control(rail, _FAILED, 0, failed[0], 0)
    frame.slot, frame.lane = failed[1], failed[2]


@register_jitable
def choose_frame(carrier: Any, rail: Any, rail_index: int, idle: bool) -> bool:
    """Let a rail send its next frame; False if there is none for it."""
    rail.declined = 0
    if rail.pong != 0:
        _control(rail, _PONG, 0, rail.pong, 0)
        rail.pong = 0
        return True
    link = link_at(load(carrier.links + 8 * rail.link))
    if rail.ping != 0:
        if link.socket_count > 1 and rail.rdma == 0:
            look(rail)
        _control(rail, _PING, 0, rail.ping, 0)
        rail.ping = 0
        return True
    if rail.asked != 0 and carrier.recorder != 0:
        _send_tell(rail, carrier.recorder)
        return True
    if link.ask != 0:
        frame = _control(rail, _ASK, 0, link.ask, 0)
        frame.slot, frame.lane, frame.wire, link.ask = link.wanted, link.topic, link.about, 0
        return True
    if link.failed_count > 0:
        _send_failed(rail, link)
        return True
    count = link.wire_count
    for _ in range(count):
        place = load(link.wires + 8 * link.next)
        link.next = (link.next + 1) % count
        if _choose_of(carrier, rail, rail_index, link, wire_at(load(carrier.wires + 8 * place)), place, idle):
            return True
    if link.leave == 1 and (rail.rdma != 0 or link.rdma_rails == 0):
        link.leave = 2
        _control(rail, _LEAVE, 0, 0, 0)
        return True
    return False
