"""Daemon threads that start safely even if a signal handler raises in the middle of `start`."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable

from xvcomm.errors import ResourceError


class Daemon(threading.Thread):
    """A daemon thread whose start survives a signal handler that raises.

    Python runs signal handlers in the main thread, also inside `Thread.start`. If one raises there, `threading` forgets the
    thread that it has started, and both threads end with KeyError. Therefore a helper thread, where no signal handler runs,
    calls `Thread.start`.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self._gate = _thread.allocate_lock()
        self._barred = False

    def start(self) -> None:
        """Start the thread, unless it was started. If a signal handler raises meanwhile, the thread still starts, or a later
        call starts it.

        Raises:
            ResourceError: the system refuses another thread.
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

    def run(self) -> None:
        """Run with SIGPIPE blocked: where a program has restored its default action, a lost connection would end the process."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        super().run()

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
        """Wait until the thread has ended. If it has not started yet, it never will."""
        with self._gate:
            self._barred = True
        if self.ident is not None:
            super().join(timeout)
