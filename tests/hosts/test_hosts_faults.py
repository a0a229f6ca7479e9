"""Faults of jobs over several hosts: on host labels, and between network namespaces."""

import ctypes
import re
import time

import numpy as np
import pytest

from xvcomm.errors import DeadlineExceeded, PeerLost
from xvcomm.testing import World, failures
from xvcomm.testing.signals import Signals

HOST = {"XVCOMM_DEVICE": "host"}


@pytest.fixture(scope="module", params=["a,b", "a:2,b:1", "a,b,a,b"])
def world(request):
    with World(hosts=request.param, env=HOST) as ranks:
        yield ranks


@pytest.mark.parametrize("check", failures.CHECKS)
def test_check(world, check):
    world.run(check)


def depart(comm, first, what):
    """The last rank closes a communicator in which nothing was called, before or after the others begin to wait for it."""
    group, signals, last = comm.split(0), Signals(comm), comm.size - 1
    if comm.rank == last:
        if not first:
            signals.hear("waiting", range(last))
            time.sleep(0.1)
        group.close()
        signals.tell("left")
        return None
    signals.tell("waiting")
    if first:
        signals.hear("left", [last])
    calls = {
        "recv": lambda: group.recv(np.zeros(3), last),
        "send": lambda: group.send(np.zeros(1 << 22), last),
        "probe": lambda: group.probe(last, channel=3),
        "barrier": group.barrier,
    }
    try:
        calls[what]()
    except PeerLost as error:
        return str(error)
    finally:
        group.close()


@pytest.mark.parametrize("what", ["recv", "send", "probe", "barrier"])
@pytest.mark.parametrize("first", [True, False], ids=["before", "meanwhile"])
def test_departure(world, what, first):
    """A wait for a rank that has closed the communicator fails, also if that rank never opened the ring."""
    for text in world.run(depart, first, what)[:-1]:
        assert f"rank {world.size - 1} on " in text and " left; " in text


def stuck(comm, milliseconds):
    """Rank 1 holds the interpreter while rank 0 waits for it."""
    group = comm.split(0)
    group.all_reduce(np.zeros(3))
    if comm.rank == 1:
        ctypes.PyDLL(None).usleep(1000 * milliseconds)  # which does not release the interpreter's lock
    try:
        group.recv(np.zeros(7), 1 - comm.rank, timeout=0.3)
    except DeadlineExceeded as error:
        return str(error)
    finally:
        group.close()


def test_last_words_of_a_stuck_rank():
    """A rank whose interpreter is stuck still says what it did last, also where no ring leads to it."""
    with World(hosts="a,b", env=HOST) as ranks:
        first, _ = ranks.run(stuck, 1500)
    assert re.search(
        r"rank 1: its last operation: all_reduce #0 of 3 x float64 at test_hosts_faults.py:\d+ \(done\)", first
    )
