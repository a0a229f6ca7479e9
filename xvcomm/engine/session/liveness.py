"""Which ranks of the job live: what this one learns of the ends of others, what it says of them, and what they leave behind."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Sequence

from xvcomm.config import Config
from xvcomm.engine.session.explaining import Explaining
from xvcomm.engine.session.joining import Joining
from xvcomm.engine.session.journal import Journal
from xvcomm.engine.session.presence import Presence
from xvcomm.engine.session.reach import Reach
from xvcomm.engine.session.recorders import Recorders
from xvcomm.engine.session.succession import Succession
from xvcomm.engine.session.supervision import Supervision
from xvcomm.engine.session.watchdog import WatchedProcess
from xvcomm.errors import PeerLost
from xvcomm.memory.segment import sweep


class Liveness:
    """What one rank knows of it. Every end that it learns of it tells `Supervision`, which stops communicators.

    Args:
        joined: what each rank has told of itself.
        rank, neighbours: this rank, and the ranks of this host.
        succession: knows what other ranks listen on.
    """

    def __init__(
        self, joined: Sequence[Joining], rank: int, neighbours: Sequence[int], config: Config, presence: Presence,
        journal: Journal, supervision: Supervision, reach: Reach, recorders: Recorders, explaining: Explaining,
        succession: Succession,
    ) -> None:  # fmt: skip
        self._joined, self._rank, self._neighbours, self._config = joined, rank, neighbours, config
        self._presence, self._journal, self._supervision, self._reach = presence, journal, supervision, reach
        self._recorders, self._explaining, self._succession = recorders, explaining, succession
        self._infos = tuple(there.info for there in joined)

    def gone(self, rank: int) -> bool:
        """Whether a rank has left, has died or cannot be reached."""
        return rank in self._supervision.lost or self._journal.left(rank)

    def _gone_by_now(self, rank: int) -> bool:
        """As `gone`, also if the watchdog has not reported it yet, or will not, since the session ends."""
        return self.gone(rank) or not self._presence.held(self._joined[rank].byte)

    def stricken(self, rank: int) -> bool:
        """Whether a rank of the same host is lost."""
        return self._infos[rank].host in {self._infos[other].host for other in list(self._supervision.lost)}

    def check_neighbours(self) -> None:
        """Raise PeerLost if a rank is lost, while ranks of this host wait for each other to join."""
        for rank in list(self._supervision.lost):
            text = f"rank {rank} on {self._infos[rank].hostname} died while it joined"
            raise PeerLost(text, rank=self._rank, peer=rank)

    def last_words(self, rank: int) -> str:
        """The last operation of a rank as text, for error messages; of a rank of another host also the connections to it."""
        lost = self._supervision.lost
        words = lost[rank] if rank in lost else self._recorders.words(rank)
        connections = "" if rank in self._neighbours else self._reach.transport(rank).connections(rank)
        return f"{words}; connections from {self._infos[self._rank].hostname}: {connections}" if connections else words

    def watched(self) -> list[WatchedProcess]:
        """The processes of this host's other ranks."""
        mine = self._joined[self._rank].processes
        there = [self._joined[rank] for rank in self._neighbours if rank != self._rank]
        return [WatchedProcess(j.info.rank, j.info.pid if j.processes == mine else None, j.byte) for j in there]

    def note_exit(self, rank: int) -> None:
        """A process of this host has ended: stop every communicator that contains it."""
        if not self._journal.left(rank):
            # If it left regularly, its messages and abort words can still be read.
            with contextlib.suppress(OSError):  # out of descriptors: the last rank that leaves removes them too
                self.sweep(rank)
        words, left = self.last_words(rank), self._journal.left(rank)
        self._supervision.note_lost(rank, words)
        if not left:
            first = next((r for r in self._neighbours if not self._gone_by_now(r)), self._rank)
            self._explaining.note_death(rank, writes=first == self._rank)
        self._supervision.lose(rank)

    def lose(self, rank: int, why: str) -> None:
        """A process of another host has ended or cannot be reached: stop every communicator that contains it."""
        self._supervision.note_lost(rank, self._supervision.lost.get(rank, why))
        self._supervision.lose(rank)

    def doubt(self, ranks: Sequence[int]) -> None:
        """Find out which ranks of other hosts are lost, though the store does not tell: what one tells of deaths ends with it."""
        elsewhere = [rank for rank in ranks if rank not in self._neighbours]
        ended = self._succession.ended(elsewhere) if self._succession.generation else ()
        for rank in elsewhere:
            if rank in ended:
                self.lose(rank, "nothing listens any more where it did")
            else:  # the silence of a whole host has been waited for already
                silence = self._config.peer_timeout if self.stricken(rank) else 0.0
                self._reach.transport(rank).doubt(rank, silence)

    def note_left(self, rank: int) -> None:
        """A rank of another host has closed its session."""
        self._journal.note_left(rank)
        self._supervision.note_left(rank)

    def look(self) -> None:
        """Learn which ranks of this host have left; call it regularly. Never blocks."""
        for rank in self._neighbours:
            # A rank that left before it had mapped the communicator's contract check could not publish its leaving there.
            if rank != self._rank and rank not in self._supervision.left and self._journal.left(rank):
                self._supervision.note_left(rank)

    def sweep(self, rank: int, part: str = "") -> None:
        """Remove the names of the segments that a rank of this host created; `part` selects a communicator."""
        sweep(self._config.shm_dir, self._joined[rank].job + part)

    def sweep_lost(self) -> None:
        """As `sweep`, of all ranks of this host that are lost, and of this one, which gives up."""
        for rank in self._neighbours:
            if rank == self._rank or rank in self._supervision.lost:
                self.sweep(rank)

    def sweep_if_last(self, ranks: Iterable[int], left: Collection[int], part: str = "") -> None:
        """Remove the names of segments that some ranks have not mapped, once none of the ranks exists any more.

        Args:
            ranks: the ranks that may map them.
            left: those of them that have left.
            part: selects a communicator.
        """
        if all(r in left or self._gone_by_now(r) for r in ranks):
            with contextlib.suppress(OSError):  # out of descriptors: that must not make a regular close fail
                for rank in ranks:
                    self.sweep(rank, part)
