"""What ranks do in the tests of `shrink`: they die in a phase of a program, and the others go on."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from dataclasses import dataclass
from unittest import mock

import numpy as np

from xvcomm.errors import PeerLost
from xvcomm.rendezvous.store.file import FileStore
from xvcomm.rendezvous.store.tcp import TcpStore
from xvcomm.testing.arrays import arrays

SOON = 60.0
"""Seconds in which a shrink must end on a busy machine; on a quiet one it takes some hundredths."""
BIG = 1 << 21
HOSTS = 10_000
"""Seeds from here on are of jobs on several hosts."""
_STEPS = 8
_REQUESTS = 24
_STORES = (TcpStore, FileStore)


def die():
    """End this process as a crash does."""
    os.kill(os.getpid(), signal.SIGKILL)


def own(comm):
    """This process's rank in the whole job."""
    return comm.job_ranks[comm.rank]


def shrunk(comm, exclude=()):
    """The communicator of those that are left, and how long it took to make."""
    begun = time.monotonic()
    made = comm.shrink(exclude=exclude)
    seconds = time.monotonic() - begun
    assert seconds < SOON
    return made, seconds


def works(comm, ranks):
    """Check that a communicator has these ranks of the job, in this order, and that everything of it works, in any memory."""
    assert comm.job_ranks == tuple(ranks) and comm.size == len(ranks) and comm.job_ranks[comm.rank] == own(comm)
    a = arrays(comm)
    mine = np.full(5, own(comm) + 1.0)
    assert (a.get(comm.all_reduce(a.put(mine))) == sum(r + 1 for r in ranks)).all()
    assert comm.all_gather_object(own(comm)) == list(ranks)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    large, room = a.put(np.full(BIG, float(own(comm)))), a.put(np.zeros(BIG))
    assert (a.get(comm.sendrecv(large, after, room, before)) == ranks[before]).all()
    halves, everyone = comm.split(comm.rank % 2), comm.subgroup(range(comm.size), "everyone")
    assert (a.get(halves.all_reduce(a.put(np.ones(3)))) == halves.size).all()
    everyone.barrier()
    for each in (halves, everyone):
        each.close()
    comm.all_reduce(a.put(mine), async_op=True).synchronize()


def outcomes(world, victims, *call):
    """Results of the ranks that are not victims, which must be dead."""
    found = world.outcomes(*call)
    for victim in victims:
        assert isinstance(found[victim], EOFError), found[victim]
    left = [outcome for rank, outcome in enumerate(found) if rank not in victims]
    for outcome in left:
        assert not isinstance(outcome, BaseException), outcome
    return left


@contextlib.contextmanager
def acting_at(action, request, before):
    """Do something at one of this process's requests to the store, before it is made or after its answer."""
    numbers = itertools.count()

    def replace(kind, name):
        real = getattr(kind, name)

        def call(*args, **kwargs):
            mine = next(numbers) == request
            if mine and before:
                action()
            found = real(*args, **kwargs)
            if mine and not before:
                action()
            return found

        return mock.patch.object(kind, name, call)

    with contextlib.ExitStack() as patches:
        for kind, name in itertools.product(_STORES, ("set", "get", "wait", "add", "decide")):
            patches.enter_context(replace(kind, name))
        yield


def dying_at(request, before):
    """The process dies at one of its requests to the store, before it is made or after its answer."""
    return acting_at(die, request, before)


@dataclass(frozen=True)
class Death:
    """When and how a rank ends.

    Attributes:
        how: `kill`; `kill later`, by a thread while the rank goes on; `leave`; `shrink`, in a request of its first shrink;
            `loss`, when it notices that another rank is lost.
        step: before which it happens, but for the last two.
        request, before: of the store, see `dying_at`.
        seconds: for `kill later`.
    """

    how: str
    step: int
    request: int
    before: bool
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A job whose ranks die one after the other, or at once."""

    places: tuple[str, ...]
    on_hosts: bool
    store: str
    deaths: dict[int, Death]
    steps: tuple[str, ...]

    @classmethod
    def of(cls, seed):
        """The plan of a seed."""
        draw = random.Random(seed)
        size = draw.randint(2, 5)
        places = tuple(sorted(draw.choice("abc") for _ in range(size)))
        if draw.random() < 0.3:
            places = tuple(draw.sample(places, size))
        victims = draw.sample(range(size), draw.randint(1, size - 1))
        if draw.random() < 0.3:  # all of an island or a host, at once
            victims = [r for r in range(size) if places[r] == places[0]]
            victims = victims if len(victims) < size else [0]
        together = draw.randrange(_STEPS) if draw.random() < 0.4 else None
        deaths = {
            rank: Death(
                draw.choice(("kill", "kill", "kill later", "leave", "shrink", "shrink", "loss")),
                draw.randrange(_STEPS) if together is None else together,
                draw.randrange(_REQUESTS), draw.random() < 0.5, draw.choice((0.0, 0.003, 0.03)),
            )
            for rank in victims
        }  # fmt: skip
        kinds = ("all_reduce", "large all_reduce", "exchange", "objects", "asynchronous", "split", "barrier")
        steps = tuple(draw.choice(kinds) for _ in range(_STEPS))
        return cls(places, seed >= HOSTS, draw.choice(("launcher", "rank 0", "rank 0", "file")), deaths, steps)

    @property
    def labels(self):
        """Islands or hosts, as `World` takes them."""
        return ",".join(self.places)


def play(comm, seed):
    """Run a plan; the seconds that each shrink took, or None if this rank has left."""
    plan, me, seconds = Plan.of(seed), own(comm), []
    death, left = plan.deaths.get(me), [r for r in range(comm.size) if r not in plan.deaths]
    done, differs = 0, False
    while True:
        try:
            if differs:  # a rank may have completed the step in which another one lost the third
                done, differs = min(comm.all_gather_object(done)), False
            while done < len(plan.steps):
                if death is not None and death.step == done:
                    if death.how == "leave":
                        comm.close()
                        return None
                    _end(death)
                _step(comm, plan.steps[done])
                done += 1
            if death is not None:
                die()
            comm.barrier()
            if list(comm.job_ranks) == left:
                works(comm, left)
                comm.close()
                return seconds
        except PeerLost:
            if death is not None and death.how == "loss":
                die()
            in_shrink = death is not None and death.how == "shrink"
            with dying_at(death.request, death.before) if in_shrink else contextlib.nullcontext():
                comm, took = shrunk(comm)
            seconds.append(round(took, 3))
            differs = True


def _end(death):
    if death.how == "kill":
        die()
    if death.how == "kill later":
        threading.Timer(death.seconds, die).start()


def _step(comm, kind):
    """An operation that all ranks take part in, with a result that is known."""
    ranks = comm.job_ranks
    total, after, before = sum(r + 1 for r in ranks), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if kind in ("all_reduce", "large all_reduce", "asynchronous"):
        x = np.full(100 if kind == "all_reduce" else BIG, own(comm) + 1.0)
        if kind == "asynchronous":
            comm.all_reduce(x, async_op=True).wait()
        else:
            comm.all_reduce(x)
        assert (x == total).all()
    elif kind == "exchange":
        x = comm.sendrecv(np.full(BIG, ranks[comm.rank]), after, np.zeros(BIG, int), before)
        assert (x == ranks[before]).all()
    elif kind == "objects":
        assert comm.all_gather_object(own(comm)) == list(ranks)
    elif kind == "split":
        with comm.split(comm.rank % 2) as half:
            assert half.all_reduce(np.ones(3))[0] == half.size
    else:
        comm.barrier()
