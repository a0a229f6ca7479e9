"""Halves of rings between hosts: made once for each ring, and their places used again."""

import contextlib
import ctypes
import socket
from types import SimpleNamespace

import numpy as np
import pytest

from xvcomm.memory.ring import Reason, RingLayout
from xvcomm.memory.segment import PAGE
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.frames import FRAME, HEADER, MAX_DEVICES, Kind
from xvcomm.wire.halves import Halves
from xvcomm.wire.progress import progress_address
from xvcomm.wire.records import UP

LAYOUT = RingLayout(lanes=1, slots=2, slot_bytes=PAGE, wired=True)
NAME, GROUP, THEIRS = 77, 8, 5
LEFT = Reason.LEFT.word(0)

progress = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(progress_address)


class Side:
    """A process's halves, and the other end of its only connection, at which the test is the other process.

    Attributes:
        number: of the half of which the newest OPEN has told.
    """

    def __init__(self):
        self.carrier = Carrier(0, 1)
        self.halves = Halves(self.carrier, None, lambda number: SimpleNamespace(direct=False, gone=False))
        self.link = self.carrier.add_link()
        self._theirs, self._ours = socket.socketpair()
        self._ours.setblocking(False)
        self._rail = self.carrier.rails[self.carrier.add_rail(self.link, 1, self._ours)]
        self._sent = self.number = 0

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

    def offer(self, name=NAME, producer=True):
        """Open the ring."""
        shape = (LAYOUT.lanes, LAYOUT.slots, LAYOUT.slot_bytes, producer, GROUP)
        self.send(Kind.OPEN, 1, shape + (0,) * (2 + MAX_DEVICES), slot=THEIRS, number=name)

    def receive(self):
        """The kinds and numbers of the frames that come, until there are none for a while."""
        data = b""
        self._theirs.settimeout(0.3)
        with contextlib.suppress(TimeoutError):
            while True:
                data += self._theirs.recv(1 << 16)
        found = []
        while data:
            header = np.frombuffer(data[:HEADER], FRAME)[0]
            found.append((Kind(header["kind"]), int(header["number"])))
            if header["kind"] == Kind.OPEN:
                self.number = int(header["slot"])
            data = data[HEADER + int(header["length"]) :]
        return found

    def open(self, name=NAME):
        return self.halves.open(self.link, name, LAYOUT, group=GROUP, peer=1, producer=False)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.carrier.close()
        self.halves.close()
        self._theirs.close()
        self._ours.close()


@pytest.fixture
def side():
    with Side() as side:
        yield side


def test_an_offer_of_a_ring_that_was_opened_and_closed_meanwhile(side):
    """The other side learns that the ring has stopped from the half that has its messages, and of no other half."""
    side.offer()
    end = side.open()
    assert side.receive() == [(Kind.OPEN, NAME)]
    side.send(Kind.OPEN, 0, (1, 2, PAGE, True, GROUP) + (0,) * (2 + MAX_DEVICES), slot=THEIRS, number=NAME)
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
        side.send(Kind.SLOT, side.number, [1], slot=9)
    else:
        side.send(Kind.CREDIT, side.number, [9], number=9)
    side.send(Kind.STOP, side.number, [10], number=LEFT)
    side.send(Kind.STOPPED, side.number)
    assert side.up and not side.halves.sweep()


def test_places_are_used_again(side):
    """More rings one after the other than two processes may have at a time."""
    for name in range(5000):
        end = side.open(name)
        end.abort(LEFT)
        end.close()
        side.halves.sweep()
    assert side.carrier.link(side.link).wire_count < 10
