"""The threads of a session: one watches the processes of the host's other ranks, one looks after the device."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence

from xvcomm.topology import RankInfo

_LOOK_MS = 100


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; tells it from a later one with the same number."""
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[19])


class Watch:
    """A daemon thread that sleeps on process descriptors.

    Args:
        peers: ranks whose process numbers mean the same here as there.
        on_exit: called with a rank whose process has ended, once a rank.
        look: called ten times a second, for what shared memory cannot announce: nobody wakes a thread by writing there. It
            may not wait for the device, which may wait for a rank that is gone.
    """

    def __init__(self, peers: Sequence[RankInfo], on_exit: Callable[[int], None], look: Callable[[], None]) -> None:
        self._on_exit, self._look = on_exit, look
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._gone: list[int] = []
        for peer in peers:
            self._add(peer)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._poll.register(self._stop_read, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="xvcomm-watch", daemon=True)
        self._thread.start()

    def _add(self, peer: RankInfo) -> None:
        try:
            fd = os.pidfd_open(peer.pid)
        except ProcessLookupError:
            self._gone.append(peer.rank)
            return
        except OSError:  # out of descriptors, or forbidden
            return
        try:
            same = start_time(peer.pid) == peer.started
        except OSError:
            same = False
        if not same:
            os.close(fd)
            self._gone.append(peer.rank)
            return
        self._ranks[fd] = peer.rank
        self._poll.register(fd, select.POLLIN)

    def _run(self) -> None:
        for rank in self._gone:
            self._on_exit(rank)
        while True:
            for fd, _ in self._poll.poll(_LOOK_MS):
                if fd == self._stop_read:
                    return
                self._poll.unregister(fd)
                self._on_exit(self._ranks[fd])
            self._look()

    def close(self) -> None:
        """End the thread and close the descriptors. Idempotent."""
        if self._stop_write < 0:
            return
        os.write(self._stop_write, b"x")
        self._thread.join()
        for fd in (*self._ranks, self._stop_read, self._stop_write):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._stop_write = -1


class Rounds:
    """A daemon thread that calls a function ten times a second, or as often as it comes to an end."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._call, self._over = call, threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(_LOOK_MS / 1000):
            self._call()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        self._thread.join()
