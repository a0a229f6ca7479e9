"""Halves of rings between hosts: made once for each ring, and their places used again."""

import contextlib
import ctypes
import itertools
import socket
import sys
import tracemalloc
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from xvcomm.memory.ring import CONSUMED, Message, Reason, RingLayout, ledger_at
from xvcomm.memory.segment import PAGE
from xvcomm.types.opcode import OpCode
from xvcomm.wire.arrays import Arrays
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.frames import FRAME, HEADER, MAX_DEVICES, Kind
from xvcomm.wire.halves import Halves
from xvcomm.wire.progress import progress_address
from xvcomm.wire.records import OF_LINK, PLACES, UP

LAYOUT = RingLayout(lanes=1, slots=2, slot_bytes=PAGE, wired=True)
NAME, GROUP, THEIRS = 77, 8, 5
COUNT = 1000
LEFT = Reason.LEFT.word(0)

progress = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(progress_address)


class Side:
    """A process's halves, and the other end of its only connection, at which the test is the other process.

    Attributes:
        numbers: of the halves of which OPEN has told, by the names of their rings.
    """

    def __init__(self):
        self.carrier = Carrier(0, 1)
        self.halves = Halves(
            self.carrier, None, Arrays(self.carrier, None), lambda number: SimpleNamespace(direct=False, gone=False)
        )
        self.link = self.carrier.add_link()
        self.numbers = {}
        self.halves.enter(GROUP)
        self._sockets = []
        self.connect()

    def connect(self):
        """Make a connection, in place of one that was lost."""
        self._theirs, self._ours = pair = socket.socketpair()
        self._sockets += pair
        self._ours.setblocking(False)
        self._index = self.carrier.add_rail(self.link, 1, 1, self._ours)
        self._rail = self.carrier.rails[self._index]
        self._sent = 0

    def lose(self):
        """Lose the connection."""
        self.carrier.drop(self._index)

    @property
    def up(self):
        """Whether the connection was not closed because of what has come."""
        return self._rail.state == UP

    def send(self, kind, wire, payload=(), **numbers):
        header = np.zeros((), FRAME)
        header["kind"], header["wire"], header["length"] = kind, wire, 8 * len(payload)
        for field, number in numbers.items():
            header[field] = number
        data = header.tobytes() + np.array(payload, np.int64).tobytes()
        self._theirs.sendall(data)
        self._sent += len(data)
        while self._rail.received < self._sent and self.up:
            progress(self.carrier.address, 0, 0)

    def await_bytes(self, rail, count):
        """Wait until a connection has received so many bytes."""
        while self.carrier.rails[rail].received < count:
            progress(self.carrier.address, 0, 0)

    def offer(self, name=NAME, producer=True, group=GROUP, there=THEIRS, peer=0):
        """Open the ring."""
        shape = (LAYOUT.lanes, LAYOUT.slots, LAYOUT.slot_bytes, producer, group, peer)
        self.send(Kind.OPEN, 1, shape + (0,) * (2 + MAX_DEVICES), slot=there, number=name)

    def fill(self):
        """Let the connection take nothing more from the process; how many bytes are before what it sends later."""
        count = 0
        for size in (1 << 16, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    count += self._ours.send(bytes(size))
        return count

    def skip(self, count):
        """Receive so many bytes."""
        while count:
            count -= len(self._theirs.recv(count))
        self.carrier.wake()  # as the last thread that waits for a message does

    def whole_frames(self):
        """The headers and the words of the payloads of the frames that come, until there are none for a while."""
        self._theirs.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while True:
                header = np.frombuffer(self._theirs.recv(HEADER, socket.MSG_WAITALL), FRAME)[0]
                payload = self._theirs.recv(int(header["length"]), socket.MSG_WAITALL)
                if header["kind"] == Kind.OPEN:
                    self.numbers[int(header["number"])] = int(header["slot"])
                yield header, np.frombuffer(payload, np.int64).tolist()

    def frames(self):
        """Their kinds and numbers."""
        for header, _ in self.whole_frames():
            yield Kind(header["kind"]), int(header["number"])

    def receive(self):
        """All of them."""
        return list(self.frames())

    def open(self, name=NAME, producer=False):
        return self.halves.open(self.link, name, LAYOUT, group=GROUP, peer=1, producer=producer)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.carrier.close()
        self.halves.close()
        for each in self._sockets:
            each.close()


@pytest.fixture
def side():
    with Side() as side:
        yield side


def test_an_offer_of_a_ring_that_was_opened_and_closed_meanwhile(side):
    """The other side learns that the ring has stopped from the half that has its messages, and of no other half."""
    side.offer()
    end = side.open()
    assert side.receive() == [(Kind.OPEN, NAME)]
    side.send(Kind.OPEN, 0, (1, 2, PAGE, True, GROUP) + (0,) * (3 + MAX_DEVICES), slot=THEIRS, number=NAME)
    end.abort(LEFT)
    side.halves.leave(GROUP, LEFT)
    end.close()
    side.halves.look()
    assert side.receive() == [(Kind.STOP, LEFT)]


def test_an_offer_after_the_communicator_was_closed(side):
    """The half here is gone, and the other process must not wait."""
    end = side.open()
    end.abort(LEFT)
    side.halves.leave(GROUP, LEFT)
    end.close()
    side.receive()
    side.halves.sweep()
    side.offer()
    side.halves.look()
    assert (Kind.STOP, LEFT) in side.receive()


@pytest.mark.parametrize("producer", [True, False])
def test_a_half_that_only_tells_that_the_ring_has_stopped(side, producer):
    """After a lost connection the other side may tell once more of messages that an earlier half has had."""
    side.halves.leave(GROUP, LEFT)
    side.offer(producer=producer)
    side.halves.look()
    assert side.receive() == [(Kind.OPEN, NAME), (Kind.STOP, LEFT)]
    if producer:
        side.send(Kind.SLOT, side.numbers[NAME], [1], slot=9)
    else:
        side.send(Kind.CREDIT, side.numbers[NAME], [9], number=9)
    side.send(Kind.STOP, side.numbers[NAME], [10], number=LEFT)
    side.send(Kind.STOPPED, side.numbers[NAME])
    assert side.up and not side.halves.sweep()


def test_a_consumer_that_leaves_once_it_has_a_message(side):
    """The STOP frame tells how much it has consumed: a CREDIT frame could come later over another connection."""
    end = side.open()
    side.offer()
    side.receive()
    data = [1, 2, 3]
    side.send(Kind.SLOT, side.numbers[NAME], data, entry=(1, (int(OpCode.SEND), 0, 8 * len(data), 0, 0)))
    for counter in (LAYOUT.tail(0), CONSUMED):
        ctypes.c_int64.from_address(end.address + counter).value = 1
    end.abort(LEFT)
    side.carrier.wake()
    stops = [(header["slot"], words) for header, words in side.whole_frames() if header["kind"] == Kind.STOP]
    assert side.up and stops == [(1, [1])]


def test_a_slot_whose_first_copy_begins_last(side):
    """The connection of the first copy is lost in the middle of the slot: the second copy counts."""
    with contextlib.ExitStack() as closing:
        end = side.open()
        side.offer()
        side.receive()
        data = np.arange(32, dtype=np.int64).tobytes()
        wire, description = side.numbers[NAME], (1, (int(OpCode.SEND), 0, len(data), 0, 0))
        theirs, rails = [], []
        for number in range(2):
            other, ours = socket.socketpair()
            closing.enter_context(other)
            closing.enter_context(ours)
            ours.setblocking(False)
            theirs.append(other)
            rails.append(side.carrier.add_rail(side.link, 2 + number, 2 + number, ours))
        for index, attempt in ((1, 1), (0, 0)):
            header = np.array((Kind.SLOT, wire, 0, attempt, 0, 0, len(data), description), FRAME)
            theirs[index].sendall(header.tobytes() + data[:100])
            side.await_bytes(rails[index], HEADER + 100)
        theirs[1].sendall(data[100:])
        side.await_bytes(rails[1], HEADER + len(data))
        side.carrier.drop(rails[0])
        head = ctypes.c_int64.from_address(end.address + LAYOUT.head(0)).value
        assert head == 1 and ctypes.string_at(end.address + LAYOUT.data, len(data)) == data


@pytest.mark.parametrize("word", [LEFT, Reason.ABORTED.word(0)], ids=["left", "aborted"])
def test_a_message_without_bytes_that_was_lost_with_a_connection(side, word):
    """It is sent once more before the other side is told that the ring has stopped."""
    end = side.open(producer=True)
    side.offer(producer=False)
    first = ledger_at(end.address + LAYOUT.ledger)[:1]
    first["message"], first["number"] = Message(OpCode.SEND, 0, 0, 0), 1
    end.sequence = ctypes.c_int64.from_address(end.turn).value = 1
    side.carrier.wake()  # as its mover does
    assert (Kind.ENTRY, 0) in side.frames()
    side.lose()
    end.abort(word)
    side.connect()
    assert side.receive() == [(Kind.OPEN, NAME), (Kind.ENTRY, 0), (Kind.STOP, word)]


def at_line(point, action, handler):
    """Call a handler in the middle of an action, at a line of `xvcomm.wire`, as signals do; whether it has as many lines."""
    lines = itertools.count()

    def trace(frame, event, argument):
        if event == "line" and next(lines) == point:
            sys.settrace(None)
            handler()
        return trace if "/wire/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return next(lines) > point


def test_a_signal_handler_closes_and_opens_at_any_point(side):
    """Rings that are open at the same time have different numbers, of which the other side is told."""
    names = itertools.count()
    kept = []

    def take():
        kept.append(next(names))
        return side.open(kept[-1])

    for point in itertools.count():
        old = side.open(next(names))

        def handler(old=old):
            old.abort(LEFT)
            old.close()
            take()
            take()

        if not at_line(point, take, handler):
            break
    side.receive()
    assert point > 20 and len(kept) == 3 * point + 1
    assert len({side.numbers[name] % PLACES for name in kept}) == len(kept)


def test_an_offer_that_comes_at_any_point_while_the_half_is_closed(side):
    """The other process hears that the ring has stopped, from this half or from another one."""
    side.halves.leave(GROUP, LEFT)
    filled = []

    def offer(name):
        filled.append(side.fill())
        side.offer(name)

    for name in itertools.count():
        end = side.open(name)
        assert next(side.frames()) == (Kind.OPEN, name)
        end.abort(LEFT)
        if not at_line(name, end.close, partial(offer, name)):
            break
        side.halves.look()
        side.skip(filled[-1])
        assert (Kind.STOP, LEFT) in side.frames()
        side.send(Kind.STOPPED, side.numbers[name])
        assert not side.halves.sweep()
    assert name > 20


def test_places_are_used_again(side):
    """More rings one after the other than two processes may have at a time."""
    for name in range(5000):
        end = side.open(name)
        end.abort(LEFT)
        end.close()
        side.halves.sweep()
    assert side.carrier.link(side.link).wire_count < 10


def test_more_offers_than_rings_may_be_open(side):
    """Nothing is lost while this process's Python does not look, also if rings end there, and others take their places."""
    side.halves.leave(GROUP, LEFT)
    for turn in range(2):
        for there in range(COUNT):
            side.offer(COUNT * turn + there, producer=False, there=there + PLACES * turn)
    side.offer(2 * COUNT, there=1)  # late, over another connection
    side.halves.look()
    found = side.receive()
    assert {number for kind, number in found if kind == Kind.OPEN} == set(range(COUNT, 2 * COUNT))
    assert sum(kind == Kind.STOP for kind, _ in found) == COUNT


@pytest.mark.parametrize("there", [-1, OF_LINK])
def test_an_offer_from_no_place(side, there):
    """A process that has more rings with this one than two may have does not keep the connection."""
    for place in range(OF_LINK if there > 0 else 0):
        side.offer(place, there=place)
    assert side.up
    side.offer(there, there=there)
    assert not side.up


def test_an_offer_that_cannot_be_answered_at_once(side):
    """The other process hears that the communicator is closed once there is room to answer."""
    ends = [side.open(1000 + number) for number in range(OF_LINK)]
    side.receive()
    side.offer(group=GROUP + 1)
    side.halves.look()
    assert side.receive() == []
    ends[0].abort(LEFT)
    ends[0].close()
    side.halves.look()
    assert side.receive() == [(Kind.OPEN, NAME), (Kind.STOP, LEFT)]


@pytest.mark.parametrize("producer", [True, False])
def test_an_offer_that_this_process_does_not_take_before_it_closes_the_communicator(side, producer, monkeypatch):
    """The other process hears of that, also if its messages had to wait until the ring is opened here."""
    monkeypatch.setattr("xvcomm.wire.halves._EARLY_BYTES", 0)
    side.offer(producer=producer)
    side.halves.look()
    assert side.receive() == []
    side.halves.leave(GROUP, LEFT)
    assert side.receive() == [(Kind.OPEN, NAME), (Kind.STOP, LEFT)]


def test_a_communicator_that_this_process_is_not_in(side):
    """An offer for it is answered with the reason why it failed, or with the word that its rank has left."""
    failed = Reason.ABORTED.word(3)
    for number in range(3000):
        side.halves.enter(number)
        side.halves.leave(number, failed)
    for there, group in enumerate((0, 2999, 12345)):
        side.offer(there, group=group, there=there, peer=7)
    side.halves.look()
    words = [number for kind, number in side.receive() if kind == Kind.STOP]
    assert words == [Reason.LEFT.word(7), failed, Reason.LEFT.word(7)]


def test_an_answer_that_comes_after_the_communicator_was_closed(side):
    """The half that the other process has made beforehand knows no rank: it hears that this one has left, whatever its number."""
    left = Reason.LEFT.word(2)
    end = side.open(producer=True)
    end.abort(left)
    side.halves.leave(GROUP, left)
    end.close()
    assert not side.halves.sweep()
    side.receive()
    side.offer(producer=False, peer=-1)
    side.halves.look()
    assert (Kind.STOP, left) in side.receive()


def test_communicators_that_are_closed_take_no_memory(side):
    """However many there were."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1000, 11_000):
            side.halves.enter(number)
            side.halves.leave(number, LEFT)
        assert tracemalloc.get_traced_memory()[0] - before < 100_000
    finally:
        tracemalloc.stop()
