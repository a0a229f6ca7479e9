"""Compiled code that chooses what a rail sends next.

A rail takes the next frame whenever it has room, so faster rails carry more; but a socket leaves a slot to another one that would
deliver it sooner, see `delivery`.

Where a link has rails of RDMA, these carry the wires' frames, and sockets only the slots of rings that no device may write to.
"""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import load, load_acquire
from xvcomm.jit.inline import register_jitable
from xvcomm.memory.ring import ABORT, Reason
from xvcomm.wire.control_frames import (
    control,
    credit_due,
    list_consumed,
    send_array,
    send_credit,
    send_failed,
    send_open,
    send_tell,
)
from xvcomm.wire.counters import any_flies, entry_of, finished
from xvcomm.wire.delivery import credit_is_sooner, look
from xvcomm.wire.frames import Kind
from xvcomm.wire.records import DUE, TOLD, UNTOLD, link_at, wire_at
from xvcomm.wire.slot_frames import begun, send_data, unsent

_STOP, _STOPPED, _PING, _PONG, _LEAVE, _ASK = map(
    int, (Kind.STOP, Kind.STOPPED, Kind.PING, Kind.PONG, Kind.LEAVE, Kind.ASK)
)
_LEFT = int(Reason.LEFT)


@register_jitable
def _carries(link: Any, rail: Any, wire: Any) -> bool:
    """Whether a rail may carry the slots: where RDMA devices reach both ends', rails of RDMA do; if some are chosen, these."""
    by_rdma = link.rdma_rails > 0 and wire.registered != 0 and wire.slots_there != 0
    by_socket = wire.apart == 0 and wire.apart_there == 0
    if not by_socket and link.rdma_chosen > 0:
        return bool(by_rdma and rail.rdma != 0 and rail.chosen != 0)
    if by_socket and link.chosen > 0 and (by_rdma or link.rdma_rails == 0):
        return bool(rail.chosen != 0)
    return bool(rail.rdma != 0) if by_rdma else bool(rail.rdma == 0 and by_socket)


@register_jitable
def _stranded(link: Any, wire: Any) -> bool:
    """Whether no rail that is up can carry the slots: they are in a GPU's memory, and there is no rail of RDMA."""
    return bool(link.rdma_rails == 0 and (wire.apart != 0 or wire.apart_there != 0))


@register_jitable
def _stop_due(link: Any, wire: Any) -> bool:
    """Whether this side's abort word is to be sent now: that a producer has left, only after all that it has finished."""
    if wire.stop != UNTOLD:
        return False
    word = load_acquire(wire.ring + ABORT)
    if word == 0:
        return False
    if wire.producer == 0:
        return True
    if any_flies(wire):
        return False  # a consumer that knows the word gives the slots' memory back
    if unsent(wire):
        return _stranded(link, wire) and word & 0xFF != _LEFT
    return bool(word & 0xFF != _LEFT or wire.message >= finished(wire))


@register_jitable
def _send_stop(rail: Any, wire: Any) -> None:
    """Send the abort word, with a producer's counts of what it has sent, or with a consumer's counts of what it has consumed and
    its description of the next message.
    """
    lanes = wire.geometry.lanes
    frame = control(rail, _STOP, wire.there, load_acquire(wire.ring + ABORT), lanes)
    if wire.producer != 0:
        whole = not unsent(wire)  # else what was lost is not sent again, and the other side need not wait for it
        frame.entry.number = wire.message if whole else 0
        for lane in range(lanes):
            rail.payload[lane] = wire.sent[lane] if whole else 0
    else:
        frame.slot = list_consumed(rail, wire)
        entry = entry_of(wire, finished(wire), False)
        frame.entry.number, frame.entry.message = entry.number, entry.message
    wire.stop = TOLD


@register_jitable
def _choose_of(carrier: Any, rail: Any, rail_index: int, link: Any, wire: Any, place: int, idle: bool) -> bool:
    """Let a rail send a frame of a wire, if it has any for this rail."""
    if wire.ring == 0:
        return False
    if rail.rdma != 0 or link.rdma_rails == 0:
        if wire.open != 0:
            send_open(rail, wire)
            return True
        if wire.there < 0:
            return False
        if _stop_due(link, wire):
            _send_stop(rail, wire)
            return True
        if wire.answer != 0 and not any_flies(wire):
            wire.answer = 0
            control(rail, _STOPPED, wire.there, 0, 0)
            return True
        if wire.producer == 0 and credit_due(wire, idle):
            if link.routes < 2 or rail.rdma != 0 or not credit_is_sooner(link, rail):
                send_credit(rail, wire)
                return True
            rail.declined = 1
        if send_array(carrier, rail, link, wire):
            return True
    if wire.there < 0 or wire.producer == 0 or wire.confirm != 0 or not _carries(link, rail, wire):
        return False
    rail.out_wire = place
    return send_data(rail, rail_index, link, wire)


@register_jitable
def _wire_seems_due(wire: Any, idle: bool) -> bool:
    """Whether a wire seems to have a frame for some rail."""
    if wire.ring == 0:
        return False
    if wire.open != 0:
        return True
    if wire.there < 0:
        return False
    if wire.answer != 0 or wire.confirm != 0 or wire.withdrawal == DUE:
        return True
    if wire.stop == UNTOLD and load_acquire(wire.ring + ABORT) != 0:
        return True
    if wire.producer == 0:
        return credit_due(wire, idle)
    return bool(wire.stop == UNTOLD and (wire.again != 0 or wire.entries >= 0 or begun(wire)))


@register_jitable
def seems_due(carrier: Any, rail: Any, idle: bool) -> bool:
    """Whether there seems to be a frame for a rail of a socket, as far as can be seen without the carrier's lock.

    The caller holds the rail's lock, so that no ring's memory is unmapped meanwhile.
    """
    if rail.pong != 0 or rail.ping != 0 or rail.asked != 0:
        return True
    link = link_at(load(carrier.links + 8 * rail.link))
    due = link.ask != 0 or link.failed_count > 0 or link.leave == 1
    for i in range(link.wire_count):
        due = due or _wire_seems_due(wire_at(load(carrier.wires + 8 * load(link.wires + 8 * i))), idle)
    return bool(due)


@register_jitable
def choose_frame(carrier: Any, rail: Any, rail_index: int, idle: bool) -> bool:
    """Let a rail send its next frame; False if there is none for it."""
    rail.declined = 0
    if rail.pong != 0:
        control(rail, _PONG, 0, rail.pong, 0)
        rail.pong = 0
        return True
    link = link_at(load(carrier.links + 8 * rail.link))
    if rail.ping != 0:
        if link.routes > 1 and rail.rdma == 0:
            look(rail)
        control(rail, _PING, 0, rail.ping, 0)
        rail.ping = 0
        return True
    if rail.asked != 0 and carrier.recorder != 0:
        send_tell(rail, carrier.recorder)
        return True
    if link.ask != 0:
        frame = control(rail, _ASK, 0, link.ask, 0)
        frame.slot, frame.lane, frame.wire, link.ask = link.wanted, link.topic, link.about, 0
        return True
    if link.failed_count > 0:
        send_failed(rail, link)
        return True
    count = link.wire_count
    for _ in range(count):
        place = load(link.wires + 8 * link.next)
        link.next = (link.next + 1) % count
        if _choose_of(carrier, rail, rail_index, link, wire_at(load(carrier.wires + 8 * place)), place, idle):
            return True
    if link.leave == 1 and (rail.rdma != 0 or link.rdma_rails == 0):
        link.leave = 2
        control(rail, _LEAVE, 0, 0, 0)
        return True
    return False
