"""Threads of the wire that the system refuses: those that run already end, and nothing is left of them."""

import _thread
import os
import socket
import threading

import pytest

from xvcomm.errors import ResourceError
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.network import Network

THREADS = 3


@pytest.fixture
def allowed(monkeypatch):
    """A function that lets so many more threads start."""
    start, left = _thread.start_new_thread, [0]

    def count(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("can't start new thread")
        return start(*arguments)

    def allow(number):
        left[0] = number
        monkeypatch.setattr(_thread, "start_new_thread", count)

    return allow


def held():
    """The threads of this process, and how many descriptors it has open."""
    return set(threading.enumerate()), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("started", range(THREADS))
def test_a_carrier_without_one_of_its_threads(allowed, started):
    before = held()
    allowed(started)
    with pytest.raises(ResourceError, match="cannot start the thread xvcomm-carrier"):
        Carrier(0, THREADS)
    assert held() == before


@pytest.mark.parametrize("started", range(THREADS + 1))
def test_a_network_without_one_of_its_threads(allowed, started):
    """The listener stays open, and is the caller's to close."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = held()
        allowed(started)
        with pytest.raises(ResourceError, match="cannot start the thread xvcomm-"):
            Network(
                0, 2, b"key", [listener], lambda _: (), 1.0, 0, THREADS, None, lambda *_: None, lambda _: None
            )  # fmt: skip
        assert held() == before
        assert listener.fileno() >= 0
