"""Ranks are lost in every phase, and the others go on in a communicator that `shrink` makes of them."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from shrinking import BIG, SOON, die, dying_at, outcomes, own, shrunk, works

from xvcomm.errors import Aborted, ArgumentError, ClosedError, DeadlineExceeded, PeerLost, XvcommError
from xvcomm.rendezvous.store.tcp import TcpStore
from xvcomm.testing.inside import context
from xvcomm.testing.signals import Signals, await_that
from xvcomm.testing.world import World


@pytest.fixture
def served():
    """Variables of a job whose store ends with rank 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"XVCOMM_STORE": f"tcp://127.0.0.1:{probe.getsockname()[1]}"}


def losing(call):
    """Call until a rank is lost."""
    with contextlib.suppress(PeerLost):
        while True:
            call()


def phase(comm, name, victims):
    """The victims die in this phase of the program, and the others notice."""
    doomed = own(comm) in victims
    others = [r for r in range(comm.size) if comm.job_ranks[r] not in victims]
    victim = comm.job_ranks.index(victims[0])
    with contextlib.suppress(PeerLost):  # a victim may die while others are still in it
        comm.barrier()
    if doomed and name in ("idle", "recv"):
        die()
    elif doomed:
        threading.Timer(0.05, die).start()
    if name in ("idle", "all_reduce"):
        losing(lambda: comm.all_reduce(np.ones(BIG)))
    elif name == "barrier":
        losing(comm.barrier)
    elif name in ("send", "recv"):
        if doomed:
            comm.send(np.ones(64 * BIG, np.uint8), others[0])
            time.sleep(SOON)
        losing(lambda: comm.recv(np.ones(64 * BIG, np.uint8), victim))
    elif name == "asynchronous":
        if doomed:
            time.sleep(SOON)
        work = comm.irecv(np.ones(3), victim)
        losing(work.wait)
    if doomed:  # by the other victim's death it may have come here before its own
        time.sleep(SOON)


def survive(comm, name, *victims):
    phase(comm, name, victims)
    made, seconds = shrunk(comm)
    works(made, [r for r in comm.job_ranks if r not in victims])
    made.close()
    return seconds


@pytest.mark.parametrize("name", ["idle", "all_reduce", "barrier", "send", "recv", "asynchronous"])
@pytest.mark.parametrize("topology, victim", [("a:2", 1), ("a:2,b:2", 2), ("a:3", 0)])
def test_a_rank_is_killed(topology, victim, name):
    with World(islands=topology) as world:
        print("seconds:", outcomes(world, [victim], survive, name, victim))


@pytest.mark.parametrize(
    "topology, victims", [("a:4", (1, 2)), ("a:2,b:2", (2, 3)), ("a:2,b:2", (0, 1)), ("a,b,a", (0, 1))]
)
def test_several_are_killed(topology, victims):
    """Also a whole island, and all but one rank."""
    with World(islands=topology) as world:
        outcomes(world, victims, survive, "all_reduce", *victims)


def survive_in_turn(comm, which):
    """The first or the last rank dies, in each communicator that was made of those that are left."""
    while comm.size > 1:
        left = [rank for rank in comm.job_ranks if rank != comm.job_ranks[which]]
        phase(comm, "all_reduce", [comm.job_ranks[which]])
        comm, _ = shrunk(comm)
        works(comm, left)
    comm.close()


def test_one_after_the_other():
    """The second and the third death are noticed as the first one was."""
    with World(islands="a:2,b:2") as world:
        outcomes(world, [1, 2, 3], survive_in_turn, -1)


@pytest.mark.parametrize("places", [{"islands": "a:2,b:2"}, {"hosts": "a,b:2,a"}], ids=["islands", "hosts"])
def test_the_servers_of_the_store_are_killed(places, served):
    """Also each rank that serves the store in place of the one before."""
    with World(**places, env=served) as world:
        outcomes(world, [0, 1, 2], survive_in_turn, 0)


@pytest.mark.parametrize(
    "places, victims", [({"size": 3}, (0,)), ({"islands": "a:2,b:2"}, (0, 1)), ({"hosts": "a:2,b:2"}, (0, 1))]
)
@pytest.mark.parametrize("name", ["idle", "send"])
def test_the_server_of_the_store_is_killed(places, victims, name, served):
    """Alone, or with all ranks of its island or host."""
    with World(**places, env=served) as world:
        print("seconds:", outcomes(world, victims, survive, name, *victims))


def die_in_shrink(comm, first, victim, request, before):
    """One rank dies, and the victim when it shrinks; the victim goes on if it has made fewer requests."""
    phase(comm, "idle", [first])
    with dying_at(request, before) if own(comm) == victim else contextlib.nullcontext():
        made, seconds = shrunk(comm)
    while True:
        with contextlib.suppress(PeerLost):
            if own(comm) == victim:
                die()
            made.barrier()
        if victim not in made.job_ranks:
            break
        made, seconds = shrunk(made)
    works(made, [r for r in range(comm.size) if r not in (first, victim)])
    made.close()
    return seconds


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("request_number", range(0, 20, 3))
def test_a_rank_is_killed_in_shrink(victim, request_number):
    """Wherever another rank dies meanwhile, all that are left make the same communicator."""
    with World(islands="a:3,b:2") as world:
        outcomes(world, [2, victim], die_in_shrink, 2, victim, request_number, request_number % 2)


@pytest.mark.parametrize("first, victim", [(2, 0), (0, 1), (0, 3)])
@pytest.mark.parametrize("request_number", range(1, 20, 5))
def test_a_server_is_killed_in_shrink(first, victim, request_number, served):
    """The store ends in the middle of an agreement, or the one that takes its place does, or another rank at that time."""
    with World(hosts="a:2,b:2", env=served) as world:
        outcomes(world, [first, victim], die_in_shrink, first, victim, request_number, request_number % 2)


def train(comm, steps, deaths):
    """Data-parallel training of one weight: each rank has a gradient of its own; ranks die at steps of theirs."""
    mine, me, weight, done = float(own(comm) + 1), own(comm), 0.0, 0
    while done < steps:
        try:
            if deaths.get(me) == done:
                die()
            gradient = comm.all_reduce(np.full(1000, mine), "avg")
            assert (gradient == np.mean([r + 1 for r in comm.job_ranks])).all()
            weight, done = weight + gradient[0], done + 1
        except PeerLost:
            comm, _ = shrunk(comm)
            # A rank may have completed the step in which another one lost the third.
            state = min(comm.all_gather_object((done, weight)))
            done, weight = state
    comm.barrier()
    comm.close()
    return weight


def test_training_goes_on():
    with World(4) as world:
        weights = outcomes(world, [1, 3], train, 12, {3: 4, 1: 8})
    assert len(set(weights)) == 1
    # four steps of all ranks, four of 0 to 2, four of 0 and 2
    assert weights[0] == pytest.approx(4 * 2.5 + 4 * 2 + 4 * 2)


def shrink_healthy(comm):
    """Without a loss the new communicator has the same ranks; the old one is closed, and its `with` block closes the new one."""
    inner = comm.split(0)
    with inner as first:
        work = first.irecv(np.zeros(3), (comm.rank + 1) % comm.size)
        second, _ = shrunk(first)
        with pytest.raises((ClosedError, PeerLost)):
            work.wait()
        with pytest.raises(ClosedError, match="shrunk"):
            first.barrier()
        with pytest.raises(ClosedError, match="shrunk"):
            first.shrink()
        first.close()
        works(second, comm.job_ranks)
        third, _ = shrunk(second)
        works(third, comm.job_ranks)
    with pytest.raises(ClosedError):
        third.barrier()
    with pytest.raises(ClosedError, match="closed"):
        third.shrink()
    works(comm, comm.job_ranks)


def shrink_whole(comm):
    """Closing what was made of the job's communicator closes the job."""
    beside = comm.split(0)
    made, _ = shrunk(comm)
    beside.barrier()
    made.barrier()
    comm.close()
    made.barrier()
    made.close()
    with pytest.raises(ClosedError):
        beside.barrier()


@pytest.mark.parametrize("topology", ["a:3", "a:2,b:1"])
def test_without_a_loss(topology):
    with World(islands=topology) as world:
        world.run(shrink_healthy)
        world.run(shrink_whole)


def after_errors(comm):
    """All ranks are left after an abort, or a deadline."""
    for end in ("abort", "deadline"):
        group = comm.split(0)
        with pytest.raises((Aborted, DeadlineExceeded)):
            if end == "abort" and comm.rank == 0:
                group.abort("enough")
            if end == "deadline" and comm.rank == 0:
                group.recv(np.zeros(3), 1, timeout=0.1)
            group.barrier()
        made, _ = shrunk(group)
        works(made, comm.job_ranks)
        made.close()


def wait_in_vain(comm):
    """Rank 0 does not come at first: the others name it, and it can come later, as can they."""
    group, signals = comm.split(0), Signals(comm)
    if comm.rank == 0:
        signals.hear("late", range(1, comm.size))
    with pytest.raises(DeadlineExceeded, match=r"shrink: rank 0 on .* did not come in time") as caught:
        group.shrink(0.5 if comm.rank else None)
    assert caught.value.peer == 0 and caught.value.op == "shrink"
    signals.tell("late")
    made, _ = shrunk(group)
    works(made, comm.job_ranks)
    made.close()


def without_the_departed(comm):
    """A rank that closes the communicator, and lives on, is not waited for."""
    group, signals, last = comm.split(0), Signals(comm), comm.size - 1
    if comm.rank == last:
        group.close()
        signals.tell("left")
        comm.barrier()
        return
    signals.hear("left", [last])
    await_that(lambda: last in context(group).lifecycle.departed)
    made, _ = shrunk(group)
    works(made, range(last))
    made.close()
    comm.barrier()


def without_one_that_lives(comm):
    """A rank that hangs can be left out; it learns of it when it shrinks, too."""
    last = comm.size - 1
    with pytest.raises(ArgumentError, match="exclude"):
        comm.shrink(exclude=[comm.rank])
    with pytest.raises(ArgumentError, match="exclude"):
        comm.shrink(exclude=[comm.size])
    group, signals = comm.split(0), Signals(comm)
    if comm.rank == last:
        signals.hear("shrunk", range(last))
        with pytest.raises(Aborted, match="go on without this rank"):
            group.shrink()
    else:
        made = group.shrink(exclude=[last])
        works(made, range(last))
        made.close()
        signals.tell("shrunk")
    comm.barrier()


def of_a_subgroup(comm):
    """The others of the job take no part, and their communicators work."""
    if comm.rank == 0:
        comm.recv_object(1)
        return
    group = comm.subgroup(range(1, comm.size), "part")
    made, _ = shrunk(group)
    works(made, range(1, comm.size))
    made.close()
    if comm.rank == 1:
        comm.send_object("done", 0)


def wait_for_one_that_shrinks(comm):
    """A rank that waits in an operation for one that shrinks learns of it, and can shrink too."""
    group = comm.split(0)
    group.barrier()
    if comm.rank == 0:
        with pytest.raises(PeerLost):
            group.recv(np.zeros(3), 1)
    made, _ = shrunk(group)
    works(made, comm.job_ranks)
    made.close()


@pytest.mark.parametrize(
    "check",
    [
        after_errors, wait_in_vain, without_the_departed, without_one_that_lives, of_a_subgroup,
        wait_for_one_that_shrinks,
    ],
)  # fmt: skip
def test_living_ranks(check):
    with World(3) as world:
        world.run(check)


def leave(comm, which):
    """A rank ends by an error of its own, and closes the job."""
    if comm.rank == which:
        comm.close()
        return
    with pytest.raises(PeerLost):
        comm.barrier()
    made, _ = shrunk(comm)
    works(made, [rank for rank in range(comm.size) if rank != which])
    made.close()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("places", [{"size": 3}, {"hosts": "a,b:2"}], ids=["islands", "hosts"])
def test_a_rank_that_left(places, which, served):
    """The others do not wait until it has ended, also if it serves the store."""
    with World(**places, env=served) as world:
        world.run(leave, which)


def requests_of_the_last(comm):
    """How many requests to the store the last rank makes, which finds that all others have closed the communicator."""
    group, last, made = comm.split(0), comm.size - 1, []
    if comm.rank == last:
        await_that(lambda: len(context(group).lifecycle.departed) == last)

    def counted(real):
        def call(*args, **kwargs):
            made.append(args)
            return real(*args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for name in ("set", "get", "wait", "add", "decide"):
            patches.enter_context(mock.patch.object(TcpStore, name, counted(getattr(TcpStore, name))))
        after, _ = shrunk(group)
    works(after, range(comm.size))
    after.close()
    return len(made) if comm.rank == last else None


def test_requests_do_not_grow_with_the_ranks():
    """But for the rank that decides."""
    counts = []
    for size in (3, 9):
        with World(size) as world:
            counts.append(world.run(requests_of_the_last)[-1])
    assert counts[1] <= counts[0] + 3, counts  # some requests are repeated every 0.1 s


def resources(comm):
    """Descriptors, threads, mappings of shared memory, the job's files of it, and connections to other hosts.

    Threads of asyncio's pool are not counted: it has as many, up to a bound, as calls that were once under way at the same time.
    """
    threads = sum(not thread.name.startswith("asyncio") for thread in threading.enumerate())
    maps = Path("/proc/self/maps").read_text().count("xvcomm")
    files = list(Path("/dev/shm").glob(f"xvcomm-{context(comm).session.name}-*"))
    return len(os.listdir("/proc/self/fd")), threads, maps, len(files), len(comm.rails())


def shrink_often(comm, times):
    group, before = comm.split(0), None
    for number in range(times):
        group.all_reduce(np.ones(1000))
        group.sendrecv(np.ones(10), (comm.rank + 1) % comm.size, np.ones(10), (comm.rank - 1) % comm.size)
        group, _ = shrunk(group)
        comm.barrier()
        if number == 5:
            before = resources(comm)
            comm.barrier()

    def excess():
        """What a thread of the network frees a moment later is not counted."""
        return [now - then for now, then in zip(resources(comm), before, strict=True)]

    with contextlib.suppress(AssertionError):
        await_that(lambda: max(excess()) <= 0)
    found = excess()
    comm.barrier()
    group.close()
    return found


@pytest.mark.parametrize("options", [{"islands": "a:2,b:1"}, {"hosts": "a:2,b:1"}], ids=["islands", "hosts"])
def test_nothing_is_left_of_fifty(options):
    with World(**options) as world:
        for excess in world.run(shrink_often, 56):
            assert max(excess) <= 0, f"descriptors, threads, mappings, files, connections: {excess} more than before"


def decided_out(comm):
    """The others have lost rank 1, which lives: it is told, and they go on."""
    liveness = context(comm).session.liveness
    if comm.rank == 0:
        gone = liveness.gone
        with mock.patch.object(liveness, "gone", lambda rank: rank == 1 or gone(rank)):
            made, _ = shrunk(comm)
        works(made, [0, 2])
        return
    if comm.rank == 1:
        with pytest.raises(Aborted, match="go on without this rank, rank 1 on b") as caught:
            comm.shrink()
        assert caught.value.peer == 0
        return
    made, _ = shrunk(comm)
    works(made, [0, 2])


def test_a_rank_that_the_others_have_lost():
    with World(hosts="a,b,c", timeout=100) as world:
        for outcome in world.outcomes(decided_out):
            assert not isinstance(outcome, XvcommError), outcome
