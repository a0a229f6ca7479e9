"""Deadlines: made where a user's call enters xvcomm, and passed down to everything that waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic, sleep
from typing import TypeVar

import msgspec

from xvcomm.errors import ArgumentError

_FIRST_PAUSE, _LAST_PAUSE = 0.0002, 0.05

T = TypeVar("T")


def checked(timeout: float) -> float:
    """Validate a user's timeout in seconds and return it.

    Raises:
        ArgumentError: it is not a number, is nan, or is negative.
    """
    try:
        if timeout >= 0:  # false for nan
            return timeout
    except TypeError:
        pass
    raise ArgumentError(f"timeout={timeout!r}: expected seconds, 0 or more")


class Deadline(msgspec.Struct, eq=False, gc=False, frozen=True):
    """A point in time of `time.monotonic`; `math.inf` means no deadline."""

    # A Struct, because every call creates one, and a dataclass takes twice as long to create.
    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """The deadline `seconds` from now; None means no deadline.

        Raises:
            ArgumentError: `seconds` is not a number, is nan, or is negative.
        """
        return NEVER if seconds is None else cls(monotonic() + checked(seconds))

    def left(self) -> float:
        """Seconds left, never negative; `math.inf` without a deadline."""
        return max(0.0, self.at - monotonic())

    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return monotonic() >= self.at

    def sooner(self, seconds: float) -> float:
        """Seconds to sleep or poll: the smaller of `seconds` and the time left."""
        return min(seconds, self.left())


NEVER = Deadline(math.inf)


def poll(look: Callable[[], T | None], deadline: Deadline) -> T | None:
    """Call `look` until it returns something other than None, or the deadline passes (then returns None).

    The pauses between calls grow from 0.2 ms to 50 ms.
    """
    pause = _FIRST_PAUSE
    while (found := look()) is None and not deadline.expired():
        sleep(deadline.sooner(pause))
        pause = min(pause * 1.5, _LAST_PAUSE)
    return found
