"""Ranks are lost, the others go on, and processes that take the places of the lost ones join them by `grow`."""

import contextlib
import time

import numpy as np
import pytest
from growing import grown, join, join_or_die, lose, restarted, store_address, take_in
from shrinking import die, dying_at, own, shrunk, works
from stores import KINDS, variables

import xvcomm
from xvcomm.errors import (
    ArgumentError,
    ClosedError,
    PeerLost,
)
from xvcomm.testing.signals import await_that
from xvcomm.testing.world import World

ISLANDS = {"islands": "a:2,b:1"}
HOSTS = {"hosts": "a:2,b:1"}


@pytest.fixture(params=KINDS)
def store(request, tmp_path):
    """Variables of a job with each kind of store."""
    return variables(request.param, tmp_path / "store")


def lose_and_take_in(comm, victims):
    everyone = comm.job_ranks
    made, seconds = take_in(lose(comm, victims), len(victims))
    works(made, everyone)
    made.close()
    return seconds


@pytest.mark.parametrize(
    "places, victims",
    [
        ({"size": 3}, (1,)), ({"size": 2}, (0,)), ({"islands": "a:2,b:2"}, (2, 3)), ({"islands": "a,b,a"}, (0, 1)),
        ({"hosts": "a:2,b:2"}, (3,)), ({"hosts": "a:2,b:2"}, (0, 1)),
    ],
)  # fmt: skip
def test_lost_ranks_come_back(places, victims):
    """Each with its old number; also whole islands and hosts."""
    with World(**places) as world:
        print("seconds:", restarted(world, victims, lose_and_take_in, victims))


@pytest.mark.parametrize("places", [ISLANDS, HOSTS], ids=["islands", "hosts"])
def test_stores(places, store):
    """Also a store that ends with rank 0, if that lives."""
    with World(**places, env=store) as world:
        restarted(world, (2,), lose_and_take_in, (2,))


def lose_two_and_take_in_one(comm):
    """A rank keeps its number where others are missing, and programs know it by that."""
    left = lose(comm, (1, 2))
    assert left.job_ranks == (0, 3)
    made, _ = take_in(left, 1)
    works(made, (0, 2, 3))
    made.close()


def test_numbers():
    with World(4) as world:
        for rank in range(4):
            world.submit(rank, lose_two_and_take_in_one)
        assert all(isinstance(outcome, EOFError) for outcome in world.collect(1, 2))
        world.restart(2)
        world.submit(2, join, (0, 2, 3))
        for outcome in world.collect(0, 3, 2):
            assert not isinstance(outcome, BaseException), outcome


def take_in_one_more(comm):
    made, _ = take_in(comm, 1)
    works(made, (0, 1, 2, 3))
    made.close()


def join_beside(address, everyone):
    """One that wants a number which is taken gets the next one after all others."""
    with xvcomm.init(rank=1, size=3, store=address) as comm:
        assert comm.rank == 3
        works(comm, everyone)


def test_a_job_becomes_larger():
    """Nothing needs to be lost before."""
    with World(3) as world, World(1) as beside:
        address = world.run(store_address)[0]
        for rank in range(3):
            world.submit(rank, take_in_one_more)
        beside.kill(0)
        beside.restart(0, XVCOMM_LOCAL_RANK="", XVCOMM_LOCAL_SIZE="")
        beside.submit(0, join_beside, address, (0, 1, 2, 3))
        for outcome in (*world.collect(), *beside.collect()):
            assert not isinstance(outcome, BaseException), outcome


def grow_alone(comm):
    """Without join requests `grow` does what `shrink` does without a loss; and what it refuses."""
    part = comm.split(0)
    with pytest.raises(ArgumentError, match="whole job"):
        part.grow()
    with pytest.raises(ArgumentError, match="whole job"):
        part.join_requests()
    assert comm.join_requests() == 0
    made, _ = grown(comm)
    works(made, comm.job_ranks)
    part.barrier()
    with pytest.raises(ClosedError, match="grown"):
        comm.barrier()
    with pytest.raises(ClosedError, match="grown"):
        comm.grow()
    with pytest.raises(ClosedError, match="grown"):
        comm.join_requests()
    made, _ = shrunk(made)
    made, _ = grown(made)
    works(made, comm.job_ranks)
    comm.close()  # without effect
    made.barrier()
    made.close()
    with pytest.raises(ClosedError):
        part.barrier()
    with pytest.raises(ClosedError):
        made.join_requests()


@pytest.mark.parametrize("places", [ISLANDS, HOSTS], ids=["islands", "hosts"])
def test_nobody_applies(places):
    with World(**places) as world:
        world.run(grow_alone)


def groups_end(comm):
    """The communicators of the job before are closed; the `with` block of the first one closes the last one."""
    with comm:
        left = lose(comm, (1,))
        part = left.split(0)
        left.barrier()
        work = part.irecv(np.empty(8, np.int32), 1 - part.rank)
        await_that(lambda: left.join_requests() > 0)
        if part.rank == 0:
            time.sleep(0.5)  # the other rank waits for it in `grow`
        made, _ = grown(left)
        with pytest.raises(ClosedError, match=r"has grown; make .* anew by split\(\)"):
            work.wait()
        with pytest.raises(ClosedError, match=r"has grown; make .* anew by split\(\)"):
            part.barrier()
        with pytest.raises(ClosedError, match="grown"):
            left.barrier()
        works(made, comm.job_ranks)
    with pytest.raises(ClosedError):
        made.barrier()


def test_other_communicators():
    with World(3) as world:
        restarted(world, (1,), groups_end)


def turns(comm):
    """The next communicator of the processes has all of them as well."""
    lose_and_take_in(comm, (1,))
    with xvcomm.init() as following:
        works(following, comm.job_ranks)


def join_and_begin_anew(everyone):
    join(everyone)
    join(everyone)


def test_the_next_job_of_these_processes():
    with World(2) as world:
        restarted(world, (1,), turns, join=join_and_begin_anew)


def after_one_that_dies(comm, request, before):
    """The newcomer may die at any point: the ranks go on without it, or lose it afterwards."""
    left = lose(comm, (1,))
    if request > _ASKS or (request == _ASKS and not before):
        await_that(lambda: left.join_requests() > 0)
    left.barrier()
    made, seconds = grown(left)
    if made.size > left.size:
        with pytest.raises(PeerLost):
            works(made, comm.job_ranks)
            made.barrier()
        made, _ = shrunk(made)
    works(made, left.job_ranks)
    made.close()
    return round(seconds, 3)


_ASKS = 3
"""The request to the store by which a process asks to join."""


@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("request_number", range(0, 28, 3))
def test_a_newcomer_is_killed(request_number, before):
    with World(**(HOSTS if before else ISLANDS), timeout=100) as world:
        places, call = (request_number, before, (0, 1, 2)), after_one_that_dies
        print(restarted(world, (1,), call, request_number, before, join=join_or_die, joining=places, dead=(1,)))


def die_in_grow(comm, first, victim, request, before):
    """A member may die at any point when it grows: all others raise the loss, and shrink, with the newcomer or without it."""
    left = lose(comm, (first,))
    await_that(lambda: left.join_requests() > 0)
    with contextlib.suppress(PeerLost):
        left.barrier()
        with dying_at(request, before) if own(comm) == victim else contextlib.nullcontext():
            left, _ = grown(left)
        if own(comm) == victim:
            die()
        left.barrier()
    return finish(left, first, victim)


def finish(comm, first, victim):
    """Go on without the victim, and take in a newcomer that is not there yet."""
    comm, _ = shrunk(comm)
    assert victim not in comm.job_ranks
    if first not in comm.job_ranks:
        comm, _ = take_in(comm, 1)
    works(comm, [rank for rank in range(4) if rank != victim])
    comm.close()


def join_and_lose(victim):
    """A newcomer goes on without the victim, also if it is lost before this one has joined."""
    comm = xvcomm.init()
    if victim in comm.job_ranks:
        with pytest.raises(PeerLost):
            comm.barrier()
        comm, _ = shrunk(comm)
    works(comm, [rank for rank in range(4) if rank != victim])
    comm.close()


@pytest.mark.parametrize("before", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("request_number", range(0, 30, 4))
def test_a_member_is_killed(victim, request_number, before):
    first = 1
    with World(**({"hosts": "a:2,b:2"} if before else {"islands": "a:2,b:2"}), timeout=100) as world:
        call = die_in_grow, first, victim, request_number, before
        restarted(world, (first,), *call, join=join_and_lose, joining=(victim,), dead=(victim,))


def shrink_while_others_grow(comm):
    """Those that have noticed a loss shrink, while others are about to grow: these notice it there, and shrink too."""
    left = lose(comm, (1,))
    await_that(lambda: left.join_requests() > 0)
    left.barrier()
    if own(comm) == 3:
        die()
    if own(comm) == 0:
        with pytest.raises(PeerLost):
            left.barrier()
    else:
        with pytest.raises(PeerLost, match="go on without it by shrink"):
            left.grow()
        with pytest.raises(PeerLost):
            left.grow()
    made, _ = shrunk(left)
    works(made, (0, 2))
    made, _ = take_in(made, 1)
    works(made, (0, 1, 2))
    made.close()


def test_some_shrink():
    with World(4) as world:
        restarted(world, (1,), shrink_while_others_grow, joining=((0, 1, 2),), dead=(3,))


def shrink_together(comm):
    """Some shrink without a loss while others grow: all get one communicator, without the newcomer."""
    left = lose(comm, (1,))
    await_that(lambda: left.join_requests() > 0)
    left.barrier()
    made, _ = shrunk(left) if own(comm) == 0 else grown(left)
    works(made, (0, 2))
    made, _ = take_in(made, 1)
    works(made, comm.job_ranks)
    made.close()


def test_some_shrink_without_a_loss():
    with World(3) as world:
        restarted(world, (1,), shrink_together)
