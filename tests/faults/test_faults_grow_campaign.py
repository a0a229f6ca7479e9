"""Ranks die in any phase, of `shrink` and `grow` too, and others take their places until all are back: nothing is left behind.

A run is determined by its seed. To repeat one:

    pytest "tests/faults/test_faults_grow_campaign.py::test_run[17]"

Seeds from 10,000 on are over several hosts, by labels.
"""

import os
import threading

import numpy as np
import psutil
import pytest
from growing import take_in
from regrowing import Plan, begin, come_back
from shrinking import HOSTS, die, own, shrunk, works
from stores import variables
from test_faults_shrink import resources

import xvcomm
from xvcomm.errors import PeerLost
from xvcomm.testing.signals import await_that
from xvcomm.testing.world import World

USUAL, ALL = 6, 100
_TIMES, _OFTEN = 8, 56
_MEGABYTES = 8
_STEADY = 100
"""So many times, once in 10 ms, all is as before."""


def seeds(first):
    """Seeds from `first` on, of which those that run only in `make test-slow` are marked."""
    return [first + n if n < USUAL else pytest.param(first + n, marks=pytest.mark.slow) for n in range(ALL)]


def follow(world, rank, seed, lives, restarting, outcomes):
    """Let a rank play, and start it again as often as the plan lets it die."""
    for life in range(lives + 1):
        if life:
            with restarting:
                world.restart(rank)
        world.submit(rank, *((come_back, seed, rank, life) if life else (begin, seed)))
        outcomes[rank] = world.collect(rank, timeout=100)[0]
        if not isinstance(outcomes[rank], EOFError):
            return


@pytest.mark.parametrize("seed", seeds(0) + seeds(HOSTS))
def test_run(seed, tmp_path):
    plan, restarting = Plan.of(seed), threading.Lock()
    print(plan)
    where = {"hosts": plan.labels} if plan.on_hosts else {"islands": plan.labels}
    with World(**where, env=variables(plan.store, tmp_path / "store"), timeout=100) as world:
        outcomes = [None] * world.size
        threads = [
            threading.Thread(
                target=follow, args=(world, rank, seed, len(plan.ends.get(rank, [])), restarting, outcomes)
            )
            for rank in range(world.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(*(f"rank {rank}: {outcome!r}" for rank, outcome in enumerate(outcomes)), sep="\n")
    assert all(isinstance(outcome, dict) for outcome in outcomes)


held = []
"""This process's communicator."""


def hold(comm):
    held.append(comm)


def lose_one(*given):
    """One rank dies, and the others go on."""
    comm, victim = held[0], given[-1]
    if own(comm) == victim:
        die()
    with pytest.raises(PeerLost):
        while True:
            comm.all_reduce(np.ones(1000))
    held[0] = shrunk(comm)[0]


def come():
    held.append(xvcomm.init())
    works(held[0], range(3))


def take_one(*_):
    """One comes back; what the process has, once threads that end have ended."""
    held[0], _ = take_in(held[0], 1)
    works(held[0], range(3))


def has(*_):
    """Descriptors, threads, mappings, files, and memory in MB; what it has lost ends soon."""
    found = []

    def settled():
        found.append(resources(held[0]))
        return len(found) > _STEADY and len(set(found[-_STEADY:])) == 1

    await_that(settled)
    return [*found[-1], psutil.Process(os.getpid()).memory_info().rss >> 20]


def leave(*_):
    held[0].close()


@pytest.mark.parametrize("times", [_TIMES, pytest.param(_OFTEN, marks=pytest.mark.slow)])
@pytest.mark.parametrize("places", [{"islands": "a:2,b:1"}, {"hosts": "a:2,b:1"}], ids=["islands", "hosts"])
def test_nothing_is_left(places, times):
    """Ranks 1 and 2 die in turn, and come back; rank 0 has what it had before, and no more memory after many times."""
    with World(**places, timeout=100) as world:
        world.run(hold)
        before = None
        for number in range(times):
            victim = 1 + number % 2
            others = [0, 3 - victim]
            for rank in range(3):
                world.submit(rank, lose_one, victim)
            lost, *rest = world.collect(victim, *others)
            assert isinstance(lost, EOFError) and rest == [None, None], (lost, rest)
            world.restart(victim)
            world.submit(victim, come)
            for rank in others:
                world.submit(rank, take_one)
            assert world.collect() == [None] * 3
            if number in (times // 2, times - 1):
                world.submit(0, has)
                (now,) = world.collect(0)
                assert isinstance(now, list), now
                before = before or now
        print(before, now)
        excess = [after - then for after, then in zip(now, before, strict=True)]
        excess[0] -= 1  # threads that wait for the store at the same time have one connection more
        assert max(excess[:-1]) <= 0, f"descriptors, threads, mappings, files: {excess} more than before"
        assert times < _OFTEN or excess[-1] <= _MEGABYTES, f"{excess[-1]} MB more than before"
        for rank in range(3):
            world.submit(rank, leave)
        assert world.collect() == [None] * 3
