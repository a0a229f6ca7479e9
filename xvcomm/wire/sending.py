"""Compiled code that sends frames to a socket: headers and payloads from where they are, several by one system call."""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load
from xvcomm.jit.inline import register_jitable
from xvcomm.wire.delivery import look, watch, watches
from xvcomm.wire.frames import HEADER
from xvcomm.wire.locks import begin_copy, end_copy, lock, unlock
from xvcomm.wire.outgoing import choose_frame, seems_due
from xvcomm.wire.records import link_at
from xvcomm.wire.sockets import BLOCKED, send

SEND_BYTES = 128 << 10
"""Bytes that a rail sends before the other rails have their turn."""


@register_jitable
def _list_parts(rail: Any) -> int:
    """Write where the bytes are that are left of the frames being sent to `rail.parts`; in how many places."""
    parts, count, skipped = rail.parts, 0, rail.out_at
    for i in range(rail.out_count):
        payload = min(rail.out_each, rail.out_size - i * rail.out_each) - HEADER
        if skipped < HEADER:
            parts[2 * count], parts[2 * count + 1] = rail.out + i * HEADER + skipped, HEADER - skipped
            count += 1
        begin = max(0, skipped - HEADER)
        if payload > begin:
            parts[2 * count], parts[2 * count + 1] = rail.out_data + i * rail.out_step + begin, payload - begin
            count += 1
        skipped = 0
    return count


@register_jitable
def _advance(rail: Any, sent: int) -> None:
    """Note that so many more bytes of the frames were sent."""
    rail.sent += sent
    rail.out_at += sent
    while rail.out_count > 1 and rail.out_at >= rail.out_each:
        rail.out, rail.out_data = rail.out + HEADER, rail.out_data + rail.out_step
        rail.out_at, rail.out_size = rail.out_at - rail.out_each, rail.out_size - rail.out_each
        rail.out_count -= 1
    if rail.out_at == rail.out_size:
        rail.out = 0


@register_jitable
def _send_frames(carrier: Any, rail: Any, rail_index: int, idle: bool) -> int:
    total = 0
    while total < SEND_BYTES:
        if rail.out == 0 and not choose_frame(carrier, rail, rail_index, idle):
            rail.blocked = 0
            watch(rail)
            return total
        count = _list_parts(rail)
        begin_copy(carrier, rail)
        sent = send(rail, count)
        end_copy(carrier, rail)
        if sent == BLOCKED:
            rail.blocked = 1
            if link_at(load(carrier.links + 8 * rail.link)).routes > 1:
                look(rail)
            return total
        if sent < 0:
            return sent
        _advance(rail, sent)
        total += sent
    rail.blocked = 0
    return total


@register_jitable
def send_frames(carrier: Any, rail: Any, rail_index: int, idle: bool) -> int:
    """Send frames until the socket is full or there is nothing to send; the number of bytes sent, or a failure.

    The caller holds the rail's lock. The carrier's is needed only if there seems to be something to send.

    Args:
        idle: whether to send credits that could wait, too.
    """
    if rail.out == 0 and not seems_due(carrier, rail, idle):
        rail.blocked = rail.declined = 0
        if watches(rail):
            lock(carrier)
            watch(rail)
            unlock(carrier)
        return 0
    lock(carrier)
    sent = _send_frames(carrier, rail, rail_index, idle)
    unlock(carrier)
    return sent
