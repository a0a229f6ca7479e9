"""The ring's layout, how messages are split, and the contents of the ledger."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xvcomm.errors import ResourceError
from xvcomm.memory import ring
from xvcomm.memory.ring import (
    ABORT,
    ALIGN,
    CONSUMED,
    COUNTERS,
    ENTRY,
    LEAST_APART_CHUNK,
    LEAST_CHUNK,
    LEAST_WIRE_CHUNK,
    LEDGER,
    LEDGER_ENTRY,
    LINE,
    Message,
    Reason,
    RingEnd,
    RingLayout,
    chunk_bytes,
    header,
    lanes_used,
    part_bytes,
)
from xvcomm.memory.segment import PAGE, Segment
from xvcomm.types.dtype import BY_NAME
from xvcomm.types.opcode import OpCode

layouts = st.builds(
    RingLayout, st.integers(1, 64), st.integers(2, 16), st.integers(1, 64).map(lambda pages: pages * 4096),
    wired=st.booleans(),
)  # fmt: skip
LEAST = (LEAST_CHUNK, LEAST_APART_CHUNK, LEAST_WIRE_CHUNK)


def lane_parts(nbytes: int, lanes: int, slot_bytes: int, least: int) -> tuple[tuple[int, int], ...]:
    """How movers cut a message: (first byte, one past the last) for each lane that carries a part, in order."""
    used = lanes_used(nbytes, lanes, chunk_bytes(nbytes, lanes, slot_bytes, least))
    part = part_bytes(nbytes, used)
    return tuple((lane * part, min(nbytes, (lane + 1) * part)) for lane in range(used) if lane * part < nbytes)


@given(layouts)
def test_nothing_overlaps(layout: RingLayout) -> None:
    counters = [place for lane in range(layout.lanes) for place in (layout.head(lane), layout.tail(lane))]
    lines = [0, ABORT, CONSUMED, *counters]
    assert len({place // LINE for place in lines}) == len(lines), "two words share a line"
    assert all(place % LINE == 0 for place in lines)
    assert COUNTERS == PAGE == min(counters)
    assert max(counters) + LINE <= layout.ledger
    assert layout.ledger + 2 * LEDGER * ENTRY <= layout.data and LEDGER_ENTRY.itemsize == ENTRY
    assert layout.data % PAGE == layout.ledger % PAGE == 0
    assert layout.size == layout.data + layout.lanes * layout.slots * layout.slot_bytes


@given(
    st.integers(0, 1 << 26), st.integers(1, 64), st.integers(1, 256).map(lambda pages: pages * 4096), st.sampled_from(LEAST)
)  # fmt: skip
def test_parts_cover_a_message(nbytes: int, lanes: int, slot_bytes: int, least: int) -> None:
    parts = lane_parts(nbytes, lanes, slot_bytes, least)
    assert [low for low, _ in parts] == [0, *(high for _, high in parts[:-1])] if parts else nbytes == 0
    assert sum(high - low for low, high in parts) == nbytes
    assert all(high > low and low % ALIGN == 0 for low, high in parts)
    assert len(parts) <= lanes
    chunk = chunk_bytes(nbytes, lanes, slot_bytes, least)
    assert 0 < chunk <= slot_bytes
    if nbytes <= chunk:
        assert len(parts) <= 1
    elif parts:
        # No lane carries more than its fair share and what alignment adds, nor are lanes used for crumbs.
        assert max(high - low for low, high in parts) <= -(-nbytes // len(parts)) + ALIGN * len(parts)
        assert len(parts) <= -(-nbytes // chunk)


@given(layouts, st.data())
def test_an_empty_ring_buffers_messages_up_to_at_once(layout: RingLayout, data: st.DataObject) -> None:
    messages = data.draw(st.integers(1, layout.slots))
    most = layout.at_once(messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, most), min_size=messages - 1, max_size=messages - 1)))
    slots = [0] * layout.lanes
    for low, high in pairwise([0, *cuts, most]):
        shape = layout.lanes, layout.slot_bytes, layout.least_chunk
        chunk = chunk_bytes(high - low, *shape)
        for lane, (begin, end) in enumerate(lane_parts(high - low, *shape)):
            slots[lane] += -(-(end - begin) // chunk)
    assert max(slots) <= layout.slots
    assert layout.at_once(layout.slots + 1) == 0


@given(layouts)
def test_smaller_rings_have_as_many_lanes_and_take_a_message_in_pieces(layout: RingLayout) -> None:
    shapes = [layout]
    while (smaller := shapes[-1].smaller()) is not None:
        shapes.append(smaller)
    for one, following in pairwise(shapes):
        assert following.lanes == one.lanes and following.size < one.size
        assert following.slot_bytes >= min(one.slot_bytes, LEAST_CHUNK) and following.slots >= min(one.slots, 4)
        assert following.slot_bytes % PAGE == 0
    assert shapes[-1].capacity <= layout.lanes * 4 * LEAST_CHUNK


def test_fixed_rings_are_not_made_smaller() -> None:
    assert RingLayout(1, 96, 16384, fixed=True).smaller() is None
    assert RingLayout(16, 4, 256 << 10, apart=True).smaller() is None
    assert RingLayout(1, 96, 16384).smaller() == RingLayout(1, 48, 16384)
    assert RingLayout(8, 4, 256 << 10).smaller() == RingLayout(8, 4, 128 << 10)


def test_examples_of_cuts() -> None:
    assert lane_parts(0, 4, 4096, LEAST_CHUNK) == ()
    assert lane_parts(4096, 4, 4096, LEAST_CHUNK) == ((0, 4096),)
    assert lane_parts(4097, 4, 4096, LEAST_CHUNK) == ((0, 2064), (2064, 4097))
    assert lane_parts(16384, 4, 1 << 20, LEAST_CHUNK) == ((0, 16384),)
    assert lane_parts(100_000, 3, 4096, LEAST_CHUNK) == ((0, 33_344), (33_344, 66_688), (66_688, 100_000))


@pytest.fixture
def ends() -> Iterator[tuple[RingEnd, RingEnd]]:
    """Both ends of a ring in this process."""
    layout = RingLayout(2, 4, 4096)
    made = Segment.create("/dev/shm", "test_ring", layout.size)
    producer = RingEnd.create(made, layout, peer=5, producer=True)
    consumer = RingEnd.open(Segment.attach("/dev/shm", made.name), peer=3, producer=False)
    yield producer, consumer
    made.unlink()
    producer.close()
    consumer.close()


def post(end: RingEnd, sequence: int, message: Message) -> None:
    """Write what a mover writes."""
    offset = end.layout.ledger + ((0 if end.producer else LEDGER) + sequence % LEDGER) * ENTRY
    (ctypes.c_int64 * 6).from_address(end.address + offset)[:] = [sequence + 1, *message]


MESSAGE = Message(OpCode.SEND, BY_NAME["float32"].code, 4096, 7)


def test_the_opener_takes_the_makers_layout(ends: tuple[RingEnd, RingEnd]) -> None:
    producer, consumer = ends
    assert consumer.layout == producer.layout == RingLayout(2, 4, 4096)
    assert producer.address != consumer.address
    assert (consumer.peer, consumer.producer, consumer.sequence) == (3, False, 0)


@pytest.mark.parametrize(("word", "value"), [(0, 1), (1, 99)])
def test_other_rings_are_refused(word: int, value: int) -> None:
    layout = RingLayout(2, 4, 4096)
    segment = Segment.create("/dev/shm", "test_ring", layout.size)
    producer = RingEnd.create(segment, layout, peer=5, producer=True)
    (ctypes.c_int64 * 2).from_address(producer.address)[word] = value
    with pytest.raises(ResourceError, match="rank 9 offers ring protocol"):
        RingEnd.open(segment, peer=9, producer=False)
    segment.unlink()
    producer.close()


def test_the_first_abort_stays(ends: tuple[RingEnd, RingEnd]) -> None:
    producer, consumer = ends
    assert producer.abort_word() == consumer.abort_word() == 0
    consumer.abort(Reason.PEER_LOST.word(70_000))
    producer.abort(Reason.ABORTED.word(1))
    assert Reason.parse(producer.abort_word()) == (Reason.PEER_LOST, 70_000)
    producer.close()
    producer.abort(1)
    assert producer.abort_word() == 0
    assert consumer.abort_word() != 0


def test_mismatches(ends: tuple[RingEnd, RingEnd]) -> None:
    producer, consumer = ends
    other = MESSAGE._replace(nbytes=8192, dtype=BY_NAME["bfloat16"].code)
    for sequence in range(70):
        post(producer, sequence, MESSAGE)
        post(consumer, sequence, MESSAGE if sequence != 69 else other)
    producer.sequence = consumer.sequence = 70
    assert producer.mismatch() == (MESSAGE, other)
    assert consumer.mismatch() == (other, MESSAGE)
    post(consumer, 69, MESSAGE)
    assert producer.mismatch() is None
    producer.close()
    assert producer.mismatch() is None


def test_words_of_a_message_that_was_given_up_are_no_mismatch(ends: tuple[RingEnd, RingEnd]) -> None:
    producer, consumer = ends
    first_entry = (ctypes.c_int64 * 6).from_address(producer.address + producer.layout.ledger)
    first_entry[1:] = MESSAGE  # no number: it is not valid yet
    assert producer.mismatch() is None and consumer.mismatch() is None
    for sequence in range(LEDGER):
        post(producer, sequence, MESSAGE)
        post(consumer, sequence, MESSAGE)
    ctypes.c_int64.from_address(consumer.address + CONSUMED).value = LEDGER
    first_entry[1:] = MESSAGE._replace(nbytes=8)
    assert producer.mismatch() is None and consumer.mismatch() is None


def test_messages_as_text() -> None:
    assert MESSAGE.describe() == "1024 x float32, tag 7"
    assert Message(OpCode.SEND, 99, 10, 0).describe() == "10 bytes of dtype 99, tag 0"


def test_the_header_for_kernels_has_the_same_numbers() -> None:
    found = dict(re.findall(r"^constexpr long long XV_(\w+) = (\d+);$", header(), re.MULTILINE))
    assert int(found.pop("MISMATCH")) == Reason.MISMATCH
    assert {name: int(value) for name, value in found.items()} == {name: getattr(ring, name) for name in found}
    assert {"ABORT", "CONSUMED", "TURNS", "COUNTERS", "LINE", "LEDGER", "ENTRY", "ALIGN"} <= set(found)
