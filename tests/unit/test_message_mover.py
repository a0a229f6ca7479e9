"""The host's message_mover: messages one by one, beside streams on the same ring ends, and how each is noted and stopped."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
import pytest

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.backends.host.batch import Batch
from xvcomm.backends.host.device import HostDevice
from xvcomm.backends.host.message_mover import HELD_BYTES, HostMessageMover
from xvcomm.backends.host.mover import Kind
from xvcomm.config import Config
from xvcomm.jit.atomics import BUDGET
from xvcomm.memory.ring import CARRIER, LEDGER, Message, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import Segment
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import Record, State, read_history, region_bytes
from xvcomm.trace.recorder import Recorder
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8
from xvcomm.types.opcode import OpCode

COMMUNICATOR, COLLECTIVE = 5, 12
SLOTS = 4
_LONG = 60.0


@dataclass
class Side:
    """One end of the ring with its message mover, and the flight recorder that the message mover writes."""

    end: RingEnd
    device: HostDevice
    memory: memoryview = field(default_factory=lambda: memoryview(bytearray(region_bytes(512))))
    stop: ctypes.c_int64 = field(default_factory=ctypes.c_int64)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.memory)
        self.message_mover = self.another()

    def another(self) -> HostMessageMover:
        """A message mover of the same end."""
        op = OpCode.SEND if self.end.producer else OpCode.RECV
        stop = ctypes.addressof(self.stop)
        return self.device.message_mover(self.end, op, self.recorder.handle, COMMUNICATOR, stop)

    def begin(self, data: np.ndarray, tag: int = 0, message_mover: HostMessageMover | None = None) -> bool:
        """Begin a message of bytes; whether it is through."""
        call_site = find_call_site(0)
        return (message_mover or self.message_mover).begin(
            COLLECTIVE, data.ctypes.data, UINT8.code, data.nbytes, tag, call_site
        )

    def move(self, data: np.ndarray, tag: int = 0) -> None:
        """Begin and finish a message."""
        if not self.begin(data, tag):
            self.message_mover.finish(Deadline.after(20))

    def stream(self, data: np.ndarray) -> object:
        """Enqueue a message on a stream of its own."""
        stream = self.device.streams(1)[0]
        stream.deadline = Deadline.after(20)
        put = self.device.put if self.end.producer else self.device.get
        put(self.end, data.ctypes.data, Message(OpCode.SEND, UINT8.code, data.nbytes, 0), stream)
        return stream

    def last(self) -> Record:
        """What the flight recorder holds of the newest message."""
        (found,) = read_history(self.memory, 1)
        return found


@pytest.fixture
def ring() -> Iterator[tuple[Side, Side]]:
    """Both ends of a ring of few slots."""
    layout, device = RingLayout(1, SLOTS, 16 << 10), HostDevice(Config())
    segment = Segment.create(Config().shm_dir, "message_mover", layout.size)
    producer = RingEnd.create(segment, layout, peer=1, producer=True)
    consumer = RingEnd.open(Segment.attach(Config().shm_dir, segment.name), peer=0, producer=False)
    segment.unlink()
    yield Side(producer, device), Side(consumer, device)
    producer.close()
    consumer.close()


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)


SIZES = [0, 1, 4096, 40_001, HELD_BYTES, HELD_BYTES + 1, 1_000_003]


@pytest.mark.parametrize("nbytes", SIZES)
def test_sizes(ring: tuple[Side, Side], nbytes: int) -> None:
    """From nothing to what is left to the call without the interpreter lock; several of each."""
    source, sink = ring

    def receive(seed: int) -> np.ndarray:
        got = np.empty(nbytes, np.uint8)
        sink.move(got, seed)
        return got

    with ThreadPoolExecutor(1) as thread:
        for seed in range(5):
            received = thread.submit(receive, seed)
            source.move(pattern(nbytes, seed), seed)
            assert (received.result(20) == pattern(nbytes, seed)).all()
    assert source.end.sequence == sink.end.sequence == 5


def test_how_a_message_is_noted(ring: tuple[Side, Side]) -> None:
    source, sink = ring
    data, got = pattern(100), np.zeros(100, np.uint8)
    assert not sink.begin(got, tag=7)
    waiting = sink.last()
    assert (waiting.communicator, waiting.sequence, waiting.op) == (COMMUNICATOR, COLLECTIVE, OpCode.RECV)
    assert (waiting.nbytes, waiting.peer, waiting.tag, waiting.state) == (100, 0, 7, State.POSTED)
    assert waiting.call_site.startswith("test_message_mover.py:")
    assert source.begin(data, tag=7), "a small message waited though the ring is empty"
    sent = source.last()
    assert (sent.op, sent.peer, sent.tag, sent.state) == (OpCode.SEND, 1, 7, State.DONE) and sent.ended >= sent.posted
    sink.message_mover.finish(Deadline.after(20))
    assert sink.last().state == State.DONE and (got == data).all()
    assert sink.message_mover.record == 0 and not sink.message_mover.discard()


def test_more_than_the_ledger_holds(ring: tuple[Side, Side]) -> None:
    """Empty messages need no slot, but each needs an entry."""
    source, sink = ring
    nothing = np.empty(0, np.uint8)
    assert all(source.begin(nothing) for _ in range(LEDGER))
    assert not source.begin(nothing)
    assert sink.begin(nothing)
    source.message_mover.finish(Deadline.after(20))
    assert all(sink.begin(nothing) for _ in range(LEDGER))


def test_streams_and_message_movers_keep_their_order(ring: tuple[Side, Side]) -> None:
    """Whatever is begun first moves first, although it is driven last."""
    source, sink = ring
    sent = [pattern(30_000, seed) for seed in range(4)]
    got = [np.zeros_like(x) for x in sent]
    first, third = source.stream(sent[0]), source.another()
    assert not source.begin(sent[1]) and not source.begin(sent[2], message_mover=third)
    last = source.stream(sent[3])
    received = sink.stream(got[0])
    with ThreadPoolExecutor(5) as threads:
        waiting = [threads.submit(c.finish, Deadline.after(20)) for c in (third, source.message_mover)]
        waiting += [threads.submit(s.synchronize) for s in (last, first)]
        waiting.append(threads.submit(lambda: [received.synchronize(), *map(sink.move, got[1:])]))
        for future in waiting:
            future.result(20)
    assert all((x == y).all() for x, y in zip(sent, got, strict=True))


def test_a_deadline(ring: tuple[Side, Side]) -> None:
    _, sink = ring
    assert not sink.begin(np.empty(10, np.uint8))
    with pytest.raises(RingStalled) as stalled:
        sink.message_mover.finish(Deadline.after(0.01))
    assert stalled.value.ends == (sink.end,)
    assert sink.message_mover.discard() and sink.end.finished() == (0, False)
    assert sink.last().state == State.POSTED, "whoever gives up says how it ended"


@pytest.mark.parametrize(("nbytes", "tag"), [(10, 4), (11, 3)])
def test_different_descriptions(ring: tuple[Side, Side], nbytes: int, tag: int) -> None:
    source, sink = ring
    assert source.begin(pattern(10), tag=3)
    with pytest.raises(RingStopped) as stopped:
        sink.begin(np.empty(nbytes, np.uint8), tag)
    assert Reason.parse(stopped.value.word) == (Reason.MISMATCH, 0) and stopped.value.sequence == 0
    assert sink.message_mover.discard()
    mine, theirs = sink.end.mismatch() or (None, None)
    assert mine == Message(OpCode.SEND, UINT8.code, nbytes, tag) and theirs == Message(OpCode.SEND, UINT8.code, 10, 3)


def test_a_stopped_communicator(ring: tuple[Side, Side]) -> None:
    """Nothing moves any more, and the record says so once the operation is ended."""
    source, _ = ring
    assert source.begin(pattern(10))
    source.stop.value = Reason.ABORTED.word(1)
    with pytest.raises(RingStopped):
        source.begin(pattern(10))
    assert source.message_mover.discard() and source.message_mover.record == 1 and source.end.sequence == 1
    assert source.last().state == State.POSTED


def test_a_stopped_ring(ring: tuple[Side, Side]) -> None:
    """What was sent before is still delivered; then waiting ends."""
    source, sink = ring
    assert source.begin(pattern(10))
    source.end.abort(Reason.LEFT.word(0))
    assert sink.begin(np.empty(10, np.uint8))
    with pytest.raises(RingStopped) as stopped:
        sink.move(np.empty(10, np.uint8))
    assert Reason.parse(stopped.value.word) == (Reason.LEFT, 0) and stopped.value.sequence == 1


def test_an_interrupt_behind_a_message(ring: tuple[Side, Side]) -> None:
    """There is nothing to give up."""
    source, sink = ring
    message_mover = sink.message_mover
    assert not message_mover.discard(), "nothing was begun"
    assert not sink.begin(np.empty(10, np.uint8))
    assert source.begin(pattern(10))
    assert message_mover.advance()  # what `finish` does up to where an interrupt may come
    assert not message_mover.discard()
    assert sink.last().state == State.DONE and sink.end.finished() == (1, True)


@pytest.fixture
def said(ring: tuple[Side, Side]) -> Iterator[list[int]]:
    """What the consumer's movers tell a network that always brings a little, for a minute at most."""
    (_, sink), said, until = ring, [], monotonic() + _LONG

    @ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)
    def progress(carrier: int, drivers: int, unused: int) -> int:
        said.append(drivers)
        return int(monotonic() < until)

    record = np.zeros(1, CARRIER)
    record["progress"] = ctypes.cast(progress, ctypes.c_void_p).value
    sink.end.carrier = record.ctypes.data
    yield said
    assert monotonic() < until
    assert said == [1, *[0] * (len(said) - 2), -1]


@pytest.mark.parametrize("budget", [BUDGET // 20, BUDGET])
def test_a_network_that_always_brings_a_little(ring: tuple[Side, Side], said: list[int], budget: int) -> None:
    """A call that carries returns after its budget nevertheless, and says when it begins and ends to wait."""
    message_mover = ring[1].another()
    assert not ring[1].begin(np.empty(8, np.uint8), message_mover=message_mover)
    assert not message_mover.advance(budget)


def test_what_needs_no_waiting_does_not_wait_for_such_a_network(ring: tuple[Side, Side], said: list[int]) -> None:
    data, batch = np.empty(8, np.uint8), Batch(0, process_memory=False)
    batch.add(Kind.GET, ring[1].end, data.ctypes.data, Message(OpCode.SEND, UINT8.code, data.nbytes, 0))
    assert not batch.move_ready()
    assert len(said) < 100
