"""The flight recorders of all ranks: of this host in shared memory, of other hosts by asking their carriers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from xvcomm.engine.session.joining import Joining
from xvcomm.engine.session.journal import Journal
from xvcomm.rendezvous.store import processes
from xvcomm.trace.format import Excerpt, Life
from xvcomm.types.deadline import Deadline

_ASK_SECONDS, _SILENT_SECONDS = 0.5, 2.0
"""How long a rank of another host has for its answer in `words`; for how long one that gave none counts as silent."""


class Recorders:
    """What the ranks of a job do, to their newest records.

    Args:
        joined: what each rank has told of itself.
        rank, neighbours: this rank, and the ranks of this host.
        ask: gives the newest records of ranks of other hosts, so many of each, of those that answer in time.
        answers: whether the host of a rank of another host answers.
    """

    def __init__(
        self, journal: Journal, joined: Sequence[Joining], rank: int, neighbours: Collection[int],
        ask: Callable[[Collection[int], int, Deadline], Mapping[int, Excerpt]], answers: Callable[[int], bool],
    ) -> None:  # fmt: skip
        self._journal, self._joined, self._rank, self._neighbours = journal, joined, rank, neighbours
        self._ask, self._answers = ask, answers
        self._silent: dict[int, Deadline] = {}

    def newest(self, ranks: Collection[int], deadline: Deadline, wanted: int = 1) -> dict[int, Excerpt]:
        """The newest records of ranks; of those that do not answer until the deadline nothing."""
        here = [r for r in ranks if r in self._neighbours]
        found = {r: Excerpt(Life.RUNNING, tuple(self._journal.newest(r, wanted))) for r in here}
        elsewhere = [r for r in ranks if r not in self._neighbours]
        if elsewhere:
            found.update(self._ask(elsewhere, wanted, deadline))
        for rank in elsewhere:
            if rank in found:
                self._silent.pop(rank, None)
            else:
                self._silent[rank] = Deadline.after(_SILENT_SECONDS)
        return found

    def silent(self, rank: int) -> bool:
        """Whether a rank has not answered a moment ago."""
        return rank in self._silent and not self._silent[rank].expired()

    def halted(self, rank: int) -> bool:
        """Whether a rank of this host is stopped by a signal, as far as this process can see."""
        there = self._joined[rank]
        seen = rank in self._neighbours and there.processes == self._joined[self._rank].processes
        return seen and processes.halted(there.info.pid)

    def words(self, rank: int) -> str:
        """A rank's last operation as text, for error messages."""
        if rank not in self._neighbours and self._journal.left(rank):
            return "it has left the job"
        found = None
        if not self.silent(rank):
            found = self.newest([rank], Deadline.after(_ASK_SECONDS)).get(rank)
        if found is None:
            where = self._joined[rank].info.hostname
            if self._answers(rank):
                return f"it does not answer, but its host {where} does: it is stopped, or very slow"
            return f"it runs on host {where}, which did not answer"
        stopped = "its process is stopped; " if self.halted(rank) else ""
        if not found.records:
            return f"{stopped}it had not called any operation"
        return f"{stopped}its last operation: {found.records[-1].describe()}"
