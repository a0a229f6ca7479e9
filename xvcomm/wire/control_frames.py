"""Compiled code that makes the frames which carry no data of a message."""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load_acquire
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.memory.ring import CONSUMED, LEDGER
from xvcomm.trace.recorder import following, quote
from xvcomm.wire.counters import any_flies, entry_of, tail_of
from xvcomm.wire.frames import ARRAY_WORDS, HEADER, MAX_DEVICES, OPEN_WORDS, Kind
from xvcomm.wire.records import DUE, SENT, frame_at
from xvcomm.wire.regions import advertise

_OPEN, _CREDIT, _TELL, _FAILED, _ARRAY = map(int, (Kind.OPEN, Kind.CREDIT, Kind.TELL, Kind.FAILED, Kind.ARRAY))


@register_jitable
def offer(rail: Any, frame: int, data: int) -> None:
    """Let a rail send a frame next."""
    rail.out, rail.out_data, rail.out_at, rail.out_count = frame, data, 0, 1
    rail.out_size = rail.out_each = HEADER + frame_at(frame).length


@register_jitable
def control(rail: Any, kind: int, wire: int, number: int, words: int) -> Any:
    """Let a rail send a frame whose payload, so many words, is at `rail.payload`."""
    frame = rail.header
    frame.kind, frame.wire, frame.lane, frame.slot, frame.number, frame.length = kind, wire, 0, 0, number, 8 * words
    frame.attempt = frame.entry.number = 0
    offer(rail, address_of(rail, "header"), address_of(rail, "payload"))
    return frame


@register_jitable
def send_open(rail: Any, wire: Any) -> None:
    """Tell that this side has the ring."""
    ring = wire.geometry
    rail.payload[0], rail.payload[1], rail.payload[2] = ring.lanes, ring.slots, ring.slot_bytes
    rail.payload[3], rail.payload[4] = wire.producer, wire.group
    rail.payload[5], rail.payload[6] = wire.peer, wire.apart
    rail.payload[7] = wire.slots if wire.registered != 0 else 0
    for device in range(MAX_DEVICES):
        rail.payload[8 + device] = wire.given[device]
    frame = control(rail, _OPEN, 1 if wire.open == 2 else 0, wire.name, OPEN_WORDS)
    frame.slot = wire.number
    wire.open = 0


@register_jitable
def credit_due(wire: Any, idle: bool) -> bool:
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
def list_consumed(rail: Any, wire: Any) -> int:
    """Write how many slots of each lane were consumed to `rail.payload`; how many messages were."""
    wire.credited = load_acquire(wire.ring + CONSUMED)
    for lane in range(wire.geometry.lanes):
        rail.payload[lane] = wire.sent[lane] = load_acquire(tail_of(wire, lane))
    return int(wire.credited)


@register_jitable
def send_credit(rail: Any, wire: Any) -> None:
    """Tell the producer what was consumed."""
    control(rail, _CREDIT, wire.there, list_consumed(rail, wire), wire.geometry.lanes)


@register_jitable
def send_array(carrier: Any, rail: Any, link: Any, wire: Any) -> bool:
    """Advertise the consumer's array, withdraw it, or confirm that; False if none of these is due."""
    if wire.producer != 0:
        if wire.confirm == 0 or any_flies(wire):
            return False
        control(rail, _ARRAY, wire.there, 0, 0).entry.number = wire.withdrawn
        wire.confirm = 0
        return True
    if wire.withdrawal == DUE:
        control(rail, _ARRAY, wire.there, 0, 0).entry.number = wire.advertised
        wire.withdrawal = SENT
        return True
    if carrier.region_count == 0 or not advertise(carrier, link, wire, rail):
        return False
    entry = control(rail, _ARRAY, wire.there, 0, ARRAY_WORDS).entry
    entry.number, entry.message = wire.advertised, entry_of(wire, wire.advertised - 1, False).message
    return True


@register_jitable
def send_tell(rail: Any, recorder: int) -> None:
    """The next part of an answer, or that there is none."""
    words = quote(recorder, rail.topic, rail.about, rail.first, rail.last, address_of(rail, "payload"))
    frame = control(rail, _TELL, 0, rail.asked, words)
    rail.first = following(recorder, rail.topic, rail.about, rail.first, rail.last, rail.wanted)
    frame.slot = max(0, rail.last - rail.first)
    if frame.slot == 0:
        rail.asked = 0


@register_jitable
def send_failed(rail: Any, link: Any) -> None:
    """Tell of the newest queue pair that has failed."""
    link.failed_count -= 1
    failed = link.failed[link.failed_count]
    frame = control(rail, _FAILED, 0, failed[0], 0)
    frame.slot, frame.lane = failed[1], failed[2]
