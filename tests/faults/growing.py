"""What ranks do in the tests of `grow`: others die, processes that take their places wait to join, and are taken in."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import numpy as np
import pytest
from shrinking import BIG, SOON, die, dying_at, own, shrunk, works

import xvcomm
from xvcomm.errors import PeerLost
from xvcomm.testing.arrays import arrays
from xvcomm.testing.signals import await_that


def grown(comm, timeout=None):
    """The communicator of all ranks and those that have asked to join, and how long it took to make."""
    begun = time.monotonic()
    made = comm.grow(timeout)
    seconds = time.monotonic() - begun
    assert seconds < SOON
    return made, seconds


def take_in(comm, count, timeout=None):
    """Grow once so many processes wait to join, and all ranks know of them."""
    await_that(lambda: comm.join_requests() >= count)
    comm.barrier()
    return grown(comm, timeout)


def store_address(comm):
    """In which the job meets."""
    return os.environ["XVCOMM_STORE"]


def lose(comm, victims):
    """The victims die, and the others shrink."""
    with contextlib.suppress(PeerLost):  # a victim may die while others are still in it
        comm.barrier()
    if own(comm) in victims:
        threading.Timer(0.05, die).start()
    a = arrays(comm)
    with pytest.raises(PeerLost):
        while True:
            a.get(comm.all_reduce(a.put(np.ones(BIG))))
    if own(comm) in victims:
        threading.Event().wait()  # else it could still shrink with the others, and die afterwards
    return shrunk(comm)[0]


def join(everyone):
    """In a restarted process: join the others, and check that all works."""
    with xvcomm.init() as comm:
        works(comm, everyone)


def join_or_die(request, before, everyone):
    """The same, but the process dies at one of its requests to the store; it dies at the end in any case."""
    with dying_at(request, before):
        comm = xvcomm.init()
    with contextlib.suppress(PeerLost):
        works(comm, everyone)
    die()


def restarted(world, victims, call, *args, join=join, joining=None, dead=()):
    """The results of the ranks that are left: the victims die, and others take their places.

    Args:
        join, joining: what these call, and its arguments; by default the ranks of the job.
        dead: further ranks that must have died at the end.
    """
    for rank in range(world.size):
        world.submit(rank, call, *args)
    for outcome in world.collect(*victims):
        assert isinstance(outcome, EOFError), outcome
    for victim in victims:
        world.restart(victim)
    for victim in victims:
        world.submit(victim, join, *((tuple(range(world.size)),) if joining is None else joining))
    found = world.collect()
    left = [outcome for rank, outcome in enumerate(found) if rank not in victims and rank not in dead]
    for outcome in left:
        assert not isinstance(outcome, BaseException), outcome
    for rank, outcome in enumerate(found):
        if rank in dead:
            assert isinstance(outcome, EOFError), f"rank {rank}: {outcome!r}"
        elif rank in victims:
            assert not isinstance(outcome, BaseException), f"rank {rank}: {outcome!r}"
    return left
