"""Ranks with GPU memory are lost, and the others go on, by `shrink` and `grow`: on the stand-in of AMD's libraries."""

import contextlib
import gc
import os
import threading
from collections import Counter
from unittest import mock

import numpy as np
import pytest
from growing import restarted
from shrinking import outcomes, shrunk
from shrinking_gpus import PHASES, PLACES, come_back, survive, survive_and_take_in

from xvcomm.errors import ClosedError, PeerLost
from xvcomm.testing.arrays import arrays
from xvcomm.testing.cases import SMALL_GPU_RINGS
from xvcomm.testing.inside import context
from xvcomm.testing.signals import await_that
from xvcomm.testing.world import World

pytest.importorskip("rocm.bindings", reason="hip-python is not installed: pip install hip-python")


@pytest.fixture(scope="module")
def job(rocm_path):
    """Starts ranks by a name of `PLACES`; with the ranks that die."""
    environment = {"ROCM_PATH": str(rocm_path), "HIPHOST_DEVICES": "4", **SMALL_GPU_RINGS}

    def start(place, **further):
        devices, islands, victims = PLACES[place]
        return World(devices=devices.format(gpu="rocm"), islands=islands, env=environment | further), victims

    return start


QUICK = {
    ("1 and 1", "graph"), ("one island of 2", "native"), ("one island of 3", "graph"), ("2 and 2", "streams"),
    ("2 and 2 in turns", "messages"), ("an island of 2 and 2", "running"), ("all GPUs, of 2 and 2 hosts", "native"),
}  # fmt: skip
CASES = [
    pytest.param(place, phase, marks=() if (place, phase) in QUICK else pytest.mark.slow)
    for place in PLACES
    for phase in PHASES
    if phase != "graph" or "host" not in PLACES[place][0]
]


@pytest.mark.parametrize("place, phase", CASES)
def test_the_others_go_on(job, place, phase):
    world, victims = job(place)
    with world:
        print("seconds:", outcomes(world, victims, survive, phase, victims))


@pytest.mark.parametrize(
    "place", [p if p in ("one island of 2", "2 and 2") else pytest.param(p, marks=pytest.mark.slow) for p in PLACES]
)
def test_lost_ranks_come_back(job, place):
    world, victims = job(place)
    with world:
        joining = tuple(range(world.size)), victims
        print(
            "seconds:",
            restarted(world, victims, survive_and_take_in, "running", victims, join=come_back, joining=joining),
        )


def events_made(comm, times):
    """How many events the device creates for communicators that are shrunk, one after the other, after the first ones."""
    a, group, runtime = arrays(comm), comm.split(0), context(comm).device.runtime
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with mock.patch.object(runtime, "event", wraps=runtime.event) as event:
        for number in range(times):
            group.all_reduce(a.put(np.ones(10)), async_op=True).synchronize()
            work = group.isend(a.put(np.ones(10)), after)
            group.recv(a.put(np.ones(10)), before)
            work.synchronize()
            group, _ = shrunk(group)
            gc.collect()  # a communicator that was closed is in reference cycles
            if number < times // 2:
                event.reset_mock()
        group.close()
        return event.call_count


def test_events_are_used_again(job):
    """Communicators of one process share those of its streams, which are never destroyed."""
    world, _ = job("1 and 1")
    with world:
        for made in world.run(events_made, 16):
            assert made <= 128, f"{made} events for 8 communicators"


COUNTED = {
    "allocate": ("allocations", 1), "free": ("allocations", -1), "shareable": ("shared", 1), "open": ("imports", 1),
    "close": ("imports", -1), "register": ("pinned", 1), "unregister": ("pinned", -1), "stream": ("streams", 1),
    "event": ("events", 1),
}  # fmt: skip
"""Calls of a vendor's runtime, and what each of them makes or gives back."""


def held_by_shrunk(comm, *times):
    """What is held after so many shrinks, each with a receive under way: by the device, descriptors, and threads."""
    a, group, made, held = arrays(comm), comm.split(0), Counter(), []
    after, before, runtime = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, context(comm).device.runtime

    def counted(name, what, number):
        real = getattr(runtime, name)
        return mock.patch.object(runtime, name, lambda *args: made.update({what: number}) or real(*args))

    with contextlib.ExitStack() as patches:
        for name, (what, number) in COUNTED.items():
            patches.enter_context(counted(name, what, number))
        for number in range(1, max(times) + 1):
            group.all_reduce(a.put(np.ones(1000)))
            group.sendrecv(a.put(np.ones(10)), after, a.put(np.ones(10)), before)
            work = group.irecv(a.put(np.ones(10)), before, channel=1)
            comm.barrier()
            group, _ = shrunk(group)
            await_that(work.done)
            assert isinstance(work.exception(), PeerLost | ClosedError)
            comm.barrier()
            gc.collect()  # a communicator that was closed is in reference cycles
            if number in times:
                held.append(
                    {**made, "descriptors": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
                )
    group.close()
    return held


@pytest.mark.slow
@pytest.mark.parametrize("place", ["1 and 1", "one island of 3", "2 and 2"])
def test_fifty_shrinks_leak_nothing(job, place):
    """Pools grow for the first ones, since a communicator's memory is free only once it is collected."""
    world, _ = job(place)
    with world:
        for early, late in world.run(held_by_shrunk, 25, 75):
            assert all(late[what] <= early[what] + 2 for what in late), (early, late)
