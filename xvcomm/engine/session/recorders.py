"""The flight recorders of all ranks: of this host in shared memory, of other hosts by asking their carriers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from xvcomm.engine.session.joining import Joining
from xvcomm.engine.session.journal import Journal
from xvcomm.rendezvous.store import processes
from xvcomm.trace.format import Excerpt, Life
from xvcomm.types.deadline import Deadline

_ASK_SECONDS, _SILENT_SECONDS = 0.5, 2.0
"""How long a rank of another host has for its answer; for how long one that gave none is not asked again."""


class Recorders:
    """What the ranks of a job do, to their newest records.

    Args:
        joined: what each rank has told of itself.
        rank, neighbours: this rank, and the ranks of this host.
        ask: gives the newest records of a rank of another host, so many, or None if it does not answer in time.
    """

    def __init__(
        self, journal: Journal, joined: Sequence[Joining], rank: int, neighbours: Collection[int],
        ask: Callable[[int, int, Deadline], Excerpt | None],
    ) -> None:  # fmt: skip
        self._journal, self._joined, self._rank, self._neighbours, self._ask = journal, joined, rank, neighbours, ask
        self._silent: dict[int, Deadline] = {}

    def newest(self, rank: int, deadline: Deadline, wanted: int = 1) -> Excerpt | None:
        """A rank's newest records; None if it does not answer until the deadline."""
        if rank in self._neighbours:
            return Excerpt(Life.RUNNING, tuple(self._journal.newest(rank, wanted)))
        if rank in self._silent and not self._silent[rank].expired():
            return None
        found = self._ask(rank, wanted, Deadline.after(deadline.sooner(_ASK_SECONDS)))
        if found is None:
            self._silent[rank] = Deadline.after(_SILENT_SECONDS)
        return found

    def halted(self, rank: int) -> bool:
        """Whether a rank of this host is stopped by a signal, as far as this process can see."""
        there = self._joined[rank]
        seen = rank in self._neighbours and there.processes == self._joined[self._rank].processes
        return seen and processes.halted(there.info.pid)

    def words(self, rank: int) -> str:
        """A rank's last operation as text, for error messages."""
        if rank not in self._neighbours and self._journal.left(rank):
            return "it has left the job"
        found = self.newest(rank, Deadline.after(_ASK_SECONDS))
        if found is None:
            return f"it runs on host {self._joined[rank].info.hostname}, which did not answer"
        stopped = "its process is stopped; " if self.halted(rank) else ""
        if not found.records:
            return f"{stopped}it had not called any operation"
        return f"{stopped}its last operation: {found.records[-1].describe()}"
