"""Large direct messages between the ranks' arrays: correct bytes, and no access to arrays of ranks that gave up."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from tracer import hold_in_copy

from xvcomm.backends.host.rendezvous import END_LINE, LEAST
from xvcomm.errors import DeadlineExceeded, PeerLost
from xvcomm.jit.record import python_type
from xvcomm.memory.ring import LINE, MEETING
from xvcomm.testing.inside import context
from xvcomm.testing.world import World
from xvcomm.types.dtype import DTYPES

SOON = 60.0
STAGED, STRAIGHT = 0, 1
BIG, HUGE = 1 << 23, 1 << 26
"""Larger than a ring: such messages wait for their receivers and so always go directly."""
Line = python_type(END_LINE)


def ends(comm):
    return [end for end in context(comm).rings.ends() if end.kept is not None]


def settle(comm, way):
    """Fix the choice between direct and ring for everything that this rank sends."""
    for end in ends(comm):
        for tuning in end.kept.tunings:
            tuning.trials, tuning.best[way], tuning.best[1 - way] = -1, 1, 2


def straight(comm):
    """For each ring end: the newest direct message, and how many of its chunks this rank copied."""
    found = {}
    for end in ends(comm):
        done = Line.from_address(end.address + MEETING + (0 if end.producer else LINE)).done
        found[end.peer, end.producer] = (done >> 24, done & 0xFFFFFF)
    return found


def prepare(comm, way=STRAIGHT):
    """Open all rings, try them with a large message, and fix the choice; returns whether all ranks' memory is accessible."""
    for _ in range(2):
        for peer in range(comm.size):
            if peer != comm.rank:
                comm.sendrecv(np.ones(LEAST, np.uint8), peer, np.empty(LEAST, np.uint8), peer)
        comm.barrier()
    settle(comm, way)
    comm.barrier()
    return {end.kept.access.reach for end in ends(comm)} == {1}


def world(size=2, **how):
    made = World(size, timeout=60, **how)
    if not all(made.run(prepare)):
        made.close()
        pytest.skip("processes may not use each other's memory here (kernel.yama.ptrace_scope, seccomp)")
    return made


@pytest.fixture(scope="module", params=(2, 3))
def ranks(request):
    """Ranks that can access each other's memory."""
    with world(request.param) as made:
        yield made


def pattern(dtype, count, seed):
    return np.random.default_rng(seed).integers(0, 2, count * dtype.itemsize, np.uint8).view(dtype.numpy)


def around(comm):
    """Each rank sends to the next, in every form and dtype, odd numbers of elements from odd addresses."""
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for seed, dtype in enumerate(DTYPES):
        count = BIG // dtype.itemsize + seed
        mine = pattern(dtype, count + 1, 100 * comm.rank + seed)[1:]
        want = pattern(dtype, count + 1, 100 * before + seed)[1:].tobytes()
        got = [np.zeros(count + 1, dtype.numpy)[1:] for _ in range(4)]
        comm.sendrecv(mine, following, got[0], before)
        with comm.group():
            comm.recv(got[1], before)
            comm.send(mine, following)
        works = [comm.isend(mine, following), comm.irecv(got[2], before)]
        for work in works:
            work.wait()
        if comm.rank % 2:
            comm.recv(got[3], before)
        comm.send(mine, following)
        if not comm.rank % 2:
            comm.recv(got[3], before)
        assert all(x.tobytes() == want for x in got), dtype
    return straight(comm)


def test_all_forms_and_dtypes(ranks):
    for rank, found in enumerate(ranks.run(around)):
        following, before = (rank + 1) % ranks.size, (rank - 1) % ranks.size
        assert found[following, True][0] > len(DTYPES), f"what rank {rank} sent"
        assert found[before, False][0] > len(DTYPES), f"what rank {rank} received"


def many(comm, rounds):
    """Messages of all sizes in flight between all ranks in both directions; the choice changes meanwhile."""
    sizes = [0, 5, LEAST - 1, LEAST, 3 * LEAST + 1, BIG + 3, 100]
    for number in range(rounds):
        settle(comm, number % 2)
        works, received = [], []
        for peer in range(comm.size):
            if peer != comm.rank:
                for tag, size in enumerate(sizes):
                    out = np.full(size, comm.rank + 3 * tag + 7 * number, np.uint8)
                    works.append(comm.isend(out, peer, tag))
                    received.append((np.zeros(size, np.uint8), peer + 3 * tag + 7 * number))
                    works.append(comm.irecv(received[-1][0], peer, tag))
        for work in works:
            work.wait()
        assert all((got == want).all() for got, want in received)


def test_many_in_flight(ranks):
    ranks.run(many, 4)


def undecided(comm):
    """As in programs, with the choice left to xvcomm."""
    for end in ends(comm):
        for tuning in end.kept.tunings:
            tuning.trials = 0
    other = 1 - comm.rank
    for number in range(60):
        for size in (LEAST, 4 * LEAST, BIG):
            x, y = np.full(size, number + comm.rank, np.uint8), np.zeros(size, np.uint8)
            comm.sendrecv(x, other, y, other)
            assert (y == number + other).all()
    return [[tuning.trials for tuning in end.kept.tunings[:5]] for end in ends(comm) if end.producer]


def test_the_first_messages_try_both_ways():
    with world() as made:
        for found in made.run(undecided):
            assert any(trials != 0 for trials in found[0])


def large_all_reduce(comm):
    """Between islands, by schedules, which use other rings than messages do."""
    for number in range(4):
        x = comm.all_reduce(np.full(4 * BIG // 4, comm.rank + number, np.float32))
        assert (x == comm.size * number + sum(range(comm.size))).all()
        y = comm.all_gather(np.full(BIG, comm.rank + number, np.uint8))
        assert all((y.reshape(comm.size, -1)[r] == r + number).all() for r in range(comm.size))
        settle(comm, STRAIGHT)
    return max(number for number, _ in straight(comm).values())


@pytest.mark.parametrize("islands", ["a,b", "a:2,b:2"])
def test_between_islands(islands):
    with World(islands=islands, timeout=100) as made:
        made.run(large_all_reduce)


def send_then_receive(comm):
    """Both ranks send what the ring can hold before they receive."""
    other = 1 - comm.rank
    for number in range(5):
        x, y = np.full(2 * LEAST, number + comm.rank, np.uint8), np.zeros(2 * LEAST, np.uint8)
        comm.send(x, other)
        x[:] = 99
        comm.recv(y, other)
        assert (y == number + other).all()


def test_two_ranks_that_send_before_receiving_do_not_deadlock():
    with world() as made:
        made.run(send_then_receive)


def give_up(comm, receives):
    """Rank 0 joins, gives up and reuses its array; rank 1 comes later. Returns whether the array is unchanged."""
    other = 1 - comm.rank
    sub = comm.split(0)
    prepare(sub)
    x = np.full(BIG, comm.rank, np.uint8)
    if comm.rank == 1:
        comm.barrier()
    try:
        (sub.recv if (comm.rank == 0) == receives else sub.send)(x, other, timeout=0.3)
    except (DeadlineExceeded, PeerLost):
        pass
    else:
        return "no error"
    before = x.copy()
    x[: BIG // 2] = 77
    before[: BIG // 2] = 77
    if comm.rank == 0:
        comm.barrier()
    comm.barrier()
    sub.close()
    return bool((x == before).all())


@pytest.mark.parametrize("receives", [False, True])
def test_arrays_of_a_rank_that_gave_up_are_not_accessed(receives):
    with world() as made:
        assert made.run(give_up, receives) == [True, True]


def continue_after_sigstop(comm, pids, receives):
    """Rank 1 stops itself during a copy; rank 0 gives up, reuses its array and continues it."""
    sub = comm.split(0)
    prepare(sub)
    other, x = 1 - comm.rank, np.ones(HUGE, np.uint8)
    move = sub.recv if (comm.rank == 0) == receives else sub.send
    if comm.rank == 1:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    try:
        while True:
            move(x, other, timeout=1.0)
    except (DeadlineExceeded, PeerLost):
        pass
    x[:] = 5 if comm.rank == 0 else x
    if comm.rank == 0:
        os.kill(pids[1], signal.SIGCONT)
    comm.barrier()
    sub.close()
    # What rank 0 wrote after it had given up arrives nowhere, and nobody writes over it.
    return bool((x == (5 if comm.rank == 0 else 1)).all())


@pytest.mark.parametrize("receives", [False, True])
def test_a_rank_stopped_during_a_copy_accesses_nothing_later(receives):
    with world() as made:
        for rank in range(2):
            made.submit(rank, continue_after_sigstop, made.pids(), receives)
        assert made.collect() == [True, True]


def continue_after_hold_in_copy(comm, pids, receives):
    """As `continue_after_sigstop`, but held at the entry of the system call that copies."""
    sub = comm.split(0)
    prepare(sub)
    other, x = 1 - comm.rank, np.ones(HUGE, np.uint8)
    move = sub.recv if (comm.rank == 0) == receives else sub.send
    held = hold_in_copy(pids[1]) if comm.rank == 0 else None
    comm.barrier()
    try:
        while True:  # rank 0 may copy a whole message before the other one begins
            move(x, other, timeout=1.0)
    except (DeadlineExceeded, PeerLost):
        pass
    if held is not None:
        assert held.there.is_set()
        x[:] = 5
        held.release()
    comm.barrier()
    sub.close()
    return bool((x == (5 if comm.rank == 0 else 1)).all())


@pytest.mark.parametrize("receives", [False, True])
def test_a_rank_held_before_a_copy_accesses_nothing_after_the_timeout(receives):
    """The kernel must find the memory withdrawn when the rank continues."""
    with world() as made:
        for rank in range(2):
            made.submit(rank, continue_after_hold_in_copy, made.pids(), receives)
        assert made.collect() == [True, True]


def for_ever(comm):
    x, y = np.ones(BIG, np.uint8), np.ones(BIG, np.uint8)
    other = 1 - comm.rank
    while True:
        comm.sendrecv(x, other, y, other)
        comm.send(x, other) if comm.rank else comm.recv(y, other)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.003, 0.011])
def test_killed_in_the_middle(victim, delay):
    with world() as made:
        for rank in range(2):
            made.submit(rank, for_ever)
        time.sleep(0.5 + delay)
        killed = time.monotonic()
        made.kill(victim)
        outcome = made.collect()[1 - victim]
        assert time.monotonic() - killed < SOON
        assert isinstance(outcome, PeerLost) and outcome.peer == victim, outcome


def refused(comm):
    """Messages with the variable set on one rank."""
    prepare(comm)
    other, x, y = 1 - comm.rank, np.full(BIG, comm.rank, np.uint8), np.zeros(BIG, np.uint8)
    comm.sendrecv(x, other, y, other)
    assert (y == other).all()
    return straight(comm)


@pytest.mark.parametrize("refuses", [0, 1])
def test_one_rank_disables_process_memory(refuses):
    """Through its environment: everything goes through the rings."""
    env = [{}, {}]
    env[refuses] = {"XVCOMM_PROCESS_MEMORY": "0"}
    with World(2, env=env) as made:
        found = made.run(refused)
        assert found[refuses] == {}
        assert all(number == 0 for number, _ in found[1 - refuses].values())
