"""The threads of a session: one watches the processes of the host's other ranks, one polls the device."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xvcomm.engine.session.presence import Presence
from xvcomm.system.threads import Daemon

_LOOK_MS = 100


class WatchedProcess(NamedTuple):
    """A rank of this host whose process is watched.

    Attributes:
        pid: its process id; None if it is in another PID namespace.
        byte: byte that its process has locked; see `Presence`.
    """

    rank: int
    pid: int | None
    byte: int


def refusal() -> str:
    """Why processes cannot be watched with pidfd_open; empty if they can."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"pidfd_open: {error.strerror}"
    return ""


class Watchdog:
    """A daemon thread that waits on pidfds.

    A process for which there is no pidfd (because of a seccomp filter, another PID namespace, or too many open files) is
    watched by its lock, which is checked ten times per second.

    Args:
        presence: this process's lock, with which those of the others are checked.
        on_exit: called once for each rank whose process has ended.
        look: called ten times per second, because writes to shared memory wake no thread. It must not wait for the device,
            which may wait for a rank that is gone.
    """

    def __init__(
        self,
        peers: Sequence[WatchedProcess],
        presence: Presence,
        on_exit: Callable[[int], None],
        look: Callable[[], None],
    ) -> None:
        self._presence, self._on_exit, self._look = presence, on_exit, look
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._gone: list[int] = []
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = Daemon("xvcomm-watchdog", self._run)
        try:
            self._poll.register(self._stop, select.POLLIN)
            for peer in peers:
                self._add(peer)
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def _add(self, peer: WatchedProcess) -> None:
        fd = None
        if peer.pid is not None:
            try:
                fd = os.pidfd_open(peer.pid)
            except ProcessLookupError:
                self._gone.append(peer.rank)
                return
            except OSError:
                pass  # not permitted, or out of descriptors
        if not self._presence.held(peer.byte):  # the pid may have been reused by another process
            if fd is not None:
                os.close(fd)
            self._gone.append(peer.rank)
        elif fd is None:
            self._asked[peer.rank] = peer.byte
        else:
            self._ranks[fd] = peer.rank
            self._poll.register(fd, select.POLLIN)

    def _run(self) -> None:
        for rank in self._gone:
            self._on_exit(rank)
        while True:
            for fd, _ in self._poll.poll(_LOOK_MS):
                if fd == self._stop:
                    return
                self._poll.unregister(fd)
                self._on_exit(self._ranks[fd])
            for rank in [r for r, byte in self._asked.items() if not self._presence.held(byte)]:
                del self._asked[rank]
                self._on_exit(rank)
            self._look()

    def close(self) -> None:
        """Stop the thread and close the descriptors. Idempotent."""
        if self._stop < 0:
            return
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for fd in (*self._ranks, self._stop):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._stop = -1


class Rounds:
    """A daemon thread that looks at the device by a function, ten times per second, or less often if that takes longer."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self._over = call, threading.Event()
        self._thread = Daemon("xvcomm-device", self._run)
        try:
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def _run(self) -> None:
        while not self._over.wait(_LOOK_MS / 1000):
            self._call()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        self._over.set()
        self._thread.join()
