"""When a rail would deliver a slot, by what the kernel tells of its connection, and whether another rail would sooner.

A slot is delivered after a round trip, or when the rail has carried all that is queued: whichever takes longer.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import monotonic
from xvcomm.jit.inline import register_jitable
from xvcomm.wire.records import rail_at
from xvcomm.wire.sockets import ask_kernel

_LOOK_NS = 1_000_000
"""How long what the kernel has told is good, at least; a round trip if that is longer."""
_SAMPLE_BYTES, _SMOOTH_NS = 64 << 10, 2e7
"""Bytes of which the rate of a full connection is taken at least, and the time over which it is smoothed."""
_GROWTH_NS = 1e9
"""Time in which the rate of a rail that leaves slots to others grows about threefold, so that it is tried again."""
_STALL_NS, _STALLED_GROWTH_NS, _FEW = 2e8, 1e8, 8
"""A link that has just come back may stall once. If a sample took the first time, and fewer samples than the third number were
taken, the rate grows threefold in the second time.
"""
_LEAST_NS = 100_000
"""A rail that is slower by less than this takes what it can."""


@register_jitable
def _good_ns(rail: Any) -> int:
    return max(_LOOK_NS, 1000 * rail.told.least_round_trip)


@register_jitable
def look(rail: Any) -> int:
    """Learn from the kernel how fast a rail is and what it has queued, if that was long ago; the time now.

    The caller holds the rail's lock.
    """
    now, told = monotonic(), rail.told
    if now - rail.looked < _good_ns(rail):
        return now
    rail.looked, rail.sent_then = now, rail.sent
    if not ask_kernel(rail):
        told.round_trip = 0
        return now
    rail.queued = told.unsent + told.sent - told.repeated - told.acknowledged
    passed, carried = now - rail.full_since, told.acknowledged - rail.acknowledged
    if told.unsent == 0:
        rail.full_since = 0
    elif rail.full_since == 0 or carried >= _SAMPLE_BYTES:
        if rail.full_since != 0:
            weight = passed / (passed + _SMOOTH_NS) if rail.rate > 0 else 1.0
            rail.rate += weight * (carried / passed - rail.rate)
            rail.samples, rail.sampled = rail.samples + 1, passed
        rail.full_since, rail.acknowledged = now, told.acknowledged
    return now


@register_jitable
def _rate(rail: Any) -> float:
    """Bytes a nanosecond that it carried while it was full; the kernel's figure until it was for long, 0 if it never was."""
    if rail.rate > 0 or rail.told.limits & 1 != 0:
        return rail.rate
    return 1e-9 * rail.told.rate


@register_jitable
def _expected(rail: Any, nbytes: int, free: bool, proven: bool, now: int) -> float:
    """Nanoseconds until a rail would have delivered so many bytes more.

    Args:
        free: judge it by its latest round trips, else by the shortest one.
        proven: whether its rate counts.
    """
    told, rate = rail.told, _rate(rail)
    round_trip = 1e3 * (told.round_trip if free else told.least_round_trip)
    if rate == 0 or not proven:
        return round_trip
    queued = max(0.0, rail.queued + (rail.sent - rail.sent_then) - rate * (now - rail.looked))
    return max(round_trip, (queued + nbytes) / rate)


@register_jitable
def another_is_sooner(link: Any, rail: Any, nbytes: int, rest: int) -> bool:
    """Whether a rail should leave a slot to the other ones of its link.

    It should if one of these would deliver it in half the time, and all that waits for it at once in the same time. Rates count
    where both connections have been full. The latest round trips also contain queues, and delays of acknowledgements where little
    is sent. So only the last slot of a message goes by them, and only to a rail that is free; other slots go by the shortest
    ones of the last minutes, so that rails of the same speed share.

    Args:
        nbytes: of the slot.
        rest: bytes of its message from there on, as far as the ring has slots for them.
    """
    now = look(rail)
    if rail.told.round_trip == 0:
        return False
    for i in range(link.socket_count):
        other = rail_at(link.sockets[i])
        if other.told.round_trip == 0:
            continue
        free = rest <= nbytes and other.blocked == 0 and other.copying == 0
        proven = _rate(other) > 0
        own = _expected(rail, nbytes, free, proven, now) - _LEAST_NS
        if own > 2 * _expected(other, nbytes, free, proven, now) and own > _expected(other, rest, free, proven, now):
            if not free and now == rail.looked:
                stalled = rail.sampled >= _STALL_NS and rail.samples < _FEW
                rail.rate = _rate(rail) * (1 + _good_ns(rail) / (_STALLED_GROWTH_NS if stalled else _GROWTH_NS))
            return True
    return False
