"""Probes of rings: results, fairness, what ends a probe, and probes beside threads that transfer messages."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from xvcomm.abc.device import RingStopped
from xvcomm.backends.host.device import HostDevice
from xvcomm.config import Config
from xvcomm.engine.probe import Probe, Sources
from xvcomm.memory.ring import ABORT, CONSUMED, LEDGER, Message, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import BY_NAME, INT64, UINT8
from xvcomm.types.opcode import OpCode

ONCE = -1
MILLISECOND = 1_000_000
DEVICE = HostDevice(Config())
Pair = tuple[RingEnd, RingEnd]


@pytest.fixture
def rings() -> Iterator[Callable[[int], list[Pair]]]:
    """Creates rings from ranks 1, 2, ... to rank 0; returns producer and consumer ends."""
    made: list[Pair] = []
    layout = RingLayout(1, 8, 4096)

    def make(count: int) -> list[Pair]:
        for rank in range(1, count + 1):
            segment = Segment.create(Config().shm_dir, "probing", layout.size)
            producer = RingEnd.create(segment, layout, peer=0, producer=True)
            consumer = RingEnd.open(Segment.attach(Config().shm_dir, segment.name), peer=rank, producer=False)
            segment.unlink()
            made.append((producer, consumer))
        return made

    yield make
    for pair in made:
        for end in pair:
            end.close()


def move(end: RingEnd, nbytes: int, tag: int, dtype: str = "uint8", wait: bool = True) -> object:
    """Send or receive a message, or only enqueue it."""
    stream = DEVICE.streams(1)[0]
    stream.deadline = Deadline.after(20)
    data = np.zeros(max(1, nbytes), np.uint8)
    start = DEVICE.put if end.producer else DEVICE.get
    start(end, data.ctypes.data, Message(OpCode.SEND, BY_NAME[dtype].code, nbytes, tag), stream)
    if wait:
        stream.synchronize()
    return stream, data


def test_describes_what_is_next(rings: Callable[[int], list[Pair]]) -> None:
    ((source, sink),) = rings(1)
    sources = Sources([sink], 20.0)
    assert sources.look(ONCE) is None
    move(source, 24, 9, "int64")
    move(source, 0, (1 << 62) - 1)
    for _ in range(3):
        assert sources.look(ONCE) == Probe(1, 9, 24, INT64)
    move(sink, 24, 9, "int64")
    assert sources.look(ONCE) == Probe(1, (1 << 62) - 1, 0, UINT8)
    move(sink, 0, (1 << 62) - 1)
    assert sources.look(ONCE) is None


def test_messages_for_posted_receives_are_skipped(rings: Callable[[int], list[Pair]]) -> None:
    ((source, sink),) = rings(1)
    sources = Sources([sink], 20.0)
    posted = [move(sink, 10, tag, wait=False) for tag in (1, 2)]
    for tag in (1, 2):
        move(source, 10, tag)
        assert sources.look(ONCE) is None
    move(source, 11, 3)
    assert sources.look(ONCE) == Probe(1, 3, 11, UINT8)
    for stream, _ in posted:
        stream.synchronize()
    assert sources.look(ONCE) == Probe(1, 3, 11, UINT8)


def test_messages_received_by_a_graph_are_counted(rings: Callable[[int], list[Pair]]) -> None:
    """Receives in a graph consume numbers that the host does not count; the ring states how many are complete."""
    ((source, sink),) = rings(1)
    for tag in range(3):
        move(source, 8, tag)
    ctypes.c_int64.from_address(sink.address + CONSUMED).value = 2
    assert Sources([sink], 20.0).look(ONCE) == Probe(1, 2, 8, UINT8)


def test_old_entries_are_not_found_again(rings: Callable[[int], list[Pair]]) -> None:
    ((source, sink),) = rings(1)
    sources = Sources([sink], 20.0)
    for number in range(2 * LEDGER + 3):
        assert sources.look(ONCE) is None
        move(source, number, number)
        assert sources.look(ONCE) == Probe(1, number, number, UINT8)
        move(sink, number, number)


def test_every_source_has_its_turn(rings: Callable[[int], list[Pair]]) -> None:
    pairs = rings(4)
    sources = Sources([sink for _, sink in pairs], 20.0)
    for source, _ in pairs[1:]:  # nothing from rank 1
        for tag in range(3):
            move(source, 8, tag)
    for tag in range(3):
        found = [sources.look(ONCE) for _ in range(3)]
        assert found == [Probe(rank, tag, 8, UINT8) for rank in (2, 3, 4)]
        for rank in (2, 3, 4):
            move(pairs[rank - 1][1], 8, tag)
    assert sources.look(ONCE) is None


def test_probe_of_a_rank_that_left(rings: Callable[[int], list[Pair]]) -> None:
    """Its remaining messages are found; then it is skipped, and the probe ends once all have left."""
    pairs = rings(3)
    sources = Sources([sink for _, sink in pairs], 20.0)
    move(pairs[0][0], 8, 5)
    pairs[0][0].abort(Reason.LEFT.word(1))
    assert sources.look(ONCE) == Probe(1, 5, 8, UINT8)
    move(pairs[0][1], 8, 5)
    assert sources.look(ONCE) is None
    pairs[1][0].abort(Reason.LEFT.word(2))
    assert sources.look(MILLISECOND) is None
    move(pairs[2][0], 8, 6)
    assert sources.look(ONCE) == Probe(3, 6, 8, UINT8)
    move(pairs[2][1], 8, 6)
    pairs[2][0].abort(Reason.LEFT.word(3))
    with pytest.raises(RingStopped) as stopped:
        sources.look(MILLISECOND)
    assert Reason.parse(stopped.value.word) == (Reason.LEFT, stopped.value.end.peer)


@pytest.mark.parametrize("reason", [Reason.PEER_LOST, Reason.ABORTED, Reason.DEADLINE, Reason.MISMATCH])
def test_probe_on_a_failed_communicator(rings: Callable[[int], list[Pair]], reason: Reason) -> None:
    """One ring reports it, even if another rank's message follows."""
    pairs = rings(3)
    sources = Sources([sink for _, sink in pairs], 20.0)
    pairs[1][0].abort(reason.word(7))
    move(pairs[2][0], 8, 6)
    with pytest.raises(RingStopped) as stopped:
        sources.look(MILLISECOND)
    assert stopped.value.end is pairs[1][1] and Reason.parse(stopped.value.word) == (reason, 7)


def test_waits_for_what_comes(rings: Callable[[int], list[Pair]]) -> None:
    pairs = rings(2)
    sources = Sources([sink for _, sink in pairs], 20.0)
    started = time.monotonic()
    assert sources.look(20 * MILLISECOND) is None
    assert time.monotonic() - started > 0.02
    thread = threading.Thread(target=move, args=(pairs[1][0], 100, 1))
    thread.start()
    deadline = Deadline.after(20)
    while (found := sources.look(20 * MILLISECOND)) is None:
        assert not deadline.expired()
    assert found == Probe(2, 1, 100, UINT8)
    thread.join()


def test_never_tells_half_of_a_message(rings: Callable[[int], list[Pair]]) -> None:
    """The fields of a result are consistent while others send and receive at full speed."""
    ((source, sink),) = rings(1)
    sources, many = Sources([sink], 20.0), 3000
    threads = [
        threading.Thread(target=lambda end=end: [move(end, number % 50, number) for number in range(many)])
        for end in (source, sink)
    ]
    for thread in threads:
        thread.start()
    seen = -1
    while any(thread.is_alive() for thread in threads):
        found = sources.look(ONCE)
        if found is not None:
            assert found.nbytes == found.tag % 50 and found.tag >= seen
            seen = found.tag
    for thread in threads:
        thread.join()
    assert sources.look(ONCE) is None and ctypes.c_int64.from_address(sink.address + ABORT).value == 0
