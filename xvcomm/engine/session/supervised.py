"""What a session requires of each of its communicators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from xvcomm.engine.session.elsewhere import Departure, Stop
from xvcomm.trace.format import Record, Share
from xvcomm.trace.stages import Progress


class Tracked(Protocol):
    """Operations on a device's streams."""

    def look(self) -> None:
        """Check their progress; the vendor's driver may block this call."""


class Stoppable(Protocol):
    """The part of a communicator that stops it."""

    def lose(self, world_rank: int) -> None:
        """Handle the end of a process of the job."""

    def abort(self, word: int, why: str = "") -> None:
        """Stop it; `word` contains reason and rank."""

    def hear(self, world_rank: int, news: Stop | Departure) -> None:
        """Handle that a rank of another host has stopped or closed it."""

    def close(self, why: str = ...) -> None:
        """Leave it; `why` says why no operation may begin any more."""


class Plans(Protocol):
    """How operations of a communicator are carried out."""

    def calls_native(self, op: int, nbytes: int) -> bool:
        """Whether an operation of so many bytes calls the native library, where an island has more than one rank."""


class Supervised(Protocol):
    """A communicator of a session."""

    path: str
    """Its name, equal on all ranks and used once."""
    ranks: tuple[int, ...]
    """Its ranks as numbers of the whole job."""

    @property
    def ident(self) -> int:
        """Its number in records."""

    @property
    def rank(self) -> int:
        """This process's rank in it."""

    @property
    def lifecycle(self) -> Stoppable:
        """The part that stops it."""

    @property
    def tracker(self) -> Tracked:
        """Its operations on the device's streams."""

    @property
    def planner(self) -> Plans:
        """Its plans."""

    def way(self, peer: int, op: int, nbytes: int) -> str:
        """See `Record.way`: of an operation of so many bytes, a collective if `peer` is NO_PEER, else a message."""

    def carried(self, records: Sequence[Record]) -> dict[Record, tuple[Share, ...]]:
        """See `Record.shares`: of records of it, oldest first, those of which something is known. Never blocks."""

    def progress(self) -> Progress:
        """How far its operations are; never waits for the device."""

    def look(self) -> None:
        """Handle messages of other ranks; never waits for the device."""

    def after_fork(self) -> None:
        """Close it in a forked child."""
