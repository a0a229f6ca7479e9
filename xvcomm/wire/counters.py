"""Compiled code that finds the counters and the ledger of a wire's half of a ring, and what still flies to the other half."""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load, load_acquire
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import compiled_at
from xvcomm.memory.ring import COUNTERS, LEDGER, LEDGER_ENTRY, LINE

_entry_at = compiled_at(LEDGER_ENTRY)


@register_jitable
def head_of(wire: Any, lane: int) -> int:
    """Address of a lane's count of produced slots."""
    return wire.ring + COUNTERS + 2 * lane * LINE


@register_jitable
def tail_of(wire: Any, lane: int) -> int:
    """Address of a lane's count of consumed slots."""
    return head_of(wire, lane) + LINE


@register_jitable
def entry_of(wire: Any, message: int, producer: bool) -> Any:
    """An end's entry for a message in the ledger."""
    return _entry_at(wire.ring + wire.geometry.ledger, message % LEDGER + (0 if producer else LEDGER))


@register_jitable
def finished(wire: Any) -> int:
    """How many messages this side's end of the ring has finished."""
    turn = load_acquire(wire.turn)
    return turn if turn >= 0 else -1 - turn


@register_jitable
def flies(wire: Any, place: int) -> bool:
    """Whether a WRITE to a slot there may still arrive."""
    return bool(load(wire.flights + 8 * place) != 0)


@register_jitable
def any_flies(wire: Any) -> bool:
    """Whether a WRITE to any slot there may still arrive."""
    count = 0
    for place in range(wire.geometry.lanes * wire.geometry.slots):
        count += load(wire.flights + 8 * place)
    return count != 0
