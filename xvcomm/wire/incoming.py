"""Compiled code that handles the frames that come: what they change in rings, links and rails."""

from __future__ import annotations

from typing import Any

from xvcomm.jit.atomics import (
    compare_and_swap,
    copy_bytes,
    load,
    load_acquire,
    store,
    store_release,
)
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of
from xvcomm.memory.ring import ABORT, CONSUMED, LEDGER, Reason, may_go_from_array
from xvcomm.trace.contract import agree
from xvcomm.trace.format import HEAD_WORDS
from xvcomm.trace.recorder import extent, may_ask
from xvcomm.wire.counters import entry_of, head_of, tail_of
from xvcomm.wire.frames import ARRAY_WORDS, HEADER, MAX_DEVICES, OPEN_WORDS, Kind
from xvcomm.wire.locks import await_copy
from xvcomm.wire.records import (
    ANSWERS,
    ARRIVED,
    CONFIRMED,
    FAILURES,
    HEARD,
    KEPT_ANSWERS,
    KNOWN,
    NO,
    NOBODY,
    OF_LINK,
    PLACES,
    TELL_WORDS,
    TOLD,
    answer_at,
    failure_at,
    link_at,
    offer_at,
    rail_at,
    wire_at,
)
from xvcomm.wire.regions import begin_direct
from xvcomm.wire.shares import count_slot

_OPEN, _SLOT, _ENTRY, _CREDIT, _STOP, _STOPPED, _PING, _PONG, _LEAVE, _ASK, _TELL, _TAKEN, _FAILED, _, _ARRAY, _ = map(
    int, Kind
)
_may_go_from_array = register_jitable(may_go_from_array)
_FIRST_REASON, _LAST_REASON = int(min(Reason)), int(max(Reason))

PROTOCOL = -1000
"""Failure of a rail, beside those of `sockets`: the other side broke the protocol."""
REFUSED, NEWS = -2, 1
"""Results of handling a frame besides 0: it breaks the protocol; Python should look."""


@register_jitable
def _words(frame: Any) -> int:
    """Address of the payload of a frame in a rail's buffer."""
    return address_of(frame, "kind") + HEADER


@register_jitable
def _word(frame: Any, index: int) -> int:
    return load(_words(frame) + 8 * index)


@register_jitable
def _note_entry(wire: Any, frame: Any) -> bool:
    """Write the producer's description of a message into the ledger; False if it cannot be one of the next messages."""
    number = frame.entry.number
    consumed = load_acquire(wire.ring + CONSUMED)
    if number <= consumed:
        return True  # a repeated frame
    message, ring = frame.entry.message, wire.geometry
    if number > consumed + LEDGER or message.nbytes < 0:
        return False
    if _may_go_from_array(message.nbytes, ring.lanes * ring.slots * ring.slot_bytes):
        wire.waits = max(wire.waits, number)
    entry = entry_of(wire, number - 1, True)
    if entry.number != number:
        entry.message = frame.entry.message
        entry.offer, entry.took = 0, 0
        store_release(address_of(entry, "number"), number)
    while load(address_of(entry_of(wire, wire.message, True), "number")) == wire.message + 1:
        wire.message += 1
    return True


@register_jitable
def _publish_stop(wire: Any) -> None:
    """Publish the other side's abort word once everything that it had sent before has arrived."""
    if wire.word == 0 or wire.message < wire.goal:
        return
    if wire.producer == 0:
        for lane in range(wire.geometry.lanes):
            if load(head_of(wire, lane)) < wire.goals[lane]:
                return
    compare_and_swap(wire.ring + ABORT, 0, wire.word)
    wire.word, wire.answer, wire.stop = 0, 1, HEARD


@register_jitable
def _target(wire: Any, frame: Any, place: int) -> int:
    """Where the bytes of a slot go: into the consumer's array, once it has offered it, else into the ring; 0: outside of it."""
    lane, number, direct = frame.lane, frame.entry.number, wire.direct
    ours = entry_of(wire, number - 1, False)
    offered = load_acquire(address_of(ours, "number")) == number and ours.offer != 0
    takes = offered and agree(ours.message, entry_of(wire, number - 1, True).message)
    if takes and direct.message != number:
        begin_direct(wire, number)
    wire.begun[lane] = max(wire.begun[lane], frame.slot + 1)
    if takes and frame.slot >= direct.first[lane]:
        return ours.offer + frame.number if frame.number + frame.length <= ours.message.nbytes else 0
    return wire.slots + place * wire.geometry.slot_bytes


@register_jitable
def _begin_slot(carrier: Any, rail: Any, rail_index: int, wire: Any, frame: Any) -> bool:
    """Find the place of a slot that begins to arrive; False if it breaks the protocol."""
    ring, lane, number = wire.geometry, frame.lane, frame.slot
    if wire.producer != 0 or lane < 0 or lane >= ring.lanes or frame.length < 1 or frame.length > ring.slot_bytes:
        return False
    if wire.apart != 0 and rail.rdma == 0:
        return False  # only RDMA devices write to a GPU's memory
    if not _note_entry(wire, frame):
        return False
    head = load(head_of(wire, lane))
    rail.slot_left, rail.slot_data, rail.slot_wire = frame.length, 0, frame.wire % PLACES
    rail.slot_lane, rail.slot_number = lane, number
    rail.slot_message, rail.slot_bytes, rail.slot_attempt = frame.entry.number, frame.length, frame.attempt
    if number < head:
        return True
    if number - load_acquire(tail_of(wire, lane)) >= ring.slots:
        return False
    if frame.entry.number <= load_acquire(wire.ring + CONSUMED):
        return False  # all slots of such a message have arrived
    if frame.number < 0 or frame.number > frame.entry.message.nbytes - frame.length:
        return False
    if rail.slot_placed != 0 and frame.entry.number != wire.advertised:
        return False
    place = lane * ring.slots + number % ring.slots
    owner = load(wire.owners + 8 * place)
    if owner == ARRIVED:
        return True
    if owner != NOBODY and owner != 1 + rail_index:
        # Another rail still receives the same slot. The sender has closed the rail of the earlier attempt, whose bytes may end in
        # the middle of the slot: keep the later attempt, in whatever order the two begin to arrive.
        other = rail_at(load(carrier.rails + 8 * (owner - 1)))
        if frame.attempt < other.slot_attempt:
            return True
        await_copy(other)
        other.slot_data = 0
    store(wire.owners + 8 * place, 1 + rail_index)
    rail.slot_data = _target(wire, frame, place)
    if rail.slot_placed == 0:
        return rail.slot_data != 0
    if wire.direct.message != frame.entry.number:
        rail.slot_data = 0  # the message was given up
        return True
    return bool(rail.slot_data == entry_of(wire, frame.entry.number - 1, False).offer + frame.number)


@register_jitable
def end_slot(carrier: Any, rail: Any) -> None:
    """Publish a slot that has arrived, and those behind it that had arrived before."""
    wire = wire_at(load(carrier.wires + 8 * rail.slot_wire))
    if rail.slot_data == 0 or wire.ring == 0:
        return
    rail.slot_data = 0
    count_slot(wire, rail, rail.slot_message, rail.slot_bytes)
    ring, lane = wire.geometry, rail.slot_lane
    owners = wire.owners + 8 * lane * ring.slots
    store(owners + 8 * (rail.slot_number % ring.slots), ARRIVED)
    counter = head_of(wire, lane)
    head = first = load(counter)
    while load(owners + 8 * (head % ring.slots)) == ARRIVED:
        store(owners + 8 * (head % ring.slots), NOBODY)
        head += 1
    if head != first:
        store_release(counter, head)
    _publish_stop(wire)


@register_jitable
def _credit(wire: Any, frame: Any, messages: int) -> bool:
    """Take the consumer's counts over; they only grow, whatever the order in which frames arrive."""
    lanes = wire.geometry.lanes
    # `wire.message` may still be a message whose last slot was sent.
    if wire.producer == 0 or frame.length != 8 * lanes or messages > wire.message + 1:
        return False
    for lane in range(lanes):
        if _word(frame, lane) > wire.sent[lane]:
            return False
    for lane in range(lanes):
        if _word(frame, lane) > load(tail_of(wire, lane)):
            store_release(tail_of(wire, lane), _word(frame, lane))
    if messages > load(wire.ring + CONSUMED):
        store_release(wire.ring + CONSUMED, messages)
    return True


@register_jitable
def _hear_array(wire: Any, frame: Any) -> bool:
    """Note that an array was advertised, withdrawn, or is used no more; False if its message cannot be one of the next ones."""
    number, direct = frame.entry.number, wire.direct
    if wire.producer == 0:
        if number == wire.advertised and wire.withdrawal != NO:
            wire.withdrawal = CONFIRMED
        return bool(frame.length == 0 and number <= wire.advertised)
    # As with credits, `wire.message` may still be the message before.
    if number < 1 or number > wire.message + 2:
        return False
    if frame.length == 0:
        wire.withdrawn, wire.confirm = max(wire.withdrawn, number), 1
        if direct.message <= number:
            store_release(address_of(direct, "message"), 0)
        return True
    if frame.length != 8 * ARRAY_WORDS or _word(frame, 0) <= 0 or frame.entry.message.nbytes < 1:
        return False
    if number >= direct.message and number > wire.withdrawn:  # else it has come late, over another rail
        wire.array, wire.array_message = _word(frame, 0), frame.entry.message
        for device in range(MAX_DEVICES):
            wire.array_keys[device] = _word(frame, 1 + device)
        store_release(address_of(direct, "message"), number)
    return True


@register_jitable
def _stop(wire: Any, frame: Any) -> bool:
    """Take over the other side's abort word, and a consumer's counts first: it may leave before its credit for the last message
    arrives.
    """
    lanes = wire.geometry.lanes
    if not _FIRST_REASON <= frame.number & 0xFF <= _LAST_REASON or frame.length != 8 * lanes:
        return False
    if wire.producer != 0 and wire.shut == 0 and not _credit(wire, frame, frame.slot):
        return False
    if wire.word != 0:
        return True
    if wire.producer == 0:
        wire.goal = frame.entry.number
        for lane in range(lanes):
            wire.goals[lane] = _word(frame, lane)
    else:
        wire.goal = 0
        if frame.entry.number > 0:
            entry = entry_of(wire, frame.entry.number - 1, False)
            entry.message = frame.entry.message
            store_release(address_of(entry, "number"), frame.entry.number)
    wire.word = frame.number
    _publish_stop(wire)
    return True


@register_jitable
def _keep_offer(link: Any, frame: Any) -> int:
    """Keep for Python a ring that the other side has opened. One in a place that has another ring by now is not needed."""
    if frame.slot < 0:
        return REFUSED
    index = 0
    while index < link.offer_count and offer_at(link.offers, index).there % PLACES != frame.slot % PLACES:
        index += 1
    if index == OF_LINK:
        return REFUSED  # it has not so many places
    offer = offer_at(link.offers, index)
    if index == link.offer_count:
        link.offer_count += 1
    elif frame.slot < offer.there:
        return 0  # it has come late, over another rail
    offer.name, offer.there = frame.number, frame.slot
    copy_bytes(address_of(offer, "words"), _words(frame), frame.length)
    return NEWS


@register_jitable
def _open(carrier: Any, rail: Any, frame: Any) -> int:
    """Remember the other side's number of a wire that this side has opened as well; else let Python handle it."""
    if frame.length != 8 * OPEN_WORDS:
        return REFUSED
    link = link_at(load(carrier.links + 8 * rail.link))
    for i in range(link.wire_count):
        wire = wire_at(load(carrier.wires + 8 * load(link.wires + 8 * i)))
        if wire.ring != 0 and wire.name == frame.number:
            ring = wire.geometry
            if _word(frame, 0) != ring.lanes or _word(frame, 1) != ring.slots or _word(frame, 2) != ring.slot_bytes:
                return REFUSED
            wire.there, wire.apart_there, wire.slots_there = frame.slot, _word(frame, 6), _word(frame, 7)
            for device in range(MAX_DEVICES):
                wire.keys_there[device] = _word(frame, 8 + device)
            if frame.wire != 0 and wire.open != 2:
                wire.open = 1
            elif frame.wire == 0:
                wire.open = 0
            return 0
    return _keep_offer(link, frame)


@register_jitable
def _asked(carrier: Any, rail: Any, frame: Any) -> int:
    """Remember what to tell; a newer question replaces one that is not answered yet."""
    if frame.number == 0 or frame.slot < 1 or frame.slot > ANSWERS:
        return REFUSED
    if carrier.recorder != 0:
        if not may_ask(carrier.recorder, frame.lane, frame.wire):
            return REFUSED
        rail.asked, rail.topic, rail.about, rail.wanted = frame.number, frame.lane, frame.wire, frame.slot
        rail.first, rail.last = extent(carrier.recorder, frame.lane, frame.wire, frame.slot)
    return 0


@register_jitable
def _told(carrier: Any, frame: Any) -> int:
    """Keep an answer for Python."""
    words = frame.length // 8
    if frame.length != 8 * words or (words != HEAD_WORDS and words != TELL_WORDS):
        return REFUSED
    if carrier.answer_count < KEPT_ANSWERS:
        answer = answer_at(carrier.answers, carrier.answer_count)
        answer.number, answer.following, answer.words = frame.number, frame.slot, words
        copy_bytes(address_of(answer, "payload"), _words(frame), frame.length)
        carrier.answer_count += 1
    return NEWS


@register_jitable
def _failed(carrier: Any, rail: Any, frame: Any) -> int:
    """Keep for Python that a queue pair at the other end has failed."""
    if carrier.failure_count < FAILURES:
        failure = failure_at(carrier.failures, carrier.failure_count)
        failure.link, failure.pair, failure.peer, failure.answer = rail.link, frame.number, frame.slot, frame.lane
        carrier.failure_count += 1
    return NEWS


@register_jitable
def handle(carrier: Any, rail: Any, rail_index: int, frame: Any) -> int:
    """Handle a frame, of a SLOT its header; 0, NEWS or REFUSED."""
    kind = frame.kind
    if kind == _PING:
        rail.pong = frame.number
        return 0
    if kind == _PONG:
        rail.answered = frame.number
        return 0
    if kind == _LEAVE:
        link_at(load(carrier.links + 8 * rail.link)).left = 1
        return NEWS
    if kind == _OPEN:
        return _open(carrier, rail, frame)
    if kind == _ASK:
        return _asked(carrier, rail, frame)
    if kind == _TELL:
        return _told(carrier, frame)
    if kind == _TAKEN:
        return 0
    if kind == _FAILED:
        return _failed(carrier, rail, frame)
    place = frame.wire % PLACES
    if frame.wire < 0 or place >= carrier.wire_count:
        return REFUSED
    wire = wire_at(load(carrier.wires + 8 * place))
    if wire.link != rail.link or frame.wire > wire.number:
        return REFUSED
    closed = wire.ring == 0 or frame.wire != wire.number
    if closed or (wire.shut != 0 and kind != _STOP and kind != _STOPPED):
        if kind == _SLOT:
            if frame.length < 1 or frame.length > wire.most:
                return REFUSED
            rail.slot_left, rail.slot_data, rail.slot_wire = frame.length, 0, place
        return 0
    if kind == _SLOT:
        return 0 if _begin_slot(carrier, rail, rail_index, wire, frame) else REFUSED
    if kind == _ENTRY:
        good = wire.producer == 0 and _note_entry(wire, frame)
        if good:
            _publish_stop(wire)
        return 0 if good else REFUSED
    if kind == _CREDIT:
        return 0 if _credit(wire, frame, frame.number) else REFUSED
    if kind == _ARRAY:
        return 0 if _hear_array(wire, frame) else REFUSED
    if kind == _STOP:
        return NEWS if _stop(wire, frame) else REFUSED
    if kind == _STOPPED:
        if wire.stop == TOLD:
            wire.stop = KNOWN
        return NEWS
    return REFUSED
