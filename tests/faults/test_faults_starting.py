"""A rank is killed at the end of its start, over several hosts: the others learn of it, though nothing joins them with it."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import xvcomm
from xvcomm.abc.store import ForwardingStore
from xvcomm.errors import PeerLost
from xvcomm.rendezvous.store import open_store
from xvcomm.testing.world import World
from xvcomm.types.deadline import NEVER, Deadline

SOON = 60.0
VICTIM, SIZE = 1, 4
HERE = {"XVCOMM_DEVICE": "host", "XVCOMM_TIMEOUT": "300"}


class Dying(ForwardingStore):
    """Kills this process when it begins to follow the notices of others, or once it has told that it has started besides."""

    def __init__(self, store, last, note):
        super().__init__(store)
        self._last, self._note, self._started = last, note, threading.Event()

    def exchange(self, steps, keys=(), deadline=NEVER, patience=float("inf")):
        if any(step.key.endswith("arrivals") for step in steps):
            super().exchange(steps, (), deadline)
            self._started.set()
            time.sleep(SOON)
        return super().exchange(steps, keys, deadline, patience)

    def notices(self, place, will, silence=b"", patience=float("inf"), deadline=NEVER):
        if self._last:
            self._started.wait(3)
        self._note.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def start(comm, last, note):
    """Join another job, and wait in it for another rank than the victim; who is lost, and when that is told."""
    store = open_store(os.environ["XVCOMM_STORE"], os.environ["XVCOMM_SECRET"], Deadline.after(SOON))
    if comm.rank == VICTIM:
        store = Dying(store, last, note)
    with pytest.raises(PeerLost) as caught, xvcomm.init(store=store) as other:
        other.recv(np.zeros(3), {0: 2, 2: 3, 3: 0}[comm.rank])
    return caught.value.peer, str(caught.value), time.monotonic()


@pytest.mark.parametrize("last", [False, True], ids=["before", "in the last round trip"])
def test_killed(tmp_path, last):
    folder = tmp_path / "shm"  # nobody is left on its host to remove what it has made
    folder.mkdir()
    with World(hosts="a,b,c:2", env={**HERE, "XVCOMM_SHM_DIR": str(folder)}) as world:
        outcomes = world.outcomes(start, last, tmp_path / "killed", timeout=SOON)
    killed = float(Path(tmp_path / "killed").read_text())
    assert isinstance(outcomes.pop(VICTIM), EOFError)
    for outcome in outcomes:
        assert isinstance(outcome, tuple), repr(outcome)
        peer, text, when = outcome
        print(f"{when - killed:.3f} s: {text}")
        assert peer == VICTIM
