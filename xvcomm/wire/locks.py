"""Locks of the threads that carry frames.

A thread holds a rail's lock while it carries for that rail, and the carrier's lock while it reads or writes what rails share.
It releases the carrier's lock while the kernel copies bytes for its rail, so that several threads carry at the same time, each
for another rail. To find that a socket's rail has nothing to carry, its lock is enough. To take a rail, a wire or an array out
of use, a thread holds all these locks.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import compare_and_swap, load, load_acquire, sched_yield, store_release
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.wire.records import rail_at


@register_jitable
def _acquire(word: int) -> None:
    while compare_and_swap(word, 0, 1) != 0:
        sched_yield()


@register_jitable
def lock(carrier: Any) -> None:
    """Acquire the carrier's lock."""
    _acquire(address_of(carrier, "lock"))


@register_jitable
def unlock(carrier: Any) -> None:
    """Release the carrier's lock."""
    store_release(address_of(carrier, "lock"), 0)


@register_jitable
def enter_rail(rail: Any) -> None:
    """Acquire a rail's lock."""
    _acquire(address_of(rail, "lock"))


@register_jitable
def try_rail(rail: Any) -> bool:
    """Acquire a rail's lock if it is free."""
    return compare_and_swap(address_of(rail, "lock"), 0, 1) == 0


@register_jitable
def leave_rail(rail: Any) -> None:
    """Release a rail's lock."""
    store_release(address_of(rail, "lock"), 0)


@register_jitable
def lock_all(carrier: Any) -> int:
    """Acquire the locks of all rails and the carrier's; the number of rails, for `unlock_all`."""
    count = 0
    while True:
        while count < load_acquire(address_of(carrier, "rail_count")):
            enter_rail(rail_at(load(carrier.rails + 8 * count)))
            count += 1
        lock(carrier)
        if count == carrier.rail_count:
            return count
        unlock(carrier)  # Python has added a rail meanwhile


@register_jitable
def unlock_all(carrier: Any, count: int) -> None:
    """Release the locks that `lock_all` has acquired."""
    unlock(carrier)
    for i in range(count):
        leave_rail(rail_at(load(carrier.rails + 8 * i)))


@register_jitable
def begin_copy(carrier: Any, rail: Any) -> None:
    """Release the carrier's lock while the kernel copies for a rail, whose lock the thread keeps."""
    rail.copying = 1
    unlock(carrier)


@register_jitable
def end_copy(carrier: Any, rail: Any) -> None:
    """Acquire the carrier's lock again."""
    store_release(address_of(rail, "copying"), 0)
    lock(carrier)


@register_jitable
def await_copy(rail: Any) -> None:
    """Wait until the kernel does not copy for a rail; the caller holds the carrier's lock, so no copy into a slot begins."""
    while load_acquire(address_of(rail, "copying")) != 0:
        sched_yield()
