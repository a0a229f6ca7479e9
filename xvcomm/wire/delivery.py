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
_SHORT_BYTES, _WATCH_NS = 256 << 10, 50_000
"""In messages up to this size the kernel is asked, every 50 us at most, whether the slot that measures a rail was delivered. So
it is in all messages for a rail that left slots to others and is tried again. Otherwise this is seen when the next slot is sent.
When the kernel was always asked, the rails' shares changed too often: 1 MiB over two equal links took a seventh longer.
"""
_SAMPLE_BYTES, _SMOOTH_NS = 64 << 10, 2e7
"""Bytes of which the rate of a full connection is taken at least, and the time over which it is smoothed."""
_GROWTH_NS = 2e9
"""Time in which the rate of a rail that leaves slots to others seems to grow about threefold, so that it is tried again."""
_MOST_BETWEEN_NS = 20_000_000
"""The longest time between two questions for which growth is counted, or a round trip if that is longer: a link that is seldom
used must not seem fast.
"""
_FEW_BYTES, _UNSURE_GROWTH_NS = 2 << 20, 1e8
"""A rail that was measured by fewer bytes may be much faster: a connection begins slowly, and may stall once when its link has
just come back. Until then its rate seems to grow about threefold in this time.
"""
_MOST_GROWTH = 1e12
"""Limit of the growth that is assumed."""
_MOST_AT_ONCE, _LEAST_AT_ONCE = 2.0, 0.75
"""Limits of the factor by which one slot changes a rate. Among links that seem equally fast, one slot that is late for some other
reason does not reach `_SLOWER`: else its link would take no slots for a second.
"""
_LEAST_NS, _SLOWER = 100_000, 1.5
"""A rail that is slower by less than this time, or this factor, takes what it can."""
_LATE_NS = 2_000_000
"""A rail that would deliver a credit in less time sends it, even if another one would be faster."""


@register_jitable
def _good_ns(rail: Any) -> int:
    return max(_LOOK_NS, 1000 * rail.told.least_round_trip)


@register_jitable
def _measured_rate(rail: Any) -> float:
    """Bytes a nanosecond that it carried while it was full; the kernel's figure until it was for long, 0 if it never was."""
    if rail.rate > 0 or rail.told.limits & 1 != 0:
        return rail.rate
    return 1e-9 * rail.told.rate


@register_jitable
def _rate(rail: Any) -> float:
    """The measured rate, and the growth that is assumed since."""
    return _measured_rate(rail) * (1 + rail.growth)


@register_jitable
def _settle(rail: Any, rate: float) -> None:
    """Set the measured rate, and assume no growth."""
    rail.rate, rail.growth, rail.tried = rate, 0.0, 0


@register_jitable
def _try(rail: Any, nbytes: int, whole: int, now: int) -> None:
    """Measure a rail by a slot that it takes."""
    rail.watched = 1 if whole <= _SHORT_BYTES or rail.growth > 0 else 0
    if rail.watched != 0 and rail.looked != now:
        _ask(rail, now)
    waiting = rail.queued + (rail.sent - rail.sent_then)
    rail.tried_after, rail.tried_since = rail.told.acknowledged, rail.looked
    rail.tried = rail.told.acknowledged + waiting + nbytes


@register_jitable
def _judge(rail: Any, now: int, before: int) -> None:
    """Measure a rail by a slot that was delivered: it is at least as fast as bytes have arrived since it took the slot.

    That is its rate if its end was watched for, and came after two round trips or more: the first of them is left out. Else the
    kernel's figure may be higher, and if the kernel had nothing to send at times, the rate is only raised, after growth.

    Args:
        before: when the kernel was asked before.
    """
    told, rate, always_full = rail.told, _rate(rail), rail.told.limits & 1 == 0
    passed, arrived = now - rail.tried_since, told.acknowledged - rail.tried_after
    round_trip = 1000 * told.least_round_trip
    known = rail.watched != 0 and arrived >= _SAMPLE_BYTES and now - before < passed / 4 and passed > 2 * round_trip
    measured = arrived / (passed - round_trip if known else passed)
    if always_full and not known:
        measured = max(measured, 1e-9 * told.rate)
    if rate == 0 and known:
        rate = measured
    if known or always_full or (rail.growth > 0 and measured > rate):
        rail.measured += arrived
        _settle(rail, min(max(measured, _LEAST_AT_ONCE * _measured_rate(rail)), _MOST_AT_ONCE * rate))
    rail.tried = 0


@register_jitable
def watches(rail: Any) -> bool:
    """Whether it is time for `watch`. The caller holds the rail's lock."""
    return bool(rail.tried != 0 and rail.watched != 0) and monotonic() - rail.looked >= _WATCH_NS


@register_jitable
def watch(rail: Any) -> None:
    """Ask the kernel whether a slot that measures a rail was delivered, if its end is watched for.

    The next message may come much later, and the rail would seem slow. The caller holds the locks of the rail and the carrier.
    """
    if watches(rail):
        _ask(rail, monotonic())


@register_jitable
def look(rail: Any) -> int:
    """Learn from the kernel how fast a rail is and what it has queued, if that was long ago; the time now.

    The caller holds the rail's lock.
    """
    now = monotonic()
    if now - rail.looked >= _good_ns(rail):
        _ask(rail, now)
    return now


@register_jitable
def _ask(rail: Any, now: int) -> None:
    told, before = rail.told, rail.looked
    rail.looked, rail.sent_then = now, rail.sent
    if not ask_kernel(rail):
        told.round_trip = 0
        return
    # The kernel counts the SYN of the side that connects as acknowledged, but not as sent.
    rail.queued = max(0, told.unsent + told.sent - told.repeated - told.acknowledged)
    if rail.tried != 0 and told.acknowledged >= rail.tried:
        _judge(rail, now, before)
    passed, carried = now - rail.full_since, told.acknowledged - rail.acknowledged
    begins = rail.full_since == 0 or now - before > 2 * max(_MOST_BETWEEN_NS, _good_ns(rail))
    if told.unsent == 0:
        rail.full_since = 0
    elif begins or carried >= _SAMPLE_BYTES:
        if not begins:
            weight, known = passed / (passed + _SMOOTH_NS) if rail.rate > 0 else 1.0, _rate(rail)
            _settle(rail, known + weight * (carried / passed - known))
            rail.measured += carried
        rail.full_since, rail.acknowledged = now, told.acknowledged


@register_jitable
def _queued(rail: Any, now: int) -> float:
    """Bytes that a rail has still to carry."""
    return max(0.0, rail.queued + (rail.sent - rail.sent_then) - _rate(rail) * (now - rail.looked))


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
    return max(round_trip, (_queued(rail, now) + nbytes) / rate)


@register_jitable
def _together(link: Any, rail: Any, nbytes: int, now: int) -> float:
    """Nanoseconds until the other rails of a link that have rates would have delivered so many bytes more together."""
    rates = queued = 0.0
    for i in range(link.socket_count):
        other = rail_at(link.sockets[i])
        if other.path != rail.path and other.told.round_trip != 0 and _rate(other) > 0:
            rates += _rate(other)
            queued += _queued(other, now)
    return (queued + nbytes) / rates if rates > 0 else 0.0


@register_jitable
def credit_is_sooner(link: Any, rail: Any) -> bool:
    """Whether a rail that would deliver a credit late should leave it to another one, which takes two thirds of the time.

    A producer may wait for it: behind the queue of a slow rail, or on a far one, it would come late. Both are judged by their
    latest round trips: either may have become far, or be congested.
    """
    now = look(rail)
    if rail.told.round_trip == 0:
        return False
    for i in range(link.socket_count):
        other = rail_at(link.sockets[i])
        if other.told.round_trip != 0 and other.route != rail.route and other.blocked == 0:
            proven = _rate(other) > 0
            own = _expected(rail, 0, True, proven, now)
            if own > _LATE_NS and own > _SLOWER * _expected(other, 0, True, proven, now):
                return True
    return False


@register_jitable
def another_is_sooner(link: Any, rail: Any, nbytes: int, rest: int, whole: int) -> bool:
    """Whether a rail should leave a slot to the other ones of its link.

    It should if one of these, between other addresses, would deliver it in two thirds of the time, and if that one, or all
    others together, would have delivered the rest of the message before this rail had delivered the slot. Connections between
    the same addresses are slowed down by each other, and each takes what it can.

    Rates count where both connections have been full. The latest round trips also contain queues, and delays of
    acknowledgements where little is sent. So only the last slot of a message goes by them, and only to a rail that is free;
    other slots go by the shortest ones of the last minutes, so that rails of the same speed share.

    The rate of a rail that leaves slots to others because of it seems to grow until it takes one, and is measured by that
    slot. It does not grow where the slot is its message's last one and another rail is free.

    Args:
        nbytes: of the slot.
        rest: bytes of its message from there on, as far as the ring has slots for them.
        whole: bytes of the message.
    """
    now = look(rail)
    if rail.told.round_trip == 0:
        return False
    together = _together(link, rail, rest, now)
    for i in range(link.socket_count):
        other = rail_at(link.sockets[i])
        if other.told.round_trip == 0 or other.route == rail.route:
            continue
        free = rest <= nbytes and other.blocked == 0 and other.copying == 0
        proven = _rate(other) > 0
        own = _expected(rail, nbytes, free, proven, now) - _LEAST_NS
        slot, message = _expected(other, nbytes, free, proven, now), _expected(other, rest, free, proven, now)
        if proven:
            message = min(message, max(slot, together))
        if own > _SLOWER * slot and own > message:
            late_by_rate = own + _LEAST_NS > 1e3 * rail.told.least_round_trip
            if late_by_rate and not free and now == rail.looked and rail.growth < _MOST_GROWTH:
                time_of_growth = _UNSURE_GROWTH_NS if rail.measured < _FEW_BYTES else _GROWTH_NS
                rail.rate = _measured_rate(rail)  # the kernel's later figures are about less data
                passed = min(now - rail.grown, max(_MOST_BETWEEN_NS, _good_ns(rail)))
                rail.growth += (1 + rail.growth) * passed / time_of_growth
                rail.grown = now
            return True
    if rail.tried == 0:
        _try(rail, nbytes, whole, now)
    return False
