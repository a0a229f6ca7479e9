"""What a session asks of each of its communicators."""

from __future__ import annotations

from typing import Protocol


class Tracked(Protocol):
    """Operations on a device's streams."""

    def look(self) -> None:
        """Look after them; the vendor may hold this up."""


class Stoppable(Protocol):
    """What stops a communicator."""

    def lose(self, world_rank: int) -> None:
        """A process of the job ended."""

    def abort(self, word: int, why: str = "") -> None:
        """Stop it; `word` tells reason and rank."""

    def close(self) -> None:
        """Leave it."""


class Supervised(Protocol):
    """One communicator of a session."""

    @property
    def rank(self) -> int:
        """This process's number in it."""

    @property
    def lifecycle(self) -> Stoppable:
        """What stops it."""

    @property
    def tracker(self) -> Tracked:
        """What it has on the device's streams."""

    def look(self) -> None:
        """Pass on what other ranks said; never waits for the device."""

    def after_fork(self) -> None:
        """End it in a forked child."""
