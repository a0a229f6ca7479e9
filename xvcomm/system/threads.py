"""Daemon threads that the user's thread can start while its signal handlers raise."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from xvcomm.errors import ResourceError


class Daemon(threading.Thread):
    """A daemon thread whose start a signal handler that raises cannot spoil.

    Python runs signal handlers in the main thread, also in the middle of `Thread.start`, which then forgets the thread
    that it has started: both end by KeyError. So another thread calls that, where no handler runs.

    Args:
        name: of the thread.
        run: what it does.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self._gate = _thread.allocate_lock()
        self._barred = False

    def start(self) -> None:
        """Start, unless it was started. If a signal handler raises, it starts nevertheless, or another call starts it.

        Raises:
            ResourceError: the system gives no more threads.
        """
        if self.ident is not None:
            return
        done = _thread.allocate_lock()
        done.acquire()
        refused: list[RuntimeError] = []
        try:
            _thread.start_new_thread(self._bring_up, (done, refused))
        except RuntimeError as error:
            refused.append(error)
        else:
            done.acquire()
        if refused:
            raise ResourceError(
                f"cannot start the thread {self.name}: {refused[0]}; raise the limit of processes (`ulimit -u`, docker run "
                "--pids-limit), or of memory"
            ) from refused[0]

    def _bring_up(self, done: _thread.LockType, refused: list[RuntimeError]) -> None:
        try:
            with self._gate:
                if self.ident is None and not self._barred:
                    super().start()
        except RuntimeError as error:
            refused.append(error)
        finally:
            done.release()

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended; if it was not started yet, it never will be."""
        with self._gate:
            self._barred = True
        if self.ident is not None:
            super().join(timeout)
