"""Direct messages between two arrays, with both ends of a ring in this process: each step, and protection of arrays."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xvcomm.abc.device import RingStalled, RingStopped
from xvcomm.backends.host import processes
from xvcomm.backends.host.device import HostDevice
from xvcomm.backends.host.message_mover import HostMessageMover
from xvcomm.backends.host.rendezvous import END_LINE, LEAST, chunk_bytes
from xvcomm.backends.host.tuning import NEVER, TRIES
from xvcomm.config import Config
from xvcomm.jit.record import python_type
from xvcomm.memory.ring import CLAIMS, LINE, MEETING, Message, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import PAGE, Segment
from xvcomm.trace.callsite import find_call_site
from xvcomm.trace.format import region_bytes
from xvcomm.trace.recorder import Recorder
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import UINT8, ReduceOp
from xvcomm.types.opcode import OpCode

STAGED, STRAIGHT = 0, 1
CAPACITY = 2 * LEAST
BIG = 2 * CAPACITY
SECONDS = 100.0
_NO_RIGHTS = 0
_Line = python_type(END_LINE)


class Side:
    """One end of the ring, and a message mover of it."""

    def __init__(self, end: RingEnd, config: Config) -> None:
        self.end, self.device = end, HostDevice(config)
        self._memory = memoryview(bytearray(region_bytes(512)))
        self._recorder, self._stop = Recorder(self._memory), ctypes.c_int64()
        op = OpCode.SEND if end.producer else OpCode.RECV
        stop = ctypes.addressof(self._stop)
        self.message_mover: HostMessageMover = self.device.message_mover(end, op, self._recorder.handle, 1, stop)

    @property
    def line(self) -> Any:
        """Its line in page 0."""
        return _Line.from_address(self.end.address + MEETING + (0 if self.end.producer else LINE))

    @property
    def copied(self) -> int:
        """Number of chunks of its newest message that this end has copied directly."""
        number, chunks = divmod(self.line.done, 1 << 24)
        return chunks if number == self.end.sequence else 0

    def begin(self, data: np.ndarray, tag: int = 0) -> bool:
        """Begin a message and drive it until it waits; returns whether it is complete."""
        self._data = data  # as long as the message may need it
        through = self.message_mover.begin(0, data.ctypes.data, UINT8.code, data.nbytes, tag, find_call_site(0))
        return through or self.message_mover.advance(-1)

    def move(self, data: np.ndarray) -> None:
        """Begin and finish a message."""
        if not self.begin(data):
            self.message_mover.finish(Deadline.after(SECONDS))

    def settle(self, way: int) -> None:
        """Fix the choice between direct and ring."""
        for tuning in self.end.kept.tunings:
            tuning.trials, tuning.best[way], tuning.best[1 - way] = -1, 1, 2


class Pair:
    """Both sides of a ring."""

    def __init__(self, *configs: Config) -> None:
        layout = RingLayout(1, CAPACITY // (16 << 10), 16 << 10)
        segment = Segment.create(Config().shm_dir, "rendezvous", layout.size)
        self.source = Side(RingEnd.create(segment, layout, peer=1, producer=True), configs[0])
        opened = Segment.attach(Config().shm_dir, segment.name)
        self.sink = Side(RingEnd.open(opened, peer=0, producer=False), configs[1])
        segment.unlink()

    def pass_on(self, data: np.ndarray, target: np.ndarray) -> None:
        """Transfer one message whose receiver is first."""
        with ThreadPoolExecutor(1) as thread:
            through = self.sink.begin(target)
            sent = thread.submit(self.source.move, data)
            if not through:
                self.sink.message_mover.finish(Deadline.after(SECONDS))
            sent.result(SECONDS)

    def claims(self, word: int) -> None:
        """Write what the ends read before they claim a chunk of the newest message that one of them has begun."""
        number = max(self.source.end.sequence, self.sink.end.sequence)
        ctypes.c_int64.from_address(self.source.end.address + CLAIMS).value = number << 24 | word

    def close(self) -> None:
        """Unmap both ends."""
        self.source.end.close()
        self.sink.end.close()


ALL_CLAIMED = 0xFFF << 12


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends, which can access each other's memory and send directly whenever possible."""
    made = Pair(Config(), Config())
    made.pass_on(np.ones(LEAST, np.uint8), np.empty(LEAST, np.uint8))
    if {made.source.end.kept.access.reach, made.sink.end.kept.access.reach} != {1}:
        pytest.skip("the system does not let processes into each other's memory (seccomp)")
    assert made.source.copied == made.sink.copied == 0, "the first try is a staged one"
    made.source.settle(STRAIGHT)
    yield made
    made.close()


def pattern(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, nbytes, np.uint8)


def chunk_count(nbytes: int) -> int:
    return -(-nbytes // chunk_bytes(nbytes))


@given(st.integers(LEAST, 1 << 44))
def test_chunks(nbytes: int) -> None:
    """Whole pages, few enough for the counter, and enough for both ends."""
    chunk = chunk_bytes(nbytes)
    assert chunk % PAGE == 0
    assert 4 <= chunk_count(nbytes) <= 4095


SIZES = [LEAST, LEAST + 1, CAPACITY - 1, CAPACITY + 1, 8 * chunk_bytes(BIG) + 1, 9 * chunk_bytes(16 * LEAST) - 1]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("offset", [0, 1, 17])
def test_every_byte_arrives(pair: Pair, nbytes: int, offset: int) -> None:
    """Bytes beside the arrays are unchanged, at any alignment."""
    for seed in range(3):
        data = pattern(nbytes + offset, seed)[offset:]
        room = np.full(nbytes + 64, 0xA5, np.uint8)
        target = room[32 - offset : 32 - offset + nbytes]
        pair.pass_on(data, target)
        assert (target == data).all()
        assert set(room[: 32 - offset]) | set(room[32 - offset + nbytes :]) == {0xA5}
        assert pair.source.copied + pair.sink.copied == chunk_count(nbytes)


def test_one_end_alone_can_copy_everything(pair: Pair) -> None:
    """The sender writes all before the receiver looks; then the receiver reads all while the sender is idle."""
    data, target = pattern(LEAST), np.zeros(LEAST, np.uint8)
    assert not pair.sink.begin(target)
    assert pair.source.begin(data)
    assert (target == data).all() and pair.sink.copied == 0
    assert pair.sink.message_mover.advance(-1)
    target[:] = 0
    assert not pair.sink.begin(target)
    pair.claims(ALL_CLAIMED)
    assert not pair.source.begin(data)
    pair.claims(0)
    assert pair.sink.message_mover.advance(-1)
    assert (target == data).all() and pair.sink.copied == chunk_count(LEAST)
    assert pair.source.message_mover.advance(-1)


def test_a_sender_does_not_wait_long_for_a_late_receiver(pair: Pair) -> None:
    """For messages that fit the ring: two ranks that send before they receive must not deadlock."""
    data, target = pattern(CAPACITY), np.zeros(CAPACITY, np.uint8)
    pair.source.move(data)
    assert not target.any()
    assert pair.sink.begin(target)
    assert (target == data).all() and pair.source.copied == 0


def test_a_sender_that_waited_in_vain_does_not_wait_again(pair: Pair) -> None:
    """Until a receiver comes in time."""
    target = np.zeros(LEAST, np.uint8)
    assert not pair.source.begin(pattern(LEAST, 0))
    pair.source.message_mover.finish(Deadline.after(SECONDS))
    for seed in range(3):
        assert pair.sink.begin(target)
        assert (target == pattern(LEAST, seed)).all()
        assert pair.source.begin(pattern(LEAST, seed + 1))
    assert pair.sink.begin(target)
    pair.pass_on(pattern(LEAST), target)
    assert pair.source.copied + pair.sink.copied == chunk_count(LEAST)
    assert not pair.source.begin(pattern(LEAST))


def test_a_message_larger_than_the_ring_waits(pair: Pair) -> None:
    """It has to wait anyway, and so is sent directly when the receiver comes."""
    data, target = pattern(CAPACITY + 1), np.zeros(CAPACITY + 1, np.uint8)
    assert not pair.source.begin(data)
    with pytest.raises(RingStalled):
        pair.source.message_mover.finish(Deadline.after(0.01))
    assert pair.sink.begin(target)
    assert pair.sink.copied == chunk_count(data.nbytes) and (target == data).all()
    assert pair.source.message_mover.advance(-1)


def test_reducing_receives_use_the_ring(pair: Pair) -> None:
    """Even if the sender offers its array."""
    data, mine = pattern(BIG, 1), pattern(BIG, 2)
    target = mine.copy()
    stream = pair.sink.device.streams(1)[0]
    stream.deadline = Deadline.after(SECONDS)
    said = Message(OpCode.SEND, UINT8.code, BIG, 0)
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(pair.source.move, data)
        pair.sink.device.get(pair.sink.end, target.ctypes.data, said, stream, ReduceOp.MAX)
        stream.synchronize()
        sent.result(SECONDS)
    assert pair.source.copied == pair.sink.copied == 0
    assert (target == np.maximum(data, mine)).all()


def test_a_sender_does_not_wait_for_a_reducing_receiver_again(pair: Pair) -> None:
    """It writes as much as fits the ring before the receiver comes, so that both can copy at once."""
    test_reducing_receives_use_the_ring(pair)
    filled = ctypes.c_int64.from_address(pair.source.end.address + pair.source.end.layout.head(0))
    before = filled.value
    assert not pair.source.begin(pattern(BIG))
    assert filled.value - before == pair.source.end.layout.slots


def test_the_sender_chooses_what_was_faster(pair: Pair) -> None:
    """After sufficiently long trials of each way."""
    tuning = pair.source.end.kept.tunings[0]
    tuning.trials, tuning.spent, tuning.best[:] = 0, 0, (NEVER, NEVER)
    target, sent = np.zeros(LEAST, np.uint8), 0
    while tuning.trials >= 0:
        data = pattern(LEAST, sent)
        pair.pass_on(data, target)
        assert (target == data).all()
        sent += 1
    staged, straight = tuning.best
    assert sent >= 2 * TRIES and tuning.spent >= 20_000_000
    assert 0 < staged < NEVER and 0 < straight < NEVER
    before = pair.source.line.done >> 24
    pair.pass_on(data, target)
    assert (pair.source.line.done >> 24 != before) == (straight < staged - staged // 8)


@pytest.mark.parametrize(("straight", "chosen"), [(874, True), (875, False), (1000, False)])
def test_direct_copies_must_be_clearly_faster(pair: Pair, straight: int, chosen: bool) -> None:
    """By an eighth, so that noise does not decide."""
    for tuning in pair.source.end.kept.tunings:
        tuning.best[:] = 1000, straight
    pair.pass_on(pattern(LEAST), np.zeros(LEAST, np.uint8))
    assert (pair.source.copied + pair.sink.copied > 0) == chosen


@pytest.mark.parametrize("refuses", [0, 1])
def test_one_end_may_refuse_direct_copies(refuses: int) -> None:
    """With XVCOMM_PROCESS_MEMORY: everything goes through the ring."""
    configs = [Config(), Config()]
    configs[refuses] = Config(process_memory=0)
    pair = Pair(*configs)
    for side, config in zip((pair.source, pair.sink), configs, strict=True):
        assert (side.end.kept is None) == (not config.process_memory)
    if refuses:
        pair.source.settle(STRAIGHT)
    data, target = pattern(BIG), np.zeros(BIG, np.uint8)
    pair.pass_on(data, target)
    assert (target == data).all() and pair.source.copied == pair.sink.copied == 0
    pair.close()


def test_another_process_with_the_same_pid() -> None:
    """As with process ids of different namespaces: that process is not accessed."""
    pair = Pair(Config(), Config())
    pair.source.settle(STRAIGHT)
    pair.sink.line.process.value += 1
    data, target = pattern(BIG), np.zeros(BIG, np.uint8)
    pair.pass_on(data, target)
    assert (target == data).all() and pair.source.copied == pair.sink.copied == 0
    assert pair.source.end.kept.access.reach == -1
    pair.close()


@pytest.mark.parametrize("receives", [False, True])
def test_memory_that_others_may_not_touch_is_not_offered(pair: Pair, receives: bool) -> None:
    """As mapped by drivers; here inaccessible pages at an array's end, which must not be read."""
    pages = mmap.mmap(-1, BIG)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    array = np.frombuffer(pages, np.uint8)
    protect = libc.mprotect
    assert protect(ctypes.c_void_p(address + BIG - PAGE), PAGE, _NO_RIGHTS) == 0
    other = np.zeros(BIG, np.uint8)
    if receives:
        assert not pair.sink.begin(array)
        assert not pair.source.begin(other)
    else:
        assert not pair.sink.begin(other)
        assert not pair.source.begin(array)
    assert protect(ctypes.c_void_p(address + BIG - PAGE), PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(pair.source.message_mover.finish, Deadline.after(SECONDS))
        pair.sink.message_mover.finish(Deadline.after(SECONDS))
        sent.result(SECONDS)
    assert pair.source.copied == pair.sink.copied == 0


def test_differing_descriptions_deliver_nothing(pair: Pair) -> None:
    target = np.full(LEAST, 7, np.uint8)
    assert not pair.sink.begin(target, tag=1)
    with pytest.raises(RingStopped) as stopped:
        pair.source.begin(pattern(LEAST), tag=2)
    assert Reason.parse(stopped.value.word)[0] is Reason.MISMATCH
    with pytest.raises(RingStopped):
        pair.sink.message_mover.advance(-1)
    assert (target == 7).all() and pair.source.copied == 0


@pytest.mark.parametrize("leaver", ["source", "sink"])
def test_giving_up_waits_until_the_array_is_not_accessed(pair: Pair, leaver: str) -> None:
    """Also in another thread that gives up a later message."""
    side, other = (pair.source, pair.sink) if leaver == "source" else (pair.sink, pair.source)
    assert not side.begin(pattern(BIG))
    other.line.touch.entered = 1
    leaving = [threading.Thread(target=leave) for leave in (side.message_mover.discard, side.end.give_up)]
    leaving[0].start()
    until = time.monotonic() + SECONDS
    while side.end.finished()[1]:
        assert leaving[0].is_alive() and time.monotonic() < until
    leaving[1].start()
    leaving[1].join(0.1)
    assert all(thread.is_alive() for thread in leaving), "left while the other end was still in its array"
    other.line.touch.entered = 0
    for thread in leaving:
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("leaver", ["source", "sink"])
def test_no_copy_starts_after_the_owner_has_left(pair: Pair, leaver: str, stopped: bool) -> None:
    """One end closes, or the communicator is aborted, after both have agreed: the other waits for the reason."""
    target = np.full(BIG, 7, np.uint8)
    assert not pair.sink.begin(target)
    pair.claims(ALL_CLAIMED)
    assert not pair.source.begin(np.zeros(BIG, np.uint8))
    assert not pair.sink.message_mover.advance(-1)
    pair.claims(0)
    side, other = (pair.source, pair.sink) if leaver == "source" else (pair.sink, pair.source)
    if stopped:
        side.end.abort(Reason.ABORTED.word(0))
    else:
        assert side.message_mover.discard()
        assert not other.message_mover.advance(-1)
        side.end.abort(Reason.PEER_LOST.word(0))
    with pytest.raises(RingStopped):
        other.message_mover.advance(-1)
    assert (target == 7).all()
    assert other.line.touch.entered == 0 and other.copied == 0


def test_a_receiver_ends_what_was_copied_before_its_sender_left(pair: Pair) -> None:
    data, target = pattern(LEAST), np.zeros(LEAST, np.uint8)
    assert not pair.sink.begin(target)
    assert pair.source.begin(data)
    pair.source.end.abort(Reason.LEFT.word(0))
    assert pair.sink.message_mover.advance(-1)
    assert (target == data).all()


def test_what_others_write_to_outlives_the_ends_of_rings() -> None:
    """Another process may try whether it can write here when the end that it tries is closed already."""
    process, access = (python_type(dtype)() for dtype in (processes.PROCESS, processes.ACCESS))
    processes.introduce(process, access, True)
    begin, size = ctypes.addressof(access), ctypes.sizeof(access)
    assert not begin <= process.nonce < begin + size
    del access
    assert ctypes.c_int64.from_address(process.nonce).value == process.value
