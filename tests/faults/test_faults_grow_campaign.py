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
_TIMES, _OFTEN = 4, 18
"""How often each of three ranks is lost."""
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
    """`resources`, and memory in MB; what it has lost ends soon."""
    found = []

    def settled():
        found.append(resources(held[0]))
        return len(found) > _STEADY and len(set(found[-_STEADY:])) == 1

    await_that(settled)
    return [*found[-1], psutil.Process(os.getpid()).memory_info().rss >> 20]


def leave(*_):
    held[0].close()


def replace(world, victim):
    """One rank dies, the others go on, and it comes back."""
    others = [rank for rank in range(world.size) if rank != victim]
    for rank in range(world.size):
        world.submit(rank, lose_one, victim)
    lost, *rest = world.collect(victim, *others)
    assert isinstance(lost, EOFError) and rest == [None] * len(others), (lost, rest)
    world.restart(victim)
    world.submit(victim, come)
    for rank in others:
        world.submit(rank, take_one)
    assert world.collect() == [None] * world.size


@pytest.mark.parametrize("times", [_TIMES, pytest.param(_OFTEN, marks=pytest.mark.slow)])
@pytest.mark.parametrize("places", [{"islands": "a:2,b:1"}, {"hosts": "a:2,b:1"}], ids=["islands", "hosts"])
def test_nothing_is_left(places, times):
    """Each rank dies again and again, and comes back; the others have what they had before, and no more memory after many times.

    The process that has come back has what the one had that came back before it.
    """
    with World(**places, timeout=100) as world:
        world.run(hold)
        for victim in (1, 2, 0):
            seen = []
            for number in range(times):
                replace(world, victim)
                if number in (times // 2 - 1, times - 1):
                    seen.append(world.run(has))
            for rank, (before, now) in enumerate(zip(*seen, strict=True)):
                print(f"rank {rank}, where rank {victim} dies: {before}, then {now}")
                excess = [after - then for after, then in zip(now, before, strict=True)]
                excess[0] -= 1  # threads that wait for the store at the same time have one connection more
                what = "descriptors, threads, mappings, files, connections to other hosts"
                assert max(excess[:-1]) <= 0, f"{what} of rank {rank}: {excess} more than before"
                assert times < _OFTEN or rank == victim or excess[-1] <= _MEGABYTES, f"{excess[-1]} MB more than before"
        world.run(leave)
