"""How fast the connections between hosts are, as `xvcomm topo` measures them: each alone, and all of a pair of hosts together."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from xvcomm.cli.connections import Connections, ends_of
from xvcomm.types.cluster import Rail
from xvcomm.types.route import Ends

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

_TOGETHER_NBYTES, _ALONE_NBYTES = 16 << 20, 4 << 20
"""Size of the messages that are timed: over all connections large ones, since a slow one carries little of others."""
_MEET_SECONDS = 1.0
"""How long a pair of hosts sends before it is measured: connections come up meanwhile."""


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of so many, in rounds in which each is in one pair at most."""
    circle: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], circle[::-1], strict=False)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def measure(comm: Communicator, first: Sequence[int], names: Sequence[str], seconds: float) -> list[Rail]:
    """The connections from this rank's host to the others, with their speeds; all ranks call it.

    Args:
        comm: of all ranks of the job.
        first: the rank of each host that measures.
        names: of the hosts.
        seconds: that all connections of a direction are measured for together, and then each alone.
    """
    found: list[Rail] = []
    for pairs in rounds(len(first)):
        comm.barrier()
        for low, high in pairs:
            for source, target in ((low, high), (high, low)):
                if comm.rank == first[source]:
                    found += _Direction(comm, first[target]).send(names[source], names[target], seconds)
                elif comm.rank == first[target]:
                    _Direction(comm, first[source]).receive()
    return found


class _Direction:
    """This rank's side of the messages that are timed, and the other rank."""

    def __init__(self, comm: Communicator, other: int) -> None:
        self._comm, self._other = comm, other
        self._connections = Connections(comm, other)

    def send(self, source: str, target: str, seconds: float) -> list[Rail]:
        """Measure all connections together, then those between the same addresses alone."""
        self._speeds((), _TOGETHER_NBYTES, _MEET_SECONDS)
        together = self._speeds((), _TOGETHER_NBYTES, seconds)
        groups: dict[tuple[str, str, str], list[Ends]] = {}
        for path in self._connections.up():
            groups.setdefault((path.local, path.remote, path.scheme), []).append(ends_of(path))
        found = []
        for key, group in groups.items():
            alone = self._speeds(group, _ALONE_NBYTES, seconds) if len(groups) > 1 else together
            speed, share = (sum(speeds.get(ends, 0.0) for ends in group) for speeds in (alone, together))
            found.append(Rail(source, target, *key, speed, share))
        self._connections.restrict(())
        self._comm.send_object(None, self._other)
        return found

    def receive(self) -> None:
        """Receive what the other rank's `send` sends."""
        while (told := self._comm.recv_object(self._other)) is not None:
            only, nbytes = told
            self._connections.restrict([(remote, local, number) for local, remote, number in only])
            data, more = np.empty(nbytes, np.uint8), np.empty(1, np.uint8)
            for _ in range(2):
                while self._comm.recv(more, self._other)[0]:
                    self._comm.recv(data, self._other)
                self._comm.send(more, self._other)
        self._connections.restrict(())

    def _speeds(self, only: Collection[Ends], nbytes: int, seconds: float) -> dict[Ends, float]:
        """Bytes a second over each connection while these alone, or all, carry messages of a size."""
        self._comm.send_object((only, nbytes), self._other)
        self._connections.restrict(only)
        self._messages(nbytes, 0)
        before = self._connections.sent()
        took = self._messages(nbytes, seconds)
        return {ends: (sent - before.get(ends, 0)) / took for ends, sent in self._connections.sent().items()}

    def _messages(self, nbytes: int, seconds: float) -> float:
        """Send one message, and more of them for some seconds; how long it took until all had arrived."""
        data, more = np.zeros(nbytes, np.uint8), np.ones(1, np.uint8)
        begin = time.monotonic()
        while True:
            self._comm.send(more, self._other)
            self._comm.send(data, self._other)
            if time.monotonic() >= begin + seconds:
                break
        self._comm.send(np.zeros(1, np.uint8), self._other)
        self._comm.recv(more, self._other)
        return time.monotonic() - begin
