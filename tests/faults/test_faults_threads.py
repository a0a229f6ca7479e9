"""Several threads of one rank: waits do not block other threads, and messages of a ring keep their order."""

import threading
import time
from unittest import mock

import numpy as np
import pytest

from xvcomm.engine.context import Context
from xvcomm.errors import Aborted, PeerLost
from xvcomm.testing.world import World

LIMIT = 100


@pytest.fixture(params=["a:2", "a,b"])
def pair(request):
    with World(islands=request.param, timeout=LIMIT) as world:
        yield world


def in_threads(*functions):
    """Run all functions concurrently; raises the error of one of them."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def two_communicators(comm):
    """Each thread has its own; collectives and messages of both run concurrently."""
    subs = [comm.split(0) for _ in range(2)]

    def work(sub, seed):
        draw = np.random.default_rng(seed)
        for _ in range(60):
            count = int(draw.integers(1, 60_000))
            assert (sub.all_reduce(np.full(count, 1.0 + seed)) == sub.size * (1.0 + seed)).all()
            got = sub.sendrecv(np.full(count, sub.rank), 1 - sub.rank, np.empty(count, np.int64), 1 - sub.rank)
            assert (got == 1 - sub.rank).all()

    in_threads(lambda: work(subs[0], 0), lambda: work(subs[1], 1))
    for sub in subs:
        sub.close()


def test_two_communicators(pair):
    pair.run(two_communicators)


def collectives_beside_messages(comm):
    """One communicator: a thread with collectives, one with messages."""
    x = np.full(10_000, float(comm.rank))

    def collectives():
        for _ in range(100):
            assert comm.all_reduce(np.ones(10_000))[0] == 2

    def messages():
        for _ in range(100):
            got = comm.sendrecv(x, 1 - comm.rank, np.empty_like(x), 1 - comm.rank)
            assert got[0] == 1 - comm.rank

    in_threads(collectives, messages)


def test_collectives_beside_messages(pair):
    pair.run(collectives_beside_messages)


def waits_do_not_block_others(comm):
    """A thread waits for rank 1 for a long time; meanwhile others communicate with rank 2, and collectives run too."""
    got = np.zeros(1)
    sub = comm.split(0)

    def talk():
        for _ in range(100):
            if comm.rank == 0:
                comm.send(np.ones(8), 2)
                comm.recv(np.zeros(8), 2)
            elif comm.rank == 2:
                comm.recv(np.zeros(8), 0)
                comm.send(np.ones(8), 0)
            comm.barrier()
            sub.all_reduce(np.ones(8), async_op=True).wait()
        if comm.rank == 1:
            comm.send(np.full(1, 5.0), 0)

    in_threads(talk, *([lambda: comm.recv(got, 1)] if comm.rank == 0 else []))
    sub.close()
    return float(got[0])


@pytest.mark.parametrize("topology", ["a:3", "a:2,b:1"])
def test_a_waiting_thread_does_not_block_others(topology):
    with World(islands=topology, timeout=LIMIT) as world:
        assert world.run(waits_do_not_block_others) == [5.0, 0.0, 0.0]


def receive_beside_asynchronous_collective(comm):
    """Rank 1 sends a large message before it calls the collective that rank 0 has already started."""
    x = np.full(1 << 21, 3, np.uint8)
    if comm.rank == 0:
        work = comm.all_reduce(np.ones(4), async_op=True)
        time.sleep(0.1)
        comm.recv(np.zeros_like(x), 1)
    else:
        comm.send(x, 0)
        work = comm.all_reduce(np.ones(4), async_op=True)
    return float(work.wait()[0])


def test_receive_beside_an_asynchronous_collective(pair):
    assert pair.run(receive_beside_asynchronous_collective) == [2.0, 2.0]


def one_ring_many_threads(comm):
    """Threads share both directions of a pair; every message arrives complete and once, in any thread."""
    count, each, size = 4, 40, 40_000
    seen = []

    def send(number):
        for i in range(each):
            comm.send(np.full(size, number * each + i, np.int64), 1 - comm.rank)

    def receive():
        for _ in range(each):
            got = comm.recv(np.empty(size, np.int64), 1 - comm.rank)
            assert (got == got[0]).all()
            seen.append(int(got[0]))

    in_threads(*[lambda n=n: send(n) for n in range(count)], *[receive] * count)
    assert sorted(seen) == list(range(count * each))
    for number in range(count):
        mine = [v for v in seen if v // each == number]
        assert len(mine) == each


def test_one_ring_many_threads(pair):
    pair.run(one_ring_many_threads)


def background_and_foreground(comm):
    """Works and blocking calls on one ring keep the order in which they were called."""
    peer, size = 1 - comm.rank, 50_000
    for _ in range(20):
        if comm.rank == 0:
            works = [comm.isend(np.full(size, i), peer) for i in range(3)]
            comm.send(np.full(size, 3), peer)
            works += [comm.isend(np.full(size, 4), peer)]
            with comm.group():
                comm.send(np.full(size, 5), peer)
                comm.isend(np.full(size, 6), peer)
        else:
            first = comm.recv(np.zeros(size, np.int64), peer)
            works = [comm.irecv(np.zeros(size, np.int64), peer) for _ in range(3)]
            fifth = comm.recv(np.zeros(size, np.int64), peer)
            with comm.group():
                works += [comm.irecv(np.zeros(size, np.int64), peer) for _ in range(2)]
            got = [int(w.wait()[0]) for w in works]
            assert [int(first[0]), *got[:3], int(fifth[0]), *got[3:]] == list(range(7))
        for work in works:
            work.wait()


def test_background_and_foreground_keep_their_order(pair):
    pair.run(background_and_foreground)


def groups_of_two_threads(comm):
    """Operations that a thread calls inside group() do not affect other threads."""
    inside, sent = threading.Event(), threading.Event()
    peer, got = 1 - comm.rank, np.zeros(4)

    def grouped():
        with comm.group():
            comm.send(np.full(4, 1.0), peer, tag=1)
            inside.set()
            assert sent.wait(LIMIT)

    def direct():
        assert inside.wait(LIMIT)
        comm.send(np.full(4, 2.0), peer, tag=2)
        sent.set()

    in_threads(grouped, direct)
    assert comm.recv(got, peer, tag=2)[0] == 2 and comm.recv(got, peer, tag=1)[0] == 1


def test_groups_of_two_threads(pair):
    pair.run(groups_of_two_threads)


def all_told(comm):
    """Threads in messages and collectives of one communicator when rank 1 dies: each gets its error."""
    errors = []

    def until_lost(call):
        try:
            while True:
                call()
        except PeerLost as error:
            errors.append(error)

    x = np.zeros(1 << 20)
    in_threads(
        lambda: until_lost(lambda: comm.recv(x, 1)),
        lambda: until_lost(lambda: comm.send(x, 1)),
        lambda: until_lost(comm.barrier),
        lambda: until_lost(lambda: comm.irecv(x, 1).wait()),
    )
    return [error.peer for error in errors]


def sleep(comm):
    time.sleep(300)


def barrier(comm):
    comm.barrier()


@pytest.mark.parametrize("topology", ["a:3", "a,b,c"])
def test_every_thread_raises_when_a_rank_is_lost(topology):
    with World(islands=topology) as world:
        world.run(barrier)
        for rank in range(3):
            world.submit(rank, sleep if rank == 1 else all_told)
        time.sleep(0.3)
        world.kill(1)
        outcomes = world.collect()
        assert outcomes[0] == outcomes[2] == [1] * 4


def failing_watchdog(comm):
    """The watchdog itself fails on rank 0."""
    sub = comm.split(0)
    if comm.rank == 0:
        look = Context.look
        broken = mock.patch.object(
            Context, "look", autospec=True, side_effect=lambda c: look(c) if c.path == "0" else [].pop()
        )
        with broken, pytest.raises(Aborted, match="watches over the job failed: IndexError: pop from empty list"):
            sub.recv(np.empty(3), 1)
    else:
        with pytest.raises(Aborted, match=r"rank 0.*IndexError: pop from empty list"):
            sub.recv(np.empty(3), 0)
    sub.close()
    assert comm.all_reduce(np.ones(1))[0] == 2  # other communicators go on


def test_failing_watchdog(pair):
    pair.run(failing_watchdog)
