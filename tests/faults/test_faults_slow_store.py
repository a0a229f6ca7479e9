"""The store that rank 0 serves is slow, or loses a connection, while ranks shrink: it has not ended, and they go on with it."""

import os
import signal
import threading

from shrinking import acting_at, works
from stores import variables

from xvcomm.errors import StoreError
from xvcomm.testing.inside import context
from xvcomm.testing.world import World


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
