"""Compiled code that finds registered arrays: of messages that RDMA devices read from them, or write into them.

A consumer whose array is registered advertises it by an ARRAY frame. From then on the producer's devices write each slot into it,
once; what is sent again goes into the ring, since the consumer may have had the slot, and be done with the array. So nothing is
written into an array once all slots of its message have come. If a message is given up before, its array must be registered anew,
by other keys, before its owner has it back: see `arrays`.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load, load_acquire
from xvcomm.jit.compile import compiling, kernel, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.wire.counters import entry_of, finished
from xvcomm.wire.frames import MAX_DEVICES
from xvcomm.wire.locks import lock, lock_all, unlock, unlock_all
from xvcomm.wire.records import (
    FLIGHTS,
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
def _find(carrier: Any, address: int, nbytes: int) -> int:
    """Index of a region that has these bytes; -1: none."""
    for i in range(carrier.region_count):
        region = region_at(carrier.regions, i)
        if region.address != 0 and region.address <= address and address + nbytes <= region.address + region.bytes:
            return i
    return -1


@register_jitable
def key_of(carrier: Any, address: int, nbytes: int, device: int) -> int:
    """The lkey of an array on a device; 0 if it is not registered."""
    index = _find(carrier, address, nbytes)
    return region_at(carrier.regions, index).keys[device] if index >= 0 else 0


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
    index = _find(carrier, entry.offer, entry.message.nbytes) if entry.offer != 0 else -1
    if index < 0:
        return False
    region = region_at(carrier.regions, index)
    rail.payload[0] = entry.offer
    for device in range(MAX_DEVICES):
        rail.payload[1 + device] = region.given[device]
    wire.advertised = message + 1
    wire.waits = max(wire.waits, message + 1)  # the producer may wait for its credit
    return True


@register_jitable
def in_use(wire: Any) -> bool:
    """Whether devices may use the array of the message that this end has begun, if it has begun one."""
    return bool((wire.read if wire.producer != 0 else wire.advertised) == finished(wire) + 1)


def _registered(address: int, array: int, nbytes: int) -> int:
    """Whether devices may use an array."""
    carrier = carrier_at(address)
    if carrier.region_count == 0:
        return 0
    lock(carrier)
    index = _find(carrier, array, nbytes)
    unlock(carrier)
    return 1 if index >= 0 else 0


def _busy(address: int, begin: int, nbytes: int) -> int:
    """Whether messages that have begun, or WRITEs that have not ended, use memory."""
    carrier = carrier_at(address)
    count = lock_all(carrier)
    found = 0
    for i in range(carrier.wire_count):
        wire = wire_at(load(carrier.wires + 8 * i))
        if wire.ring != 0 and in_use(wire):
            array = entry_of(wire, finished(wire), wire.producer != 0).offer
            found |= begin <= array < begin + nbytes
    for i in range(carrier.rail_count):
        rail = rail_at(load(carrier.rails + 8 * i))
        if rail.state != UNUSED and rail.rdma != 0:
            rdma = rdma_at(rail.rdma)
            for number in range(rdma.first, rdma.next):
                found |= begin <= flight_at(rdma.flights, number % FLIGHTS).source < begin + nbytes
    unlock_all(carrier, count)
    return 1 if found else 0


with compiling():
    registered_address = native("int64(int64, int64, int64)", _registered)
    busy = kernel("int64(int64, int64, int64)")(_busy)
