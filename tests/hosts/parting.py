"""What a rank does of whose host the links go while it shrinks or grows: `parting.py PHASE WHERE REQUEST BEFORE`.

Both hosts have two of the four ranks, and each goes on by itself. All links are cut when rank WHERE makes so many requests to the
store, before or after one; if it makes fewer, afterwards.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from ranks import await_cut

import xvcomm
from xvcomm.errors import Aborted, DeadlineExceeded, PeerLost

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from shrinking import acting_at

FAILURES = PeerLost, Aborted, DeadlineExceeded


class Cut:
    """Waits until the links are cut, once."""

    def __init__(self):
        self._done = False

    def __call__(self):
        if not self._done:
            self._done = True
            await_cut()


@contextlib.contextmanager
def cut(rank, where, request, before):
    """All links are cut meanwhile, or afterwards."""
    if rank != where:
        yield
        return
    action = Cut()
    with acting_at(action, request, before):
        yield
    action()


def go_on(comm, ranks):
    """Shrink until only ranks of this host are left; the ranks, and how long it took after the cut."""
    begun = time.monotonic()
    while not ranks.issuperset(comm.job_ranks):
        with contextlib.suppress(PeerLost):
            while True:
                comm.all_reduce(np.zeros(1 << 10))
        comm = comm.shrink()
    assert comm.all_reduce(np.ones(1 << 18))[0] == comm.size
    comm.barrier()
    print(json.dumps([time.monotonic() - begun, comm.job_ranks]), flush=True)
    comm.close()


def shrink(comm, *how):
    """All are left when it begins."""
    comm.barrier()
    with cut(comm.rank, *how):
        made = comm.shrink()
    go_on(made, {rank for rank in range(4) if rank % 2 == comm.rank % 2})


def grow(comm, *how):
    """The last rank has been killed, and comes back meanwhile."""
    me = comm.rank
    if not os.environ.get("XVCOMM_REJOIN"):
        print("begun", flush=True)
        with contextlib.suppress(PeerLost):
            while True:
                comm.all_reduce(np.zeros(1 << 10))
        comm = comm.shrink()
        while comm.broadcast_object(comm.join_requests() if comm.rank == 0 else None, 0) < 1:
            time.sleep(0.02)
        with cut(me, *how):
            try:
                comm = comm.grow()
            except FAILURES:
                comm = comm.shrink()
    go_on(comm, {rank for rank in range(4) if rank % 2 == me % 2})


def main(phase, where, request, before):
    """Join the job, and do it; a process that wants to join again may learn that it cannot."""
    how = int(where), int(request), before == "before"
    try:
        comm = xvcomm.init()
    except xvcomm.XvcommError as error:
        assert os.environ.get("XVCOMM_REJOIN"), error
        print(json.dumps([0, []]), flush=True)
        return
    {"shrink": shrink, "grow": grow}[phase](comm, *how)


main(*sys.argv[1:])
