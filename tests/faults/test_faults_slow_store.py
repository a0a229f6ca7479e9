"""The store that rank 0 serves is slow, or loses a connection, while ranks shrink: it has not ended, and they go on with it."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from unittest import mock

from shrinking import SOON, acting_at, die, works
from stores import variables

from xvcomm.engine.session.succession import Succession
from xvcomm.errors import DeadlineExceeded, PeerLost, StoreError
from xvcomm.rendezvous.store.tcp import TcpStore
from xvcomm.system.processes import halted
from xvcomm.testing.inside import context
from xvcomm.testing.world import World
from xvcomm.types.deadline import Deadline


def shrink_with_a_slow_store(comm):
    """A request of rank 1 fails while the store's process is stopped for longer than it is tried; afterwards it answers."""
    server = context(comm).session.infos[0].pid

    def fail():
        os.kill(server, signal.SIGSTOP)
        threading.Timer(4, os.kill, (server, signal.SIGCONT)).start()
        raise StoreError("the connection was lost")

    group = comm.split(0)
    if comm.rank == 1:
        with acting_at(fail, 1, before=True):
            made = group.shrink(30)
    else:
        made = group.shrink()
    works(made, range(comm.size))
    made.close()
    comm.barrier()


def test_a_store_that_is_slow_once(tmp_path):
    with World(3, env=variables("rank 0", tmp_path / "store"), timeout=100) as world:
        world.run(shrink_with_a_slow_store)


def until(true):
    deadline = Deadline.after(SOON)
    while not true():
        assert not deadline.expired()
        time.sleep(0.01)


def shrink_as_the_store_answers_again(comm, folder):
    """Rank 1 asks rank 0 for a successor as that goes on, until it has seen that; rank 2 comes later, and finds the store."""
    pids, folder = comm.all_gather_object(os.getpid()), Path(folder)
    real, look = TcpStore.successor, Succession.look

    def successor(store, address, deadline):
        os.kill(pids[0], signal.SIGCONT)
        try:
            while True:
                with contextlib.suppress(DeadlineExceeded):
                    return real(store, address, Deadline.after(1))
                if (folder / "seen").exists():
                    raise DeadlineExceeded("no successor is served")
        finally:
            (folder / "tried").touch()

    def seen(succession):
        asked = succession._standby.wanted()
        look(succession)
        if asked:
            (folder / "seen").touch()

    if comm.rank == 3:
        die()
    try:
        comm.barrier()
    except PeerLost:
        (folder / str(comm.rank)).touch()
    if comm.rank == 1:
        until(lambda: (folder / "0").exists() and (folder / "2").exists())
        os.kill(pids[0], signal.SIGSTOP)
        until(lambda: halted(pids[0]))
        with mock.patch.object(TcpStore, "successor", successor):
            made = comm.shrink(timeout=20)
    else:
        with mock.patch.object(Succession, "look", seen) if comm.rank == 0 else contextlib.nullcontext():
            until((folder / "tried").exists)
        made = comm.shrink(timeout=20)
    works(made, range(3))
    made.close()


def test_a_store_that_answers_again_as_a_successor_is_asked_for(tmp_path):
    """Its server would serve one, since a rank of its host is lost; then some ranks would use that, and others the store."""
    with World(4, env=variables("rank 0", tmp_path / "store"), timeout=100) as world:
        *outcomes, victim = world.outcomes(shrink_as_the_store_answers_again, str(tmp_path))
    assert isinstance(victim, EOFError) and outcomes == [None] * 3
