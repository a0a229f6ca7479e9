"""`shrink(exclude=...)` leaves out ranks that live: they must not spoil what the others agree on."""

import time
from unittest import mock

import pytest
from shrinking import shrunk, works

from xvcomm.engine.session.survivors import DISCORD_SECONDS
from xvcomm.errors import Aborted, DeadlineExceeded
from xvcomm.rendezvous.store.tcp import TcpStore
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals, await_that
from xvcomm.testing.world import World


def await_come(group, *ranks):
    """Wait until ranks are in their first shrink."""
    session, path = context(group).session, context(group).path
    await_that(lambda: all(session.store.has(f"shrink/{path}/0/here/{rank}") for rank in ranks))


def decides_late():
    """The first rank of those that go on is slow when it decides."""
    real = TcpStore.decide

    def decide(*args, **kwargs):
        time.sleep(1)
        return real(*args, **kwargs)

    return mock.patch.object(TcpStore, "decide", decide)


def excluded_first(comm, timeout):
    """The lowest rank is left out, and comes before the last of the others; it may give up before, and try again."""
    group, signals = comm.split(0), Signals(comm)
    if comm.rank == 0:
        if timeout is not None:
            await_come(group, 1)
            with pytest.raises(DeadlineExceeded, match="rank 1 of the job leaves out this rank") as caught:
                group.shrink(timeout)
            assert caught.value.peer == 1
            signals.tell("gave up")
        with pytest.raises(Aborted, match="go on without this rank"):
            group.shrink()
    elif comm.rank == 1:
        with decides_late():
            made, _ = shrunk(group, exclude=[0])
    else:
        if timeout is not None:
            signals.hear("gave up", [0])
        await_come(group, 0, 1)
        time.sleep(DISCORD_SECONDS + 0.5)  # rank 0 could decide by now
        made, _ = shrunk(group, exclude=[0])
    if comm.rank:
        works(made, [1, 2])
        made.close()
    comm.barrier()


@pytest.mark.parametrize("timeout", [None, 0.5], ids=["waits", "gives up"])
def test_the_lowest_rank_is_excluded(timeout):
    with World(hosts="a,b,c") as world:
        world.run(excluded_first, timeout)


def excluded_by_one(comm):
    """The ranks that go on do not name the same."""
    group = comm.split(0)
    told = (
        "leaves out this rank"
        if comm.rank == 0
        else r"exclude different ranks: .*rank 1 none, rank 2 \[0\]; all that go on"
    )
    with pytest.raises(DeadlineExceeded, match=told):
        group.shrink(2, exclude=[0] if comm.rank == 2 else [])
    comm.barrier()


def test_ranks_exclude_different_ranks():
    with World(hosts="a,b,c") as world:
        world.run(excluded_by_one)
