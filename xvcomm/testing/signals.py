"""Synchronization of the ranks of a test, independent of the communicator under test."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from xvcomm.comm.communicator import Communicator
from xvcomm.testing.arrays import SECONDS, arrays
from xvcomm.types.deadline import Deadline

_PAUSE = 0.01
_serial = itertools.count()


class Signals:
    """Progress of each rank's host in a check; created by all ranks at the same point.

    Attributes:
        watched: ranks whose calls must return before the operation is complete: those on asynchronous devices.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._part = comm, f"signals/{next(_serial)}"
        told = enumerate(comm.all_gather_object(arrays(comm).asynchronous))
        self.watched = [rank for rank, asynchronous in told if asynchronous]

    def tell(self, what: str) -> None:
        """Announce that this rank has reached a point."""
        self._comm.store.set(f"{self._part}/{what}/{self._comm.rank}", b"")

    def hear(self, what: str, ranks: Iterable[int]) -> None:
        """Wait until ranks have reached a point."""
        self._comm.store.wait([f"{self._part}/{what}/{rank}" for rank in ranks], Deadline.after(SECONDS))

    def told(self, what: str, rank: int) -> bool:
        """Whether a rank has announced that it has reached a point."""
        return self._comm.store.has(f"{self._part}/{what}/{rank}")

    def meet(self, what: str) -> None:
        """Wait until all watched ranks have reached a point."""
        self.tell(what)
        self.hear(what, self.watched)

    @contextlib.contextmanager
    def late(self, what: str, rank: int) -> Iterator[None]:
        """Start the block of one rank when the watched ranks have finished theirs."""
        if self._comm.rank == rank:
            self.hear(what, (r for r in self.watched if r != rank))
        yield
        self.tell(what)


def meet(comm: Communicator) -> None:
    """Wait for all ranks, and open what they keep open: connections, the native library."""
    comm.barrier()


def await_that(condition: Callable[[], bool]) -> None:
    """Wait for a condition that the code under test establishes in the background."""
    deadline = Deadline.after(SECONDS)
    while not condition():
        assert not deadline.expired(), f"still not so after {SECONDS} s"
        time.sleep(_PAUSE)
