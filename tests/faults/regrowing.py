"""What ranks do in the campaign of `shrink` and `grow`: they die in any phase, as do those that take their places."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass

import numpy as np
from growing import grown
from shrinking import BIG, HOSTS, die, dying_at, own, shrunk, works

import xvcomm
from xvcomm.errors import PeerLost
from xvcomm.testing.signals import await_that

_STEPS = 6
_LIVES = 3
"""So many times a rank may die."""
_REQUESTS = {"join": 40, "grow": 40, "shrink": 12}


@dataclass(frozen=True)
class End:
    """When and how a process ends.

    Attributes:
        how: `step`; `later`, by a thread while the rank goes on; `loss`, when it notices that another rank is lost; or at a
            request to the store, in `shrink`, in `grow`, or when it joins.
        step: before which it happens, for the first two.
        request, before: see `dying_at`.
        seconds: for `later`.
    """

    how: str
    step: int
    request: int
    before: bool
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A job in which all ranks but one may die, again and again.

    Attributes:
        ends: by rank, of its processes one after the other; the one after the last of them lives.
    """

    places: tuple[str, ...]
    on_hosts: bool
    store: str
    ends: dict[int, list[End]]

    @classmethod
    def of(cls, seed):
        """The plan of a seed."""
        draw = random.Random(seed)
        size = draw.randint(2, 4)
        places = tuple(sorted(draw.choice("ab") for _ in range(size)))
        steady = draw.randrange(size)
        ends: dict[int, list[End]] = {}
        for rank in draw.sample([r for r in range(size) if r != steady], draw.randint(1, size - 1)):
            if not ends:  # something must be lost before ranks shrink and grow
                ends[rank] = [cls._end(draw, ("step", "later"))]
            else:
                ends[rank] = [cls._end(draw, ("step", "later", "loss", "shrink", "grow", "grow"))]
            for _ in range(draw.randrange(_LIVES)):
                ends[rank].append(cls._end(draw, ("step", "later", "loss", "shrink", "grow", "grow", "join", "join")))
        kinds = ["launcher", "rank 0"] if steady == 0 else ["launcher"]
        if seed < HOSTS:  # a folder does not tell that a process of another host has ended that is about to join
            kinds.append("file")
        return cls(places, seed >= HOSTS, draw.choice(kinds), ends)

    @staticmethod
    def _end(draw, kinds):
        how = draw.choice(kinds)
        return End(
            how, draw.randrange(_STEPS), draw.randrange(_REQUESTS.get(how, 1)), draw.random() < 0.5,
            draw.choice((0.0, 0.003, 0.03)),
        )  # fmt: skip

    @property
    def labels(self):
        """Islands or hosts, as `World` takes them."""
        return ",".join(self.places)

    def end(self, rank, life):
        """How a rank's process ends; None if it lives."""
        ends = self.ends.get(rank, [])
        return ends[life] if life < len(ends) else None


def begin(comm, seed):
    """Run a plan as one of the first ranks."""
    return _play(comm, Plan.of(seed), own(comm), 0)


def come_back(seed, rank, life):
    """The same in the place of a process that has ended."""
    plan = Plan.of(seed)
    with _dying(plan.end(rank, life), "join"):
        comm = xvcomm.init()
    assert own(comm) == rank
    return _play(comm, plan, rank, life)


def _dying(end, how):
    return dying_at(end.request, end.before) if end is not None and end.how == how else contextlib.nullcontext()


def _play(comm, plan, rank, life):
    end, everyone, done, agreed, shrinks, grows = plan.end(rank, life), len(plan.places), 0, False, 0, 0
    while True:
        try:
            if not agreed:
                done, agreed = max(comm.all_gather_object(done)), True
            if done >= _STEPS and comm.size == everyone:
                comm.barrier()
                works(comm, range(everyone))
                comm.close()
                return {"shrinks": shrinks, "grows": grows}
            if end is not None and end.step == done:
                _end(end)
            x = np.full(BIG if done % 2 else 100, own(comm) + 1.0)
            assert (comm.all_reduce(x) == sum(r + 1 for r in comm.job_ranks)).all()
            done += 1
            if _awaited(comm, wait=done >= _STEPS and comm.size < everyone):
                with _dying(end, "grow"):
                    comm, _ = grown(comm)
                agreed, grows = False, grows + 1
        except PeerLost:
            if end is not None and end.how == "loss":
                die()
            with _dying(end, "shrink"):
                comm, _ = shrunk(comm)
            agreed, shrinks = False, shrinks + 1


def _awaited(comm, *, wait):
    """Whether processes wait to join; if all steps are done, one is waited for."""
    if wait and comm.rank == 0:
        await_that(lambda: comm.join_requests() > 0)
    return comm.broadcast_object(comm.join_requests() if comm.rank == 0 else 0, 0) > 0


def _end(end):
    if end.how == "step":
        die()
    if end.how == "later":
        threading.Timer(end.seconds, die).start()
