"""How often a rank that starts waits for the job's store: each time takes a round trip, and stores may be far away."""

import os
import threading
from collections import defaultdict

import numpy as np
import pytest

import xvcomm
from xvcomm.abc.store import ForwardingStore
from xvcomm.rendezvous.store import open_store
from xvcomm.testing import World
from xvcomm.types.deadline import NEVER, Deadline

SOON = 60.0


class Counting(ForwardingStore):
    """Keeps what each thread asks of a store. What is asked again, because the answer has to be waited for, counts once."""

    def __init__(self, store):
        super().__init__(store)
        self._asked = defaultdict(set)

    def _note(self, *what):
        self._asked[threading.current_thread().name].add(what)

    def taken(self):
        """The requests of this thread since the last call, in no order."""
        return self._asked.pop(threading.current_thread().name, set())

    def set(self, key, value, deadline=NEVER):
        self._note("set", key)
        super().set(key, value, deadline)

    def get(self, key, deadline):
        self._note("get", key)
        return super().get(key, deadline)

    def add(self, key, amount, deadline=NEVER):
        self._note("add", key)
        return super().add(key, amount, deadline)

    def decide(self, key, value, deadline=NEVER):
        self._note("decide", key)
        return super().decide(key, value, deadline)

    def exchange(self, steps, keys=(), deadline=NEVER, patience=float("inf")):
        if keys:
            self._note("exchange", *keys)
        else:
            self._note("exchange", *(step.key for step in steps))
        return super().exchange(steps, keys, deadline, patience)

    def decide_at_end(self, key, value):
        self._note("decide at end", key)
        return super().decide_at_end(key, value)

    def notices(self, place, will, silence=b"", patience=float("inf"), deadline=NEVER):
        self._note("notices", place)
        return super().notices(place, will, silence, patience, deadline)

    def posted(self, place, read):
        self._note("posted", place)
        return super().posted(place, read)


def count(comm):
    """What the thread of the program asks of the store, by what the program does."""
    opened = open_store(os.environ["XVCOMM_STORE"], os.environ["XVCOMM_SECRET"], Deadline.after(SOON))
    counting, x, found = Counting(opened), np.ones(1000, np.float32), {}
    made = xvcomm.init(store=counting)
    found["init"] = counting.taken()
    made.barrier()
    found["barrier"] = counting.taken()
    made.all_reduce(x)
    found["all_reduce"] = counting.taken()
    part = made.split(0)
    found["split"] = counting.taken()
    part.all_reduce(x)
    found["all_reduce of the part"] = counting.taken()
    part.close()
    made.close()
    found["close"] = counting.taken()
    opened.close()
    comm.barrier()
    return {step: sorted(map(str, asked)) for step, asked in found.items()}


def test_one_rank_on_each_host():
    """The first of two ranks tells processes that may join later who is there; the last one to leave that none is."""
    with World(hosts="a,b") as world:
        for rank, asked in enumerate(world.run(count)):
            assert len(asked["init"]) <= (4 if rank else 6), asked["init"]
            assert asked["barrier"] == asked["all_reduce"] == asked["all_reduce of the part"] == []
            assert len(asked["split"]) <= 1, asked["split"]
            assert len(asked["close"]) <= 3, asked["close"]


def test_two_ranks_on_each_host():
    """The second of a host asks also for the shared memory that the first one has made."""
    with World(hosts="a:2,b:2") as world:
        for rank, asked in enumerate(world.run(count)):
            assert len(asked["init"]) <= (6, 6, 4, 6)[rank], asked["init"]
            assert len(asked["barrier"]) <= 5, asked["barrier"]
            assert len(asked["split"]) <= 1 + rank % 2, asked["split"]
            assert len(asked["close"]) <= 3, asked["close"]


def talk(comm, size):
    """Messages both ways, and a collective."""
    other, got = 1 - comm.rank, np.zeros(size, np.uint8)
    for _ in range(3):
        comm.sendrecv(np.full(size, comm.rank + 1, np.uint8), other, got, other)
        assert (got == other + 1).all()
        comm.all_reduce(got)
        assert (got == 3).all()


@pytest.mark.parametrize("size", [1, 20_000, 1 << 20])
def test_rings_of_other_settings_at_each_end(size):
    """Nobody asks the other end for the shape of a ring; the settings of the lower rank count."""
    with World(
        hosts="a,b",
        env=[
            {"XVCOMM_WIRE_SLOTS": "8"},
            {"XVCOMM_WIRE_SLOTS": "4", "XVCOMM_WIRE_SLOT_BYTES": "4096", "XVCOMM_RING_SLOTS": "4"},
        ],
    ) as world:
        world.run(talk, size)
