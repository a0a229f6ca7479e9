"""Compiled code that takes rails, wires and arrays into use and out of use while threads carry frames.

Python and movers call it; what a rail has lost is also found by the threads themselves.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import copy_bytes, load, load_acquire, store, store_release
from xvcomm.jit.compile import compiling, kernel, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.types.route import MAX_RAILS
from xvcomm.wire.counters import any_flies, entry_of, finished, tail_of
from xvcomm.wire.frames import HEADER
from xvcomm.wire.locks import lock, lock_all, unlock, unlock_all
from xvcomm.wire.posting import land_all
from xvcomm.wire.records import (
    AGAIN,
    DOWN,
    DUE,
    KNOWN,
    NOBODY,
    OF_LINK,
    PLACES,
    SENT,
    TOLD,
    UNTOLD,
    UNUSED,
    UP,
    Wire,
    carrier_at,
    link_at,
    rail_at,
    wire_at,
)
from xvcomm.wire.slot_frames import copy_slot

_DIRECT: int = Wire.direct.offset
FULL, FULL_LINK = -1, -2
"""Results of `attach` where a process, or two of them with each other, have no room for one more ring."""


@register_jitable
def _count_routes(link: Any) -> None:
    """Note how many different routes the sockets have."""
    link.routes = 0
    for i in range(link.socket_count):
        counted = False
        for k in range(i):
            counted = counted or rail_at(link.sockets[k]).route == rail_at(link.sockets[i]).route
        if not counted:
            link.routes += 1


@register_jitable
def _forget_socket(link: Any, address: int) -> None:
    """Take a rail out of those that are up."""
    for i in range(link.socket_count):
        if link.sockets[i] == address:
            link.socket_count -= 1
            link.sockets[i] = link.sockets[link.socket_count]
            break
    _count_routes(link)


@register_jitable
def _count_chosen(link: Any, rail: Any, chosen: int) -> None:
    """Note whether a rail is one of those that alone carry slots."""
    link.chosen += chosen - rail.chosen
    if rail.rdma != 0:
        link.rdma_chosen += chosen - rail.chosen
    rail.chosen = chosen


@register_jitable
def lose_rail(carrier: Any, rail: Any, rail_index: int, why: int) -> None:
    """Take a rail out of use, and let what it carried go over others; the other side drops what it had received."""
    rail.state, rail.error, rail.out, rail.slot_left = DOWN, why, 0, 0
    link = link_at(load(carrier.links + 8 * rail.link))
    if rail.rdma != 0:
        link.rdma_rails -= 1
    else:
        _forget_socket(link, address_of(rail, "lock"))
    _count_chosen(link, rail, 0)
    for i in range(link.wire_count):
        wire = wire_at(load(carrier.wires + 8 * load(link.wires + 8 * i)))
        if wire.ring == 0:
            continue
        for place in range(wire.geometry.lanes * wire.geometry.slots):
            owner = wire.owners + 8 * place
            if load(owner) == 1 + rail_index:
                store(owner, AGAIN if wire.producer != 0 else NOBODY)
                wire.again = wire.producer
        if wire.there < 0 or wire.stop < KNOWN:  # else the other side has this side's number, and needs it no more
            wire.open = 2
        if wire.producer != 0:
            wire.entries = 0
            store_release(address_of(wire.direct, "message"), 0)  # what is left of a message goes through the ring
        else:
            wire.credited = 0
            wire.withdrawal = DUE if wire.withdrawal == SENT else wire.withdrawal
            for lane in range(wire.geometry.lanes):
                wire.sent[lane] = 0
        if wire.stop == TOLD:
            wire.stop = UNTOLD
    if link.leave == 2:
        link.leave = 1
    carrier.has_news = 1


def _put(address: int, place: int, value: int) -> int:
    """Store a word while no thread that carries looks at it; returns what was there."""
    carrier = carrier_at(address)
    lock(carrier)
    before = load(place)
    store(place, value)
    unlock(carrier)
    return before


def _take(address: int, table: int, place: int, size: int, target: int) -> int:
    """Move the records of a table, each of so many bytes and their count at `place`, to `target`; how many there are."""
    carrier = carrier_at(address)
    lock(carrier)
    count = load(place)
    copy_bytes(target, table, count * size)
    store(place, 0)
    unlock(carrier)
    return count


def _use(address: int, index: int) -> int:
    """Take a rail into use."""
    carrier = carrier_at(address)
    lock(carrier)
    rail = rail_at(load(carrier.rails + 8 * index))
    link = link_at(load(carrier.links + 8 * rail.link))
    if rail.rdma != 0:
        link.rdma_rails += 1
    elif link.socket_count < MAX_RAILS:  # Python may have made some more, which are not compared
        link.sockets[link.socket_count] = address_of(rail, "lock")
        link.socket_count += 1
        _count_routes(link)
    store_release(address_of(rail, "state"), UP)
    unlock(carrier)
    return 0


def _choose(address: int, index: int, chosen: int) -> int:
    """Let a rail be one of those that alone carry slots, or no longer; without effect on one that is lost."""
    carrier = carrier_at(address)
    lock(carrier)
    rail = rail_at(load(carrier.rails + 8 * index))
    if rail.state == UP:
        _count_chosen(link_at(load(carrier.links + 8 * rail.link)), rail, chosen)
    unlock(carrier)
    return 0


def _report(address: int, link_index: int, pair: int, peer: int, answer: int) -> int:
    """Let a link tell that a queue pair has failed."""
    carrier = carrier_at(address)
    lock(carrier)
    link = link_at(load(carrier.links + 8 * link_index))
    if link.failed_count < MAX_RAILS:
        failed = link.failed[link.failed_count]
        failed[0], failed[1], failed[2] = peer, pair, answer
        link.failed_count += 1
    unlock(carrier)
    return 0


def _retire(address: int, index: int) -> int:
    """Let the place of a lost rail be used again; of RDMA, after `land`."""
    carrier = carrier_at(address)
    count = lock_all(carrier)
    rail_at(load(carrier.rails + 8 * index)).state = UNUSED
    unlock_all(carrier, count)
    return 0


def _land(address: int, index: int) -> int:
    """Let slots be sent again to which a lost rail of RDMA has WRITEs under way, of which none can arrive there any more."""
    carrier = carrier_at(address)
    count = lock_all(carrier)
    land_all(carrier, rail_at(load(carrier.rails + 8 * index)))
    unlock_all(carrier, count)
    return 0


def _drop(address: int, index: int) -> int:
    """Lose a rail that is in use because Python says so."""
    carrier = carrier_at(address)
    count = lock_all(carrier)
    rail = rail_at(load(carrier.rails + 8 * index))
    if rail.state == UP:
        lose_rail(carrier, rail, index, 0)
    unlock_all(carrier, count)
    return 0


def _withdraw(address: int, record: int) -> int:
    """Let go of the array of the message that an end has given up; its ring will be stopped.

    The array's address, if it was offered, else 0: RDMA devices may still read or write it.
    """
    carrier = carrier_at(address)
    count = lock_all(carrier)
    wire, array = wire_at(record), 0
    if wire.ring != 0:
        place = wire.number % PLACES
        ring, producer = wire.geometry, wire.producer != 0
        message = finished(wire)
        entry = entry_of(wire, message, producer)
        if entry.number == message + 1:  # else it has not begun, and the entry is an earlier one's
            array, entry.offer = entry.offer, 0
        store_release(address_of(wire.direct, "message"), 0)
        places = ring.lanes * ring.slots
        for i in range(carrier.rail_count):
            rail = rail_at(load(carrier.rails + 8 * i))
            if rail.state == UP and rail.slot_left > 0 and rail.slot_wire == place:
                rail.slot_data = 0
            from_ring = wire.slots <= rail.out_data < wire.slots + places * ring.slot_bytes
            if rail.state == UP and wire.frames <= rail.out < wire.frames + places * HEADER and not from_ring:
                if rail.out_at == 0 and rail.begun == 0:
                    rail.out = 0
                else:  # the other side must not take other bytes for the message's
                    lose_rail(carrier, rail, i, 0)
        slots = wire.slots
        for slot in range(places if producer else 0):
            if not slots <= load(wire.sources + 8 * slot) < slots + places * ring.slot_bytes:
                store(wire.owners + 8 * slot, NOBODY)  # if its rail is lost, it is not sent again
    unlock_all(carrier, count)
    return array


def _copy_to_ring(address: int, direct: int, unused: int) -> int:
    """Copy to the ring what was sent of a message from its array, and may have to be sent again. Movers call this.

    The producer puts the rest into the ring, and may then change the array.

    Returns:
        1; or 0 if the message was given up, or a device may still read the array.
    """
    carrier, wire, kept = carrier_at(address), wire_at(direct - _DIRECT), 0
    count = lock_all(carrier)
    ring, message = wire.geometry, finished(wire)
    entry = entry_of(wire, message, True)
    if wire.ring != 0 and entry.number == message + 1 and entry.offer != 0 and not any_flies(wire):
        for lane in range(ring.lanes):
            for number in range(load_acquire(tail_of(wire, lane)), wire.sent[lane]):
                copy_slot(wire, lane * ring.slots + number % ring.slots)
        end = wire.frames + ring.lanes * ring.slots * HEADER
        for i in range(carrier.rail_count):
            rail = rail_at(load(carrier.rails + 8 * i))
            if rail.state == UP and wire.frames <= rail.out < end:
                rail.out_data = wire.slots + (rail.out - wire.frames) // HEADER * ring.slot_bytes
                rail.out_step = ring.slot_bytes
        entry.offer, kept = 0, 1
    unlock_all(carrier, count)
    return kept


def _attach(address: int, record: int, place: int) -> int:
    """Take a wire into use, in a place that `detach` has made free, or in a new one if that is -1; its number, or FULL."""
    carrier, wire = carrier_at(address), wire_at(record)
    count = lock_all(carrier)  # the record that the place has had may be freed soon
    link = link_at(load(carrier.links + 8 * wire.link))
    if place >= 0:
        before = wire_at(load(carrier.wires + 8 * place))
        wire.number, wire.most = before.number + PLACES, max(wire.most, before.most)
    elif carrier.wire_count == PLACES:
        wire.number = FULL
    elif link.wire_count == OF_LINK:
        wire.number = FULL_LINK
    else:
        wire.number = place = carrier.wire_count
        store(link.wires + 8 * link.wire_count, place)
    if wire.number >= 0:
        store(carrier.wires + 8 * place, record)
    if wire.number == carrier.wire_count:
        carrier.wire_count += 1
        link.wire_count += 1
    number = wire.number
    unlock_all(carrier, count)
    return number


@register_jitable
def _settled(wire: Any) -> bool:
    """Whether the other side knows why the ring has stopped, and has everything that was sent before; or nothing was sent, and it
    has not opened the ring.
    """
    if wire.there < 0 and (wire.producer == 0 or load(wire.counter) == 0):
        return True
    return bool(wire.stop >= KNOWN and wire.answer == 0)


def _is_settled(record: int) -> int:
    return 1 if _settled(wire_at(record)) else 0


def _detach(address: int, record: int, anyway: int) -> int:
    """Take a wire out of use, if it is settled or in any case. 1 if another one may have its place from now on, 0 if that was so
    before; -1 if it is not settled, or while a rail still sends from its memory or to it, which must stay mapped.
    """
    carrier, wire = carrier_at(address), wire_at(record)
    if wire.number < 0 or wire.removed != 0:
        return 0
    count = lock_all(carrier)
    attached = wire.ring != 0
    stays = attached and anyway == 0 and not _settled(wire)
    if not stays:
        wire.ring = 0
        place, places = wire.number % PLACES, wire.geometry.lanes * wire.geometry.slots
        last, slots_end = wire.frames + places * HEADER, wire.slots + places * wire.geometry.slot_bytes
        for i in range(carrier.rail_count):
            rail = rail_at(load(carrier.rails + 8 * i))
            if attached and rail.slot_left > 0 and rail.slot_wire == place:
                rail.slot_data = 0
            sends = wire.frames <= rail.out < last or wire.slots <= rail.out_data < slots_end
            if rail.state == UP and rail.out != 0 and sends:
                stays = True
        if any_flies(wire):
            stays = True
        if not stays:
            wire.removed = 1
    unlock_all(carrier, count)
    return -1 if stays else 1


with compiling():
    put = kernel("int64(int64, int64, int64)")(_put)
    take = kernel("int64(int64, int64, int64, int64, int64)")(_take)
    use = kernel("int64(int64, int64)")(_use)
    choose = kernel("int64(int64, int64, int64)")(_choose)
    report = kernel("int64(int64, int64, int64, int64, int64)")(_report)
    retire = kernel("int64(int64, int64)")(_retire)
    land = kernel("int64(int64, int64)")(_land)
    lose = kernel("int64(int64, int64)")(_drop)
    withdraw = kernel("int64(int64, int64)")(_withdraw)
    copy_to_ring_address = native("int64(int64, int64, int64)", _copy_to_ring)
    attach = kernel("int64(int64, int64, int64)")(_attach)
    detach = kernel("int64(int64, int64, int64)")(_detach)
    is_settled = kernel("int64(int64)")(_is_settled)
