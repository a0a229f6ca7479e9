"""Communicators over hosts that one rank uses and another one has closed."""

import ctypes

import numpy as np
import pytest

from xvcomm.errors import PeerLost
from xvcomm.testing import World
from xvcomm.testing.signals import Signals

COUNT = 400


def open_what_is_closed(comm):
    """Rank 1 closes many communicators, and keeps the interpreter's lock while rank 0 opens a ring of each."""
    groups, signals = [comm.split(0) for _ in range(COUNT)], Signals(comm)
    comm.barrier()  # so that there is a connection
    if comm.rank == 1:
        for group in groups:
            group.close()
        signals.tell("closed")
        ctypes.PyDLL(None).usleep(1_000_000)
        signals.hear("over", [0])
        return
    signals.hear("closed", [1])
    works = [group.irecv(np.zeros(3), 1) for group in groups]
    for work in works:
        with pytest.raises(PeerLost) as caught:
            work.wait(60)
        assert caught.value.peer == 1
    signals.tell("over")


def test_many_at_once(tmp_path):
    """Each wait ends. In a folder for a store nothing but the connection tells of a rank that leaves."""
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    with World(hosts="a,b", env={"XVCOMM_DEVICE": "host", "XVCOMM_STORE": f"file://{folder}"}) as world:
        world.run(open_what_is_closed)
