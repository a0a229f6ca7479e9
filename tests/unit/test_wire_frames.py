"""The carrier's parser of frames: whatever bytes arrive, it writes only into the ring and the array."""

import contextlib
import ctypes
import functools
import mmap
import operator
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xvcomm.memory.ring import (
    LEDGER,
    LEDGER_ENTRY,
    PAGE,
    Reason,
    RingEnd,
    RingLayout,
    chunk_bytes,
    lanes_used,
    part_bytes,
)
from xvcomm.types.opcode import OpCode
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.frames import FRAME, HEADER, MAX_DEVICES, Kind
from xvcomm.wire.progress import progress_address
from xvcomm.wire.records import PLACES, UP
from xvcomm.wire.wires import WireEnd

LAYOUT = RingLayout(lanes=2, slots=4, slot_bytes=PAGE, wired=True)
ARRAY_BYTES = 9000
MARGIN, CANARY = 64 * PAGE, 0xA5
FIELDS = [(name,) for name in FRAME.names if name != "entry"]
ENTRY_FIELDS = [("entry", "number"), *(("entry", "message", name) for name in LEDGER_ENTRY["message"].names)]
CONSUMER, PRODUCER, FOREIGN, CLOSED = range(4)
GROUP = 8
TOLD = (
    "there",
    "producer",
    "open",
    "stop",
    "answer",
    "word",
    "goal",
    "waits",
    "message",
    "credited",
    "again",
    "entries",
)

progress = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(progress_address)


class Memory:
    """Memory with canaries before and behind it; stands in for a `Segment`."""

    def __init__(self, size):
        self.size = size
        self._all = np.frombuffer(mmap.mmap(-1, 2 * MARGIN + size), np.uint8)
        self.bytes = self._all[MARGIN : MARGIN + size]
        self.address = self.bytes.ctypes.data
        self._around = self._all[:MARGIN], self._all[MARGIN + size :]
        for part in self._around:
            part[:] = CANARY

    def check(self):
        for part in self._around:
            assert (part == CANARY).all()


class Receiver:
    """A carrier with four wires, one of another link and one closed, and the other end of a rail."""

    def __init__(self):
        self.carrier = Carrier(0, 1)
        self.rings = [Memory(LAYOUT.size) for _ in range(4)]
        self.array = Memory(ARRAY_BYTES)
        links = [self.carrier.add_link() for _ in range(2)]
        self.ends = [
            RingEnd.create(ring, LAYOUT, peer=1, producer=index == PRODUCER) for index, ring in enumerate(self.rings)
        ]
        self.wires = [self.add(links[index == FOREIGN], 100 + index, end) for index, end in enumerate(self.ends)]
        self.carrier.detach(self.wires[CLOSED])
        offered = self.ledger(CONSUMER)[LEDGER]
        offered["message"], offered["offer"], offered["number"] = message(ARRAY_BYTES), self.array.address, 1
        self._theirs, self._ours = socket.socketpair()
        self._ours.setblocking(False)
        self.rail = self.carrier.rails[self.carrier.add_rail(links[0], 1, 1, self._ours)]
        self._fed = 0

    def add(self, link, name, end):
        wire = WireEnd(link, name, GROUP, end, None, None)
        self.carrier.add_wire(wire)
        return wire

    def ledger(self, index):
        return self.rings[index].bytes[LAYOUT.ledger :][: 2 * LEDGER * LEDGER_ENTRY.itemsize].view(LEDGER_ENTRY)

    def feed(self, data):
        """Send these bytes; returns when they are received, or the rail is lost."""
        while data and self.rail.state == UP:
            with contextlib.suppress(BlockingIOError):
                sent = self._theirs.send(data[: 64 << 10], socket.MSG_DONTWAIT)
                self._fed, data = self._fed + sent, data[sent:]
            while self.rail.state == UP and self.rail.received < self._fed:
                progress(self.carrier.address, 0, 0)
            with contextlib.suppress(BlockingIOError):
                self._theirs.recv(1 << 20, socket.MSG_DONTWAIT)

    def state(self):
        """All that the frames have changed."""
        self.ledger(CONSUMER)[LEDGER]["offer"] = 0
        words = [[getattr(wire.record, name) for name in TOLD] for wire in self.wires]
        lanes = [[*wire.record.begun, *wire.record.sent, *wire.record.goals] for wire in self.wires]
        parser = [getattr(self.rail, name) for name in ("state", "slot_left", "begin", "end")]
        return words, lanes, parser, [ring.bytes.tobytes() for ring in self.rings], self.array.bytes.tobytes()

    def check(self):
        """Nothing outside of rings and array was written, and their counters are sound."""
        for memory in (*self.rings, self.array):
            memory.check()
        for end in self.ends:
            for lane in range(LAYOUT.lanes):
                head, tail = (
                    ctypes.c_int64.from_address(end.address + place(lane)).value for place in (LAYOUT.head, LAYOUT.tail)
                )
                assert 0 <= tail <= head <= tail + LAYOUT.slots

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for wire in self.wires:
            self.carrier.detach(wire)
        self.carrier.close()
        self._theirs.close()
        self._ours.close()


def message(nbytes):
    return int(OpCode.SEND), 0, nbytes, 7, 0


def frame(kind, wire, lane=0, slot=0, number=0, payload=b"", entry=(0, (0,) * 5)):
    """A frame as (header, payload); of the lane the lower 32 bits."""
    lane = int(np.int64(lane).astype(np.int32))
    return np.array((kind, wire, lane, 0, slot, number, len(payload), entry), FRAME), payload


def words(*values):
    return np.array(values, np.int64).tobytes()


UNREGISTERED = words(*[0] * (3 + MAX_DEVICES))
"""The end of an OPEN of host memory to which no RDMA device may write."""


def frames_of(sizes):
    """The frames of messages, as a sender's carrier makes them, and among them some of every other kind but LEAVE."""
    shape = words(LAYOUT.lanes, LAYOUT.slots, LAYOUT.slot_bytes)
    found = [
        frame(
            Kind.OPEN,
            1,
            slot=5 + index,
            number=100 + index,
            payload=shape + words(index == CONSUMER, GROUP) + UNREGISTERED,
        )
        for index in range(2)
    ]
    other = shape + words(1, GROUP) + UNREGISTERED
    found.append(frame(Kind.OPEN, 0, slot=9, number=77, payload=other))  # an offer of another ring
    numbers = [0] * LAYOUT.lanes
    for index, nbytes in enumerate(sizes):
        entry = index + 1, message(nbytes)
        chunk = chunk_bytes(nbytes, LAYOUT.lanes, LAYOUT.slot_bytes, LAYOUT.least_chunk)
        used = lanes_used(nbytes, LAYOUT.lanes, chunk)
        part = part_bytes(nbytes, used)
        slots = []
        for lane in range(used):
            for offset in range(lane * part, min(nbytes, (lane + 1) * part), chunk):
                length = min(chunk, min(nbytes, (lane + 1) * part) - offset)
                content = np.arange(offset, offset + length, dtype=np.uint32).astype(np.uint8) ^ index
                slots.append(frame(Kind.SLOT, CONSUMER, lane, numbers[lane], offset, content.tobytes(), entry))
                numbers[lane] += 1
        if max(numbers) > LAYOUT.slots:
            break
        found += slots or [frame(Kind.ENTRY, CONSUMER, entry=entry)]
        found.append(frame(Kind.PING, 0, number=1 + index))
    found.append(frame(Kind.CREDIT, PRODUCER, payload=words(0, 0)))
    found.append(frame(Kind.ARRAY, PRODUCER, payload=words(PAGE, *range(MAX_DEVICES)), entry=(1, message(9))))
    found.append(frame(Kind.ARRAY, PRODUCER, entry=(1, message(0))))
    found.append(frame(Kind.SLOT, CLOSED, payload=b"late", entry=(1, message(4))))
    found.append(frame(Kind.ASK, 0, slot=3, number=1))
    found.append(frame(Kind.TELL, 0, number=1, payload=words(3, 9)))
    found.append(frame(Kind.STOP, PRODUCER, number=Reason.LEFT.word(1), payload=words(0, 0)))
    found.append(frame(Kind.STOPPED, PRODUCER))
    found.append(frame(Kind.PONG, 0, number=1))
    return found


def encode(frames):
    return b"".join(header.tobytes() + payload for header, payload in frames)


def cut(data, places):
    """Pieces of some bytes that begin at these places."""
    places = sorted({place % (len(data) + 1) for place in places} | {0})
    return [data[begin:end] for begin, end in zip(places, [*places[1:], len(data)], strict=True)]


def run(*pieces):
    with Receiver() as receiver:
        for piece in pieces:
            receiver.feed(piece)
        receiver.check()
        return receiver.state()


SIZES = st.lists(st.integers(0, ARRAY_BYTES), max_size=4).map(lambda more: [ARRAY_BYTES, *more])
CUTS = st.lists(st.integers(0, 1 << 16), max_size=20)
LAST = (1 << 63) - 1
EDGES = [-LAST - 1, -(1 << 62), -1, *range(6), 63, 64, 65, PAGE - 1, PAGE, PAGE + 1, 1 << 31, 1 << 62, LAST]
ODD = st.sampled_from(EDGES) | st.integers(-LAST - 1, LAST)
CHANGE = st.tuples(st.integers(0, 40), st.sampled_from([*FIELDS, *ENTRY_FIELDS]), ODD)


@settings(max_examples=60, deadline=None)
@given(SIZES, CUTS)
def test_chunks(sizes, cuts):
    """However the bytes of good frames arrive, they are the same frames."""
    data = encode(frames_of(sizes))
    whole = run(data)
    assert whole[2] == [UP, 0, 0, 0]
    assert whole[4] == bytes(i & 255 for i in range(ARRAY_BYTES))
    assert run(*cut(data, cuts)) == whole


@settings(max_examples=200, deadline=None)
@given(SIZES, st.lists(CHANGE, min_size=1, max_size=4), st.lists(st.integers(0, 40), max_size=3), CUTS)
def test_changed_frames(sizes, changes, repeated, cuts):
    """Frames with wrong numbers, twice and in the wrong order."""
    frames = frames_of(sizes)
    for which, field, value in changes:
        *outer, last = field
        place = functools.reduce(operator.getitem, outer, frames[which % len(frames)][0])
        place[last] = np.int64(value).astype(place.dtype[last])
    frames += [frames[which % len(frames)] for which in repeated]
    run(*cut(encode(frames), cuts))


@settings(max_examples=60, deadline=None)
@given(SIZES, st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(1, 255)), min_size=1, max_size=8), CUTS)
def test_changed_bytes(sizes, changes, cuts):
    data = bytearray(encode(frames_of(sizes)))
    for place, bits in changes:
        data[place % len(data)] ^= bits
    run(*cut(bytes(data), cuts))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-1, 13), st.integers(-1, 5), ODD, ODD, ODD, ODD, st.binary(max_size=600)), max_size=8
    ),
    CUTS,
)
def test_invented_frames(rows, cuts):
    """Any kind with any numbers."""
    frames = [frame(*numbers, payload, (entry, message(PAGE))) for *numbers, entry, payload in rows]
    run(*cut(encode(frames), cuts))


@given(st.binary(min_size=1, max_size=3 * HEADER))
@settings(max_examples=40, deadline=None)
def test_random_bytes(data):
    run(data)


@pytest.mark.parametrize(
    "wrong",
    [
        frame(99, CONSUMER),
        frame(Kind.PING, 0, payload=bytes(513)),
        frame(Kind.SLOT, FOREIGN, payload=b"x", entry=(1, message(1))),
        frame(Kind.SLOT, PRODUCER, payload=b"x", entry=(1, message(1))),
        frame(Kind.SLOT, 4, payload=b"x", entry=(1, message(1))),
        frame(Kind.SLOT, CLOSED, payload=bytes(PAGE + 1), entry=(1, message(PAGE + 1))),
        frame(Kind.SLOT, CONSUMER, payload=bytes(PAGE + 1), entry=(1, message(ARRAY_BYTES))),
        frame(Kind.SLOT, CONSUMER, lane=2, payload=b"x", entry=(1, message(ARRAY_BYTES))),
        frame(Kind.SLOT, CONSUMER, slot=4, payload=b"x", entry=(1, message(ARRAY_BYTES))),
        frame(Kind.SLOT, CONSUMER, number=LAST, payload=b"x", entry=(1, message(ARRAY_BYTES))),
        frame(Kind.SLOT, CONSUMER, payload=b"x", entry=(0, message(ARRAY_BYTES))),
        frame(Kind.SLOT, CONSUMER, payload=b"x", entry=(1 + LEDGER, message(1))),
        frame(Kind.CREDIT, PRODUCER, payload=words(1, 0)),
        frame(Kind.CREDIT, PRODUCER, number=9, payload=words(0, 0)),
        frame(Kind.STOP, PRODUCER, number=0xFF, payload=words(0, 0)),
        frame(Kind.STOP, PRODUCER, number=Reason.LEFT.word(1)),
        frame(Kind.STOP, PRODUCER, number=Reason.LEFT.word(1), payload=words(1, 0)),
        frame(Kind.STOP, PRODUCER, number=Reason.LEFT.word(1), slot=9, payload=words(0, 0)),
        frame(Kind.OPEN, 1, number=100, payload=words(2, 4, PAGE * 2, 1, GROUP) + UNREGISTERED),
        frame(Kind.TELL, 0, payload=words(1)),
        frame(Kind.ARRAY, CONSUMER, payload=words(PAGE, *range(MAX_DEVICES)), entry=(1, message(9))),
        frame(Kind.ARRAY, PRODUCER, payload=words(PAGE), entry=(1, message(9))),
        frame(Kind.ARRAY, PRODUCER, payload=words(0, *range(MAX_DEVICES)), entry=(1, message(9))),
        frame(Kind.ARRAY, PRODUCER, payload=words(PAGE, *range(MAX_DEVICES)), entry=(1, message(0))),
        frame(Kind.ARRAY, PRODUCER, payload=words(PAGE, *range(MAX_DEVICES)), entry=(3, message(9))),
        frame(Kind.ARRAY, PRODUCER, payload=words(PAGE, *range(MAX_DEVICES)), entry=(0, message(9))),
        frame(Kind.ARRAY, PRODUCER, entry=(3, message(0))),
        frame(Kind.ARRAY, CONSUMER, entry=(1, message(0))),
        frame(Kind.PLACED, CONSUMER, number=0, entry=(1, message(8))),
        frame(Kind.WRITTEN, CONSUMER, number=0, entry=(1, message(8))),
        frame(Kind.ASK, 0, number=1, slot=129),
    ],
    ids=lambda wrong: str(wrong[0]["kind"]),
)
def test_refused(wrong):
    """What no sender may send costs the rail, and changes nothing."""
    before = run()
    after = run(encode([wrong]))
    assert after[2][0] != UP and after[3][1:] == before[3][1:] and after[4] == before[4]


def test_a_slot_beyond_the_array():
    """Its message is longer than the array that was offered for it, which a frame before had right."""
    first = frame(Kind.SLOT, CONSUMER, 0, 0, 0, bytes(100), (1, message(ARRAY_BYTES)))
    wrong = frame(Kind.SLOT, CONSUMER, 0, 1, ARRAY_BYTES, bytes(100), (1, message(1 << 20)))
    assert run(encode([first, wrong]))[2][0] != UP


def test_an_array_that_is_withdrawn_before_it_is_advertised():
    """The frames have come over different rails: the later one counts, and so does that of the next message."""
    with Receiver() as receiver:
        known = receiver.wires[PRODUCER].record.direct
        keys = words(PAGE, *range(MAX_DEVICES))
        for number, payload, told in ((1, b"", 0), (1, keys, 0), (2, keys, 2), (1, b"", 2), (2, b"", 0), (2, keys, 0)):
            receiver.feed(encode([frame(Kind.ARRAY, PRODUCER, payload=payload, entry=(number, message(9)))]))
            assert receiver.rail.state == UP and known.message == told


def test_frames_for_an_earlier_ring_in_the_place():
    """They change nothing of the ring that has its place now, whose number is another one; a number to come is refused."""
    with Receiver() as receiver:
        memory = Memory(LAYOUT.size)
        end = RingEnd.create(memory, LAYOUT, peer=1, producer=False)
        later = receiver.add(receiver.wires[CLOSED].link, 200, end)
        assert later.record.number == CLOSED + PLACES
        blank = memory.bytes.tobytes()
        late = [frame(Kind.SLOT, CLOSED, payload=b"late", entry=(1, message(4)))]
        late += [frame(kind, CLOSED, number=Reason.LEFT.word(1)) for kind in (Kind.STOP, Kind.ENTRY, Kind.CREDIT)]
        receiver.feed(encode(late))
        assert receiver.rail.state == UP and memory.bytes.tobytes() == blank
        receiver.feed(encode([frame(Kind.SLOT, CLOSED + PLACES, payload=b"good", entry=(1, message(4)))]))
        assert receiver.rail.state == UP and memory.bytes[LAYOUT.data :][:4].tobytes() == b"good"
        receiver.feed(encode([frame(Kind.SLOT, CLOSED + 2 * PLACES, payload=b"x", entry=(1, message(1)))]))
        assert receiver.rail.state != UP
        receiver.carrier.detach(later)
