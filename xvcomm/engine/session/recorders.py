"""The flight recorders of all ranks: of this host in shared memory, of other hosts by asking their carriers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from xvcomm.engine.session.journal import Journal
from xvcomm.trace.format import Excerpt, Life
from xvcomm.types.deadline import Deadline
from xvcomm.types.topology import RankInfo

_ASK_SECONDS, _SILENT_SECONDS = 0.5, 2.0
"""How long a rank of another host has for its answer; for how long one that gave none is not asked again."""


class Recorders:
    """What the ranks of a job do, to their newest records.

    Args:
        neighbours: the ranks of this host.
        ask: gives the newest records of a rank of another host, so many, or None if it does not answer in time.
    """

    def __init__(
        self, journal: Journal, infos: Sequence[RankInfo], neighbours: Collection[int],
        ask: Callable[[int, int, Deadline], Excerpt | None],
    ) -> None:  # fmt: skip
        self._journal, self._infos, self._neighbours, self._ask = journal, infos, neighbours, ask
        self._silent: dict[int, Deadline] = {}

    def newest(self, rank: int, deadline: Deadline, wanted: int = 1) -> Excerpt | None:
        """A rank's newest records, of a rank of this host only one; None if it does not answer until the deadline."""
        if rank in self._neighbours:
            record = self._journal.last_record(rank)
            return Excerpt(Life.RUNNING, (record,) if record is not None else ())
        if rank in self._silent and not self._silent[rank].expired():
            return None
        found = self._ask(rank, wanted, Deadline.after(deadline.sooner(_ASK_SECONDS)))
        if found is None:
            self._silent[rank] = Deadline.after(_SILENT_SECONDS)
        return found

    def words(self, rank: int) -> str:
        """A rank's last operation as text, for error messages."""
        if rank not in self._neighbours and self._journal.left(rank):
            return "it has left the job"
        found = self.newest(rank, Deadline.after(_ASK_SECONDS))
        if found is None:
            return f"it runs on host {self._infos[rank].hostname}, which did not answer"
        if not found.records:
            return "it had not called any operation"
        return f"its last operation: {found.records[-1].describe()}"
