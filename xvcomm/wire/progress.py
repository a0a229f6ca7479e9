"""The compiled loop that carries frames, run by the carrier's threads and by every thread that waits for a message.

A thread that waits calls `progress` instead of only looking: so a message needs no switch between threads. The carrier's first
thread carries when no thread waits. It sleeps in one system call when nothing moves and no operation is under way. The others
sleep until a rail has carried much at once, or a thread copies much. Then they serve the rails for which no other thread carries.

Where all rails are alike (TCP, and between each two processes one pair of addresses), a thread leaves carrying to others while it
copies, and looks at a few of many connections while it expects something soon.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import (
    compare_and_swap,
    fetch_add,
    full_fence,
    load,
    load_acquire,
    sched_yield,
    store_release,
)
from xvcomm.jit.compile import compiling, kernel, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.memory.ring import COPIES, EXPECTS
from xvcomm.wire.changes import lose_rail
from xvcomm.wire.counters import finished
from xvcomm.wire.locks import enter_rail, leave_rail, lock, try_rail, unlock
from xvcomm.wire.posting import post_frames, take_frames
from xvcomm.wire.receiving import receive_frames
from xvcomm.wire.records import (
    AWAKE,
    CALLED,
    RESTS,
    UNTOLD,
    UP,
    carrier_at,
    helper_at,
    link_at,
    rail_at,
    rdma_at,
    wire_at,
)
from xvcomm.wire.sending import send_frames
from xvcomm.wire.sockets import POLLIN, POLLOUT, polled_at, raise_event, take_event, wait
from xvcomm.wire.verbs import arm, completions_at, take_events

_BUSY_YIELDS, _IDLE_YIELDS = 200, 20
_MEMORY_NS, _DRIVEN_NS, _REPLAY_NS, _DECLINED_NS, _IDLE_NS = 50_000, 1_000_000, 500_000, 1_000_000, 500_000_000
"""How long the thread sleeps while operations are under way, since movers do not wake it; while other threads drive; while graphs
may be replayed, since a replay does not wake it; while a rail declines a slot, because another one is sooner; else."""
_MUCH, _SOME, _HELPER_YIELDS, _HELPER_NS = 128 << 10, 2 << 10, 200, 1_000_000_000
"""Bytes carried for a rail at once for which a further thread is woken; bytes of a round that keep it awake; for how many rounds
it looks for work before it sleeps, and how long it sleeps. A thread that copies much wakes one, too."""
_AT_ONCE = 3
"""Rails at which a thread that waits looks by one call, besides the one that moved a little last."""
_LITTLE = 16 << 10
"""A rail that has moved fewer bytes than this by one look has the next turn, too. After more, another rail has it: a connection
sends more slowly while the other side still reads from it."""
_RECENT = 500
"""Rounds without work after which a graph is not expected at once."""
_REST = 64
"""Of so many looks at a socket beside rails of RDMA one is made, since it has little to carry."""


@register_jitable
def _carry_for(carrier: Any, rail: Any, index: int, idle: bool, receives: bool) -> int:
    """Receive and send on a rail whose lock the caller holds; the number of bytes."""
    if rail.rdma != 0:
        lock(carrier)
        got = take_frames(carrier, rail, index)
        sent = post_frames(carrier, rail, index, idle) if got >= 0 else 0
        unlock(carrier)
    else:
        got = receive_frames(carrier, rail, index) if receives else 0
        sent = send_frames(carrier, rail, index, idle) if got >= 0 else 0
    if got < 0 or sent < 0:
        lock(carrier)
        lose_rail(carrier, rail, index, min(got, sent))
        unlock(carrier)
    return abs(got) + abs(sent)


@register_jitable
def _rests(carrier: Any, rail: Any) -> bool:
    """Whether a rail need not be looked at in this round."""
    if rail.rdma != 0 or rail.blocked != 0 or rail.chosen != 0:
        return False
    if link_at(load(carrier.links + 8 * rail.link)).rdma_rails == 0:
        return False
    rail.rested += 1
    return bool(rail.rested % _REST != 0)


@register_jitable
def _call_helper(carrier: Any) -> None:
    """Wake one of the further threads, if one sleeps."""
    for i in range(carrier.helper_count):
        helper = helper_at(carrier.helpers, i)
        resting = address_of(helper, "resting")
        if load_acquire(resting) == RESTS and compare_and_swap(resting, RESTS, CALLED) == RESTS:
            raise_event(helper.wake, address_of(carrier, "one"))
            return


@register_jitable
def _visit(carrier: Any, index: int, idle: bool, receives: bool) -> int:
    """Receive and send on a rail, unless another thread does; the number of bytes. `idle`, `receives`: as in `_carry`."""
    rail = rail_at(load(carrier.rails + 8 * index))
    if rail.state != UP or _rests(carrier, rail) or not try_rail(rail):
        return 0
    up = load_acquire(address_of(rail, "state")) == UP
    nbytes = _carry_for(carrier, rail, index, idle, receives) if up else 0
    leave_rail(rail)
    if nbytes >= _MUCH and carrier.rail_count > 1:
        _call_helper(carrier)
    return nbytes


@register_jitable
def _report(carrier: Any) -> None:
    """Wake the thread that handles news, if there are any."""
    if carrier.has_news != 0 and compare_and_swap(address_of(carrier, "has_news"), 1, 0) == 1:
        raise_event(carrier.news, address_of(carrier, "one"))


@register_jitable
def _carry(carrier: Any, idle: bool, first: int, receives: bool = True) -> int:
    """Receive and send on all rails for which no other thread does; the number of bytes.

    Args:
        idle: whether to send credits that could wait, too.
        first: index of the rail to begin with.
        receives: whether to receive from sockets; what comes over RDMA costs no system call, and is always taken.
    """
    moved, count = 0, carrier.rail_count
    for n in range(count):
        moved += _visit(carrier, (first + n) % count, idle, receives)
    _report(carrier)
    return moved


@register_jitable
def _next(carrier: Any) -> int:
    """The rail with which a round begins: a further one in each, so that all come to take slots of short messages, and are
    measured.
    """
    first: int = carrier.rounds
    carrier.rounds += 1
    return first


@register_jitable
def _alike(carrier: Any) -> bool:
    """Whether all rails of each link are alike: sockets of one route, of which none must be measured."""
    for i in range(carrier.link_count):
        link = link_at(load(carrier.links + 8 * i))
        if link.routes > 1 or link.rdma_rails > 0:
            return False
    return True


@register_jitable
def _carry_some(carrier: Any) -> int:
    """Receive and send on the rail that moved a little last, and on the next few; the number of bytes.

    A look at an empty socket is a system call. So a short answer, which comes over the connection that the request took, is
    found soon among many connections.
    """
    count, last, looks, n, moved = carrier.rail_count, carrier.last, 0, 0, 0
    first = carrier.rounds
    carrier.rounds = first + _AT_ONCE
    if 0 <= last < count:
        moved = _visit(carrier, last, False, True)
        if moved >= _LITTLE:
            carrier.last = -1
    while looks < _AT_ONCE and n < count:
        index = (first + n) % count
        n += 1
        if index == last or rail_at(load(carrier.rails + 8 * index)).state != UP:
            continue
        looks += 1
        nbytes = _visit(carrier, index, False, True)
        if nbytes != 0:
            carrier.last = index if nbytes < _LITTLE else -1
        moved += nbytes
    if n != _AT_ONCE:
        carrier.rounds = first + n
    _report(carrier)
    return moved


@register_jitable
def _send_rest(carrier: Any) -> int:
    """Send on all rails; the number of bytes. Among many that are alike, the one that moved a little last has the first turn."""
    last = carrier.last
    if last < 0 or carrier.rail_count <= _AT_ONCE or not _alike(carrier):
        return _carry(carrier, False, _next(carrier), False)
    moved = _carry(carrier, False, last, False)
    if moved >= _LITTLE:
        carrier.last = -1
    return moved


@register_jitable
def _is_helped(carrier: Any) -> bool:
    """Whether a further thread is awake and all rails are alike, so that the caller need not carry; wakes one if all sleep."""
    called = False
    if not _alike(carrier):
        return False
    for i in range(carrier.helper_count):
        state = load_acquire(address_of(helper_at(carrier.helpers, i), "resting"))
        if state == AWAKE:
            return True
        called = called or state == CALLED
    if not called:
        _call_helper(carrier)
    return False


@register_jitable
def _blocked(carrier: Any) -> bool:
    """Whether a socket is full, so that the carrier's thread must go on."""
    for i in range(carrier.rail_count):
        rail = rail_at(load(carrier.rails + 8 * i))
        if rail.state == UP and rail.blocked != 0:
            return True
    return False


@register_jitable
def _declined(carrier: Any) -> bool:
    """Whether a rail has declined a slot, which another one should send, so that both must be looked at again."""
    for i in range(carrier.rail_count):
        rail = rail_at(load(carrier.rails + 8 * i))
        if rail.state == UP and rail.declined != 0:
            return True
    return False


@register_jitable
def _hand_on(carrier: Any) -> None:
    """Wake the first thread if it sleeps and there is still something to carry, which the caller no longer does."""
    full_fence()
    if load_acquire(address_of(carrier, "asleep")) != 0 and (_blocked(carrier) or _declined(carrier) or _busy(carrier)):
        raise_event(carrier.wake, address_of(carrier, "one"))


def _progress(address: int, drivers: int, haste: int) -> int:
    """Carry frames, in a thread that waits for a message; the number of bytes.

    Args:
        address: of the carrier.
        drivers: 1 when the thread begins to wait, if it must; -1 when it ends, so that what is left to send must go; else 0.
        haste: COPIES if the thread has more to copy between its array and a ring: then a further thread that is awake carries;
            EXPECTS if it has waited for a short time: then it looks at a few of many connections; else 0. See the module.
    """
    carrier = carrier_at(address)
    if drivers != 0:
        fetch_add(address_of(carrier, "drivers"), drivers)
    elif haste == COPIES and _is_helped(carrier):
        return 0
    carrier.calls += 1
    full_fence()
    if drivers > 0:
        return 0
    if drivers < 0:
        moved = _send_rest(carrier)
    elif haste == EXPECTS and carrier.rail_count > _AT_ONCE and _alike(carrier):
        moved = _carry_some(carrier)
    else:
        moved = _carry(carrier, False, _next(carrier))
    if drivers < 0:
        _hand_on(carrier)
    return moved


def _wake(address: int, unused: int, unused_too: int) -> int:
    """Let the carrier's thread look at the rings, if it sleeps; after a message was enqueued whose mover does not carry."""
    carrier = carrier_at(address)
    full_fence()
    if load_acquire(address_of(carrier, "asleep")) != 0:
        raise_event(carrier.wake, address_of(carrier, "one"))
    return 0


@register_jitable
def _attached(wire: Any) -> bool:
    """Whether both sides have the ring and neither has stopped it; the caller holds the carrier's lock."""
    return bool(wire.ring != 0 and wire.there >= 0 and wire.stop == UNTOLD)


@register_jitable
def _replays(carrier: Any) -> bool:
    """Whether captured graphs have messages; their replays do not wake the thread."""
    found = False
    lock(carrier)  # else a ring's memory could be unmapped meanwhile
    for i in range(carrier.wire_count):
        wire = wire_at(load(carrier.wires + 8 * i))
        found = found or (_attached(wire) and load(wire.replays) != 0)
    unlock(carrier)
    return found


@register_jitable
def _busy(carrier: Any) -> bool:
    """Whether operations are under way, whose movers publish in memory and wake nobody."""
    found = False
    lock(carrier)  # else a ring's memory could be unmapped meanwhile
    for i in range(carrier.wire_count):
        wire = wire_at(load(carrier.wires + 8 * i))
        found = found or (_attached(wire) and load_acquire(wire.counter) > finished(wire))
    unlock(carrier)
    return found


@register_jitable
def _patience(carrier: Any, quiet: int) -> int:
    """How long the thread may sleep after so many rounds without work."""
    if _busy(carrier):
        return _MEMORY_NS
    if _replays(carrier):
        return _MEMORY_NS if quiet < _RECENT else _REPLAY_NS
    return _DECLINED_NS if _declined(carrier) else _IDLE_NS


@register_jitable
def _sleep(carrier: Any, nanoseconds: int, sockets: bool) -> bool:
    """Sleep until a socket is ready, or somebody wakes this thread; False if the time was over before."""
    first = polled_at(carrier.poll)
    first.fd, first.events = carrier.wake, POLLIN
    count = 1
    if sockets:
        for i in range(carrier.rail_count):
            rail = rail_at(load(carrier.rails + 8 * i))
            if rail.state == UP:
                polled = polled_at(carrier.poll, count)
                polled.fd, polled.events = rail.fd, POLLIN | (POLLOUT if rail.blocked != 0 else 0)
                rail.rested = -1
                count += 1
    ready = wait(carrier.poll, count, address_of(carrier, "pause"), nanoseconds)
    if ready > 0 and first.revents != 0:
        take_event(carrier.wake, address_of(carrier, "word"))
    return ready > 0


@register_jitable
def _arm(carrier: Any) -> bool:
    """Let completions of RDMA end the sleep that follows; whether there are such rails, which must be looked at once more."""
    found = False
    for i in range(carrier.rail_count):
        rail = rail_at(load(carrier.rails + 8 * i))
        if rail.state == UP and rail.rdma != 0:
            enter_rail(rail)
            if rail.state == UP and rail.rdma != 0:
                completions = completions_at(rdma_at(rail.rdma).completions)
                take_events(completions)
                arm(completions)
                found = True
            leave_rail(rail)
    return found


def _run(address: int) -> int:
    """The carrier's thread, until `CARRIER.over`."""
    carrier = carrier_at(address)
    quiet, calls = 0, -1
    while load_acquire(address_of(carrier, "over")) == 0:
        if load_acquire(address_of(carrier, "drivers")) > 0 or carrier.calls != calls:
            calls = carrier.calls
            store_release(address_of(carrier, "asleep"), 1)
            full_fence()
            if not _blocked(carrier):
                _sleep(carrier, _DRIVEN_NS, False)
            store_release(address_of(carrier, "asleep"), 0)
            if load_acquire(address_of(carrier, "drivers")) > 0 and carrier.calls != calls:
                continue
        if _carry(carrier, False, _next(carrier)) != 0:
            quiet = 0
            continue
        quiet += 1
        busy = _busy(carrier)
        if quiet < (carrier.spins if busy else 0):
            continue
        if quiet < (carrier.spins + _BUSY_YIELDS if busy else _IDLE_YIELDS):
            sched_yield()
            continue
        if not busy and _carry(carrier, True, _next(carrier)) != 0:
            continue
        store_release(address_of(carrier, "asleep"), 1)
        full_fence()
        # A thread that found a rail's lock taken has counted its call before, and may have left frames to send.
        if (
            carrier.calls == calls
            and not (_arm(carrier) and _carry(carrier, False, _next(carrier)) != 0)
            and _sleep(carrier, _patience(carrier, quiet), True)
        ):
            quiet = 0 if _busy(carrier) else quiet
        store_release(address_of(carrier, "asleep"), 0)
    return 0


def _assist(address: int, number: int) -> int:
    """A further thread of the carrier, which carries while there is much to carry; until `CARRIER.over`.

    Args:
        number: from 1 on.
    """
    carrier = carrier_at(address)
    helper, quiet = helper_at(carrier.helpers, number - 1), _HELPER_YIELDS
    while load_acquire(address_of(carrier, "over")) == 0:
        moved = _carry(carrier, False, number)
        if moved >= _SOME:
            quiet = 0
        quiet += 1
        if moved != 0:
            continue
        if quiet < _HELPER_YIELDS:
            sched_yield()
            continue
        polled = helper.polled
        polled.fd, polled.events = helper.wake, POLLIN
        store_release(address_of(helper, "resting"), RESTS)
        full_fence()
        # A thread that found a rail's lock taken by this one may have left frames to send.
        moved = _carry(carrier, False, number)
        if moved == 0:
            _hand_on(carrier)
            if wait(address_of(helper, "polled"), 1, address_of(helper, "pause"), _HELPER_NS) > 0:
                take_event(helper.wake, address_of(helper, "word"))
                quiet = 0
        elif moved >= _SOME:
            quiet = 0
        store_release(address_of(helper, "resting"), AWAKE)
    return 0


with compiling():
    progress_address = native("int64(int64, int64, int64)", _progress)
    wake_address = native("int64(int64, int64, int64)", _wake)
    run = kernel("int64(int64)")(_run)
    assist = kernel("int64(int64, int64)")(_assist)
