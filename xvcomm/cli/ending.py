"""How the ranks of a launcher end, and what the launchers of a job's hosts tell each other about it."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: exit code of the launcher: the first failing rank's, or 128 + signal.
        reason: what failed first, ignoring failures caused by another rank, in words: "rank 1 ended with exit code 2".
        signal: the signal sent to the launcher that ended the job, or None.
        last_words: the failing rank's last lines on stderr (on stdout if stderr is empty); None if no rank failed.
        consequence: whether another rank caused the failure.
    """

    code: int
    reason: str = ""
    signal: signal.Signals | None = None
    last_words: tuple[bytes, ...] | None = None
    consequence: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a launcher ends its ranks: a failure in words, or a signal that it was sent."""

    reason: str
    signal: signal.Signals | None = None


class Others(Protocol):
    """The launchers of the job's other hosts."""

    @property
    def news(self) -> int:
        """A descriptor that is ready when `hear` has something to tell."""

    @property
    def hostname(self) -> str:
        """Name of this host."""

    def hear(self) -> Iterable[Stop]:
        """What ends the job on other hosts; does not block."""

    def stop(self, stop: Stop) -> None:
        """Tell them that this launcher ends its ranks."""

    def end(self, outcome: Outcome) -> None:
        """Tell them that the ranks of this launcher have ended."""

    def over(self) -> float:
        """Until when to wait for their ends, on the monotonic clock; -inf once all have ended."""

    def outcome(self) -> Outcome:
        """How the whole job ended."""
