"""Compiled code that receives frames from a socket: slots straight into the ring, everything else through a small buffer."""

from __future__ import annotations

from typing import Any

from numba import types

from xvcomm.jit.atomics import as_pointer, copy_bytes, monotonic, store_release
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.wire.frames import CONTROL_BYTES, HEADER, Kind
from xvcomm.wire.incoming import PROTOCOL, REFUSED, end_slot, handle
from xvcomm.wire.locks import begin_copy, end_copy, lock, unlock
from xvcomm.wire.records import EAGER, SINK_BYTES, frame_at
from xvcomm.wire.sockets import BLOCKED, receive

_SLOT = int(Kind.SLOT)

_memmove = types.ExternalFunction("memmove", types.voidptr(types.voidptr, types.voidptr, types.uint64))

RECEIVE_BYTES = 128 << 10
"""Bytes that a rail receives before the other rails have their turn."""
_GATHER_BYTES, _GATHER_NS = 64 << 10, 10_000
"""While more bytes of a slot than this are to come, they gather in the kernel for this time: the connection's lock, which what
arrives needs as well, is taken less often. Messages of 16 MiB and more took 0.9 of their time by this, on two cores."""


@register_jitable
def _handle_buffer(carrier: Any, rail: Any, rail_index: int) -> int:
    """Handle the frames in a rail's buffer up to one that is not whole yet; 0, NEWS or REFUSED."""
    buffer, news = address_of(rail, "buffer"), 0
    while rail.slot_left == 0 and rail.end - rail.begin >= HEADER:
        frame = frame_at(buffer + rail.begin)
        size = HEADER
        if frame.kind != _SLOT:
            if frame.length < 0 or frame.length > CONTROL_BYTES:
                return REFUSED
            size += frame.length
            if rail.end - rail.begin < size:
                break
        result = handle(carrier, rail, rail_index, frame)
        if result == REFUSED:
            return REFUSED
        news = news or result
        rail.begin += size
        if rail.slot_left > 0:
            _take_payload(carrier, rail)
    if rail.begin == rail.end:
        rail.begin = rail.end = 0
    elif rail.begin > 0:
        _memmove(as_pointer(buffer), as_pointer(buffer + rail.begin), rail.end - rail.begin)
        rail.begin, rail.end = 0, rail.end - rail.begin
    return news


@register_jitable
def _take_payload(carrier: Any, rail: Any) -> None:
    """Copy what the buffer has of a slot's payload to its place."""
    here = min(rail.slot_left, rail.end - rail.begin)
    if here > 0:
        if rail.slot_data != 0:
            copy_bytes(rail.slot_data, address_of(rail, "buffer") + rail.begin, here)
            rail.slot_data += here
        rail.begin += here
        rail.slot_left -= here
    if rail.slot_left == 0:
        end_slot(carrier, rail)


@register_jitable
def receive_frames(carrier: Any, rail: Any, rail_index: int) -> int:
    """Receive until the socket has no more, unless what it has gathers; the number of bytes, or a failure.

    The caller holds the rail's lock. The carrier's is needed only for what has come, and for a slot's place: threads that look
    at empty sockets do not contend for it.
    """
    total, news = 0, 0
    if rail.slot_left > _GATHER_BYTES and monotonic() < rail.gathered_at:
        return 0
    empty = False
    while total < RECEIVE_BYTES and not empty:
        if rail.slot_left > 0:
            lock(carrier)
            to_ring = rail.slot_data != 0
            target = rail.slot_data if to_ring else carrier.sink
            wanted = rail.slot_left if to_ring else min(rail.slot_left, SINK_BYTES)
            begin_copy(carrier, rail)
        else:
            target = address_of(rail, "buffer") + rail.end
            wanted = min(EAGER, EAGER + HEADER + CONTROL_BYTES - rail.end)
        got = receive(rail, target, wanted)
        if got < 0:
            store_release(address_of(rail, "copying"), 0)
            empty = got == BLOCKED
            if empty:
                break
            return got
        end_copy(carrier, rail)
        total += got
        empty = got < wanted and rail.tls == 0  # TLS gives one record at a time
        if rail.slot_left > 0:
            if rail.slot_data != 0:  # no other rail has taken the slot over meanwhile
                rail.slot_data += got
            rail.slot_left -= got
            if rail.slot_left == 0:
                end_slot(carrier, rail)
        else:
            rail.end += got
            result = _handle_buffer(carrier, rail, rail_index)
            if result == REFUSED:
                unlock(carrier)
                return PROTOCOL
            news = news or result
        unlock(carrier)
    if empty and rail.slot_left > _GATHER_BYTES:
        rail.gathered_at = monotonic() + _GATHER_NS
    if total > 0:
        rail.received += total
        if news != 0:
            store_release(address_of(carrier, "has_news"), 1)
    return total
