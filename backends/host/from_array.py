"""Messages between hosts that go from the sender's array, without a copy to the ring: which do, and how long their sender waits.

The functions take a row of the mover.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load_acquire, monotonic
from xvcomm.jit.ccall import call_3
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at
from xvcomm.memory.ring import CARRIER, CONSUMED, DIRECT, FROM_ARRAY_BYTES, may_go_from_array, must_wait

LEAST_CARRIED = 64 << 10
"""Bytes of a message that is worth receiving into its array."""
_PATIENCE_NS, _NS_PER_BYTE, _MOST_PATIENCE_NS, _MOST_LATE = 200_000, 1, 5_000_000, 10
"""How long a message that fits the ring waits until it is received, before it is copied: so long, and so much for each byte, up
to a limit. If messages are received later, more and more of the next ones are copied at once, up to two to that power."""
_AT_ONCE_NS = 30_000
"""A message that begins so soon after the previous one ended is copied, so that it does not wait until it is received. To copy
half a ring or more takes longer than that wait: such a message goes from its array."""
_carrier_at, _direct_at = map(compiled_at, (CARRIER, DIRECT))
_may_go_from_array, _must_wait = register_jitable(may_go_from_array), register_jitable(must_wait)


@register_jitable
def _awaited(row: Any) -> bool:
    """Whether the receiver has advertised a registered array for the row's message, and the row's array is registered, too."""
    if load_acquire(address_of(_direct_at(row.direct), "message")) != row.sequence + 1:
        return False
    return call_3(_carrier_at(row.carrier).registered, row.carrier, row.data, row.message.nbytes) != 0


@register_jitable
def _waits_briefly(row: Any, capacity: int) -> bool:
    """Whether a message that fits the ring waits for its receiver for a short time."""
    direct, now = _direct_at(row.direct), monotonic()
    follows = now - direct.last_end < _AT_ONCE_NS and 2 * row.message.nbytes < capacity
    if direct.may_wait == 0 or follows:
        return False
    if direct.copies_left > 0:
        direct.copies_left -= 1
        return False
    row.copy_at = now + min(_PATIENCE_NS + _NS_PER_BYTE * row.message.nbytes, _MOST_PATIENCE_NS)
    return True


@register_jitable
def goes_from_array(row: Any, capacity: int) -> bool:
    """Whether a producer's message, which begins, goes from its array; also if devices carry it to an array that waits for it."""
    nbytes = row.message.nbytes
    if nbytes >= LEAST_CARRIED and _awaited(row):
        return True
    if not _may_go_from_array(nbytes, capacity):
        return False
    return bool(_must_wait(row.message.op, nbytes, capacity) or _waits_briefly(row, capacity))


@register_jitable
def is_received(row: Any) -> bool:
    """Whether a message that goes from its array was received; notes that it was in time."""
    received = load_acquire(row.ring + CONSUMED) > row.sequence
    if received and row.copy_at != 0:
        direct = _direct_at(row.direct)
        direct.late = max(0, direct.late - 1)
    return bool(received)


@register_jitable
def copy_if_late(row: Any) -> bool:
    """Copy to the ring what was sent of a message that was not received in time; whether the mover must copy the rest."""
    if row.copy_at == 0 or monotonic() <= row.copy_at:
        return False
    if call_3(_carrier_at(row.carrier).to_ring, row.carrier, row.direct, 0) == 0:
        return False
    direct = _direct_at(row.direct)
    direct.late = min(direct.late + 1, _MOST_LATE)
    direct.copies_left, row.copy_at = 1 << direct.late, 0
    return True


@register_jitable
def note_message_end(row: Any) -> None:
    """Note when a producer's message has ended."""
    if row.message.nbytes >= FROM_ARRAY_BYTES:
        _direct_at(row.direct).last_end = monotonic()
