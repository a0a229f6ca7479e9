"""At which connections a thread that waits looks."""

import ctypes
import socket

import numpy as np
import pytest

import xvcomm.wire.carrier
from xvcomm.memory.ring import COPIES, EXPECTS
from xvcomm.wire import records
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.frames import FRAME, Kind
from xvcomm.wire.progress import progress_address
from xvcomm.wire.records import AWAKE, CALLED, RESTS

progress = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(progress_address)


class Connections:
    """Connections of one link, whose other ends send what they are told to.

    Attributes:
        helpers: records of the carrier's further threads.
    """

    def __init__(self, count, states=(), routes=1):
        self._carrier = Carrier(0, 1 + len(states))
        address = records.Carrier.from_address(self._carrier.address).helpers
        memory = (ctypes.c_byte * (len(states) * records.HELPER.itemsize)).from_address(address)
        self.helpers = np.ndarray(len(states), records.HELPER, memory)
        self.helpers["resting"] = states
        link = self._carrier.add_link()
        self._pairs = [socket.socketpair() for _ in range(count)]
        for _, ours in self._pairs:
            ours.setblocking(False)
        indices = [self._carrier.add_rail(link, 1, 1 + i % routes, ours) for i, (_, ours) in enumerate(self._pairs)]
        self._rails = [self._carrier.rails[index] for index in indices]

    def send(self, index):
        header = np.zeros((), FRAME)
        header["kind"], header["number"] = Kind.PONG, 1
        self._pairs[index][0].sendall(header.tobytes())

    def carries(self, haste):
        """Whether a call receives anything."""
        return progress(self._carrier.address, 0, haste) > 0

    def looks(self, index, haste):
        """How many calls it takes until this connection has received what was sent."""
        before, calls = self._rails[index].received, 0
        while self._rails[index].received == before:
            self.carries(haste)
            calls += 1
            assert calls < 1000
        return calls

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._carrier.close()
        for pair in self._pairs:
            for each in pair:
                each.close()


class Absent:
    """A thread of the carrier that never runs."""

    def __init__(self, name, target):
        """As of a thread."""

    def start(self):
        """As of a thread."""

    def join(self, timeout=None):
        """As of a thread."""


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Nothing is received but by the calls of a test."""
    monkeypatch.setattr(xvcomm.wire.carrier, "Daemon", Absent)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 12, 16, 31])
def test_no_connection_is_left_out(count):
    """A call looks at all of them, or at three of many and the one that has received something last."""
    with Connections(count) as connections:
        most = 0
        for number in range(3 * count):
            first, second = number % count, (5 * number + number // count) % count
            connections.send(first)
            assert connections.looks(first, 0) == 1
            connections.send(second)
            most = max(most, connections.looks(second, EXPECTS))
            connections.send(second)
            assert connections.looks(second, EXPECTS) == 1
        assert most == max(1, -(-(count - 1) // 3))


def test_several_routes_are_all_looked_at():
    """Each connection must come to carry something, and so be measured."""
    with Connections(12, routes=2) as connections:
        for index in range(12):
            connections.send(index)
            assert connections.looks(index, EXPECTS) == 1


@pytest.mark.parametrize(("states", "carries", "then"), [
    ([], True, []),
    ([RESTS], True, [CALLED]),
    ([CALLED, RESTS], True, [CALLED, RESTS]),
    ([RESTS, AWAKE], False, [RESTS, AWAKE]),
])  # fmt: skip
def test_who_copies_leaves_carrying_to_a_thread_that_is_awake(states, carries, then):
    """If all sleep, the caller wakes one and carries until that one runs."""
    with Connections(2, states) as connections:
        connections.send(0)
        assert connections.carries(COPIES) == carries
        assert connections.helpers["resting"].tolist() == then
