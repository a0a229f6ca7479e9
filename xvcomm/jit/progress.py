"""Tells the user at a first start that kernels are being compiled, and how many are done."""

from __future__ import annotations

from time import monotonic

from xvcomm.system.notice import notice

ABOUT = 38
"""Approximate number of kernels that a rank on host memory needs for its first operations; other devices need a few more."""

FIRST_SECONDS, SECONDS_BETWEEN = 2.0, 10.0


class Progress:
    """Kernels that this process has compiled, or waited for while another process compiled them.

    Attributes:
        ready: number of kernels loaded or compiled so far.
    """

    def __init__(self) -> None:
        self.ready = 0
        self._spent = 0.0
        self._since: float | None = None
        self._next = FIRST_SECONDS

    def say(self, kept: bool) -> None:
        """Log a notice after 2 s without a kernel, then every 10 s. Called repeatedly while a kernel is missing.

        Args:
            kept: whether the next start will find the kernels on disk.
        """
        now = monotonic()
        if self._since is None:
            self._since = now
        spent = self._spent + now - self._since
        if spent < self._next:
            return
        self._next = spent + SECONDS_BETWEEN
        which = f"{self.ready + 1} of about {ABOUT}" if self.ready < ABOUT else f"{self.ready + 1}"
        often = "once per machine and user" if kept else "at every start because they cannot be stored"
        notice(f"compiling kernels, {often}: {which}, {spent:.0f} s so far")

    def rest(self) -> None:
        """Pause the clock: no kernel is missing at present."""
        if self._since is not None:
            self._spent += monotonic() - self._since
            self._since = None
