"""MPI's weak progress: whenever a thread is in a call that waits or tests, it advances the matching of all communicators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from xvcomm.types.deadline import Deadline

_SPINS = 100
_SHORTEST, _LONGEST = 50e-6, 1e-3


class Matching(Protocol):
    """What has to be advanced."""

    def advance(self) -> None:
        """Match what can be matched. Never blocks."""


_waiting: set[Matching] = set()


def add(matching: Matching) -> None:
    """Advance `matching` from now on: it has unmatched receives or unacknowledged sends."""
    _waiting.add(matching)


def discard(matching: Matching) -> None:
    """Advance `matching` no longer."""
    _waiting.discard(matching)


def only(matching: Matching) -> bool:
    """Whether nothing else has to be advanced."""
    return _waiting == {matching}


def busy() -> bool:
    """Whether anything has to be advanced, so that no thread may block elsewhere."""
    return bool(_waiting)


def advance() -> None:
    """Match what can be matched, on all communicators."""
    for matching in tuple(_waiting):
        matching.advance()


def wait_until(done: Callable[[], bool], deadline: Deadline, late: Callable[[], None] | None = None) -> None:
    """Block until `done` relooks True, and match messages meanwhile.

    Args:
        late: called when the deadline has passed; it should raise.
    """
    looks, pause = 0, _SHORTEST
    while not done():
        advance()
        looks += 1
        if looks < _SPINS:
            time.sleep(0)
            continue
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
        if late is not None and deadline.expired():
            late()
