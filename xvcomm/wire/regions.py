"""Compiled code that finds registered arrays: of messages that RDMA devices read from them, or write into them.

A consumer whose array is registered advertises it by an ARRAY frame, when its message is next. From then on the producer's
devices write each slot into it, once; what is sent again goes into the ring, since the consumer may have had it and be done
with the array: nothing is written into an array once all slots of its message have come. An array that is closed before is
withdrawn by another ARRAY frame, which the producer confirms once no WRITE is under way. That of a message which is given up is
deregistered at once, see `arrays`.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load, load_acquire, store_release
from xvcomm.jit.compile import compiling, kernel, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.wire.counters import entry_of, finished
from xvcomm.wire.frames import MAX_DEVICES
from xvcomm.wire.locks import lock, lock_all, unlock, unlock_all
from xvcomm.wire.records import (
    CONFIRMED,
    DUE,
    FLIGHTS,
    NO,
    UNTOLD,
    UNUSED,
    carrier_at,
    flight_at,
    rail_at,
    rdma_at,
    region_at,
    wire_at,
)


@register_jitable
def find_region(carrier: Any, address: int, nbytes: int) -> int:
    """Index of a region that has all these bytes and is not being closed; -1: none."""
    for i in range(carrier.region_count):
        region = region_at(carrier.regions, i)
        inside = region.address <= address and address + nbytes <= region.address + region.bytes
        if inside and region.address != 0 and region.closing == 0:
            return i
    return -1


@register_jitable
def begin_direct(wire: Any, number: int) -> None:
    """Let the slots of a message that come from now on go into the consumer's array. Of those below a lane's newest one that was
    begun none is written there by a device: the producer had sent them before it was told of the array.
    """
    for lane in range(wire.geometry.lanes):
        wire.direct.first[lane] = wire.begun[lane]
    store_release(address_of(wire.direct, "message"), number)


@register_jitable
def advertise(carrier: Any, link: Any, wire: Any, rail: Any) -> bool:
    """Whether a consumer's array is to be advertised now, by what is then at `rail.payload`. It is looked up once."""
    message = finished(wire)
    if wire.looked > message or wire.stop != UNTOLD or link.rdma_rails == 0:
        return False
    if wire.registered == 0 or wire.slots_there == 0:
        return False  # the ring goes over TCP
    entry = entry_of(wire, message, False)
    if load_acquire(address_of(entry, "number")) != message + 1:
        return False
    wire.looked = message + 1
    index = find_region(carrier, entry.offer, entry.message.nbytes) if entry.offer != 0 else -1
    if index < 0:
        return False
    region = region_at(carrier.regions, index)
    rail.payload[0] = region.iova + entry.offer - region.address
    for device in range(MAX_DEVICES):
        rail.payload[1 + device] = region.given[device]
    wire.advertised, wire.withdrawal = message + 1, NO
    wire.waits = max(wire.waits, message + 1)  # the producer may wait for its credit
    if wire.direct.message != message + 1:  # else slots go there already
        begin_direct(wire, message + 1)
    return True


def _registered(address: int, array: int, nbytes: int) -> int:
    """Whether devices may use an array."""
    carrier = carrier_at(address)
    if carrier.region_count == 0:
        return 0
    lock(carrier)
    index = find_region(carrier, array, nbytes)
    unlock(carrier)
    return 1 if index >= 0 else 0


@register_jitable
def _withdraw_from(wire: Any, begin: int, end: int) -> bool:
    """Withdraw a consumer's array that was advertised, if it lies there; whether the producer's devices may still use it."""
    if wire.ring == 0 or wire.producer != 0 or wire.withdrawal == CONFIRMED:
        return False  # of one that is closed the memory is unmapped
    message = finished(wire)
    if wire.advertised != message + 1:
        return False
    if not begin <= entry_of(wire, message, False).offer < end:
        return False
    if wire.withdrawal == NO:
        wire.withdrawal = DUE
    return True


def _release(address: int, index: int) -> int:
    """Let no new slot use a region, and withdraw it where it was advertised; 1 if devices may still use it."""
    carrier = carrier_at(address)
    count = lock_all(carrier)
    region, used = region_at(carrier.regions, index), False
    region.closing = 1
    begin, end = region.address, region.address + region.bytes
    for i in range(carrier.wire_count):
        used = _withdraw_from(wire_at(load(carrier.wires + 8 * i)), begin, end) or used
    for i in range(carrier.rail_count):
        rail = rail_at(load(carrier.rails + 8 * i))
        if rail.state != UNUSED and rail.rdma != 0:
            rdma = rdma_at(rail.rdma)
            for number in range(rdma.first, rdma.next):
                used = used or begin <= flight_at(rdma.flights, number % FLIGHTS).source < end
    unlock_all(carrier, count)
    return 1 if used else 0


with compiling():
    registered_address = native("int64(int64, int64, int64)", _registered)
    release = kernel("int64(int64, int64)")(_release)
