"""One deadline, made where a call enters and passed down as time left."""

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
    """A timeout that a user gave, in seconds.

    Raises:
        ArgumentError: it is none, or less than 0.
    """
    try:
        if timeout >= 0:  # nan is not
            return timeout
    except TypeError:
        pass
    raise ArgumentError(f"timeout={timeout!r}: expected seconds, 0 or more")


class Deadline(msgspec.Struct, eq=False, gc=False):
    """A point on the monotonic clock, `at`; `math.inf` means none."""

    # A Struct, because every call makes one: a dataclass takes twice as long.
    at: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """The deadline `seconds` from now; None means never.

        Raises:
            ArgumentError: these are no seconds, or less than 0.
        """
        return NEVER if seconds is None else cls(monotonic() + checked(seconds))

    def left(self) -> float:
        """Seconds left, never negative; `math.inf` without a deadline."""
        return max(0.0, self.at - monotonic())

    def expired(self) -> bool:
        """Whether the point has passed."""
        return monotonic() >= self.at

    def sooner(self, seconds: float) -> float:
        """Seconds to sleep or poll: `seconds`, or what is left if that is less."""
        return min(seconds, self.left())


NEVER = Deadline(math.inf)


def poll(look: Callable[[], T | None], deadline: Deadline) -> T | None:
    """Call `look` until it gives something, at first often, then every 50 ms; None when time is up."""
    pause = _FIRST_PAUSE
    while (found := look()) is None and not deadline.expired():
        sleep(deadline.sooner(pause))
        pause = min(pause * 1.5, _LAST_PAUSE)
    return found
