"""Tells a user who waits for the first start that kernels are compiled, and how far that is."""

from __future__ import annotations

from time import monotonic

from xvcomm.system.notice import notice

ABOUT = 38
"""How many kernels a rank on host memory needs for its first operations; others need some more."""

FIRST_SECONDS, SECONDS_BETWEEN = 2.0, 10.0


class Progress:
    """What one process has compiled, or waited for while another one compiled it.

    Attributes:
        ready: how many kernels it has.
    """

    def __init__(self) -> None:
        self.ready = 0
        self._spent = 0.0
        self._since: float | None = None
        self._next = FIRST_SECONDS

    def say(self, kept: bool) -> None:
        """To be called again and again while a kernel is missing: a notice after 2 s, and then every 10 s.

        Args:
            kept: whether the next start finds the kernels.
        """
        now = monotonic()
        if self._since is None:
            self._since = now
        spent = self._spent + now - self._since
        if spent < self._next:
            return
        self._next = spent + SECONDS_BETWEEN
        which = f"{self.ready + 1} of about {ABOUT}" if self.ready < ABOUT else f"{self.ready + 1}"
        often = "once for this machine and user" if kept else "at every start because they cannot be kept"
        notice(f"compiling kernels, {often}: {which}, {spent:.0f} s so far")

    def rest(self) -> None:
        """No kernel is missing for now."""
        if self._since is not None:
            self._spent += monotonic() - self._since
            self._since = None
