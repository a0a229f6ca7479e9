"""WRITEs of one queue pair without rings and frames, to compare rails with: what a device carries by itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from errno import ETIMEDOUT
from typing import NamedTuple

import numpy as np

from xvcomm.abc.cards import Cards, Registered
from xvcomm.errors import ResourceError
from xvcomm.jit.atomics import monotonic, sched_yield
from xvcomm.jit.compile import compiling, kernel
from xvcomm.wire.verbs import completions_at, failed, post, queue_at, take, write

LONGEST_NS = 20_000_000_000
"""A WRITE that has not ended after this time never does: a device repeats it for some seconds at most."""


class PlainDescription(NamedTuple):
    """What the other side must know: of the queue pair, and of the memory that may be written to."""

    pair: bytes
    address: int
    keys: Sequence[int]


class PlainPair:
    """A queue pair, and memory that it sends from and that the other side may write to.

    Attributes:
        description: for the other side.
    """

    def __init__(self, cards: Cards, address: str, nbytes: int, *, sends: bool) -> None:
        """Make one of the device of the port that has this address.

        The memory is the GPU's where slots of rings are, else the host's.

        Args:
            nbytes: of the memory.
            sends: whether this side writes to the other one.

        Raises:
            ResourceError: the device refuses.
        """
        self._nbytes, self._memory = nbytes, None
        self._pair = cards.pair(address)
        try:
            region = cards.direct(nbytes, producer=sends)
            if region is None:
                self._memory = np.zeros(nbytes, np.uint8)
                region = cards.register(self._memory.ctypes.data, nbytes)
        except ResourceError:
            self._pair.close()
            raise
        self._region: Registered = region
        keys = [key.remote for key in region.keys]
        self.description = PlainDescription(self._pair.description, region.address, keys)

    def connect(self, theirs: PlainDescription) -> None:
        """Join it with the other side's; neither may write before both have.

        Raises:
            ResourceError: the device refuses.
        """
        self._pair.connect(theirs.pair)
        self._there = theirs.address, theirs.keys[self._pair.there]

    def write(self, count: int) -> float:
        """Write all the memory so many times; how many seconds it took.

        Raises:
            ResourceError: a request has failed; with the reason.
        """
        pair, key = self._pair, self._region.keys[self._pair.device].local
        here, begun = self._region.address, time.perf_counter()
        if not write_all(pair.queue, pair.completions, here, key, *self._there, self._nbytes, count, LONGEST_NS):
            raise ResourceError(pair.failure())
        return time.perf_counter() - begun

    def close(self) -> None:
        """Give it back."""
        self._pair.fail()
        self._pair.close()
        self._region.close()


def _write(
    queue_address: int, completions_address: int, here: int, key: int, there: int, there_key: int, nbytes: int, count: int,
    longest: int,
) -> int:  # fmt: skip
    """Post so many WRITEs, of which as many are under way as the queue takes; 1 once all have ended well, else 0.

    Args:
        longest: nanoseconds that a WRITE may take.
    """
    queue, completions = queue_at(queue_address), completions_at(completions_address)
    last, seen, since = queue.posted + count, queue.written, monotonic()
    while queue.written < last:
        while queue.posted < last and write(queue, here, key, there, there_key, nbytes):
            if post(queue) != 0:
                return 0
        if take(completions) < 0 or failed(queue):
            return 0
        if queue.written != seen:
            seen, since = queue.written, monotonic()
        elif monotonic() - since > longest:
            queue.error = ETIMEDOUT
            return 0
        sched_yield()
    return 1


with compiling():
    write_all = kernel("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")(_write)
