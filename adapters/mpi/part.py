"""What all views of one communicator share: its matcher, and the order of its collectives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from xvcomm.adapters.mpi.matching import Matcher, busy, wait_until
from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import OrderedWorker
from xvcomm.errors import ArgumentError
from xvcomm.system import forking
from xvcomm.trace.callsite import find_call_site
from xvcomm.types.deadline import NEVER

_CLOSE_SECONDS = 2.0
_INSIDE = 2  # functions of xvcomm that are under way at the least when `start` asks for the call site


class Part:
    """One communicator, seen as MPI sees it.

    Attributes:
        comm: the communicator.
        matcher: of its messages.
    """

    def __init__(self, communicator: Communicator) -> None:
        if communicator.device != "host":
            raise ArgumentError(
                f"this rank's device is {communicator.device}, and MPI's buffers lie in host memory: join with "
                "xvcomm.init(device='host'), or use the Communicator's own operations, which take arrays of the device"
            )
        self.comm = communicator
        self.matcher = Matcher(communicator)
        self._queue = OrderedWorker("xvcomm-collectives")
        self._order = threading.Lock()
        forking.register(self)

    def after_fork(self) -> None:
        """Let calls come to the communicator, which refuses them, where threads of the parent's hold locks."""
        self._order = threading.Lock()
        self.matcher.after_fork()

    @classmethod
    def of(cls, communicator: Communicator) -> Part:
        """The one of a communicator, made when first asked for."""
        with _making:
            # A table of all would keep them: each holds its communicator.
            found: Part | None = vars(communicator).get(_NAME)
            if found is None:
                found = vars(communicator)[_NAME] = cls(communicator)
                communicator._context.lifecycle.on_close(found._end)
            return found

    def run(self, action: Callable[[], Any]) -> Any:
        """Do a collective, behind those that were started."""
        if self._queue.idle and not busy():
            with self._order:
                return action()
        future = self.start(action)
        wait_until(future.done, NEVER)  # the action has deadlines of its own
        return future.result()

    def start(self, action: Callable[[], Any]) -> Future[Any]:
        """Let a collective be done, behind those that were started before, while this thread goes on."""

        def ordered() -> Any:
            with self._order:
                return action()

        return self._queue.submit(ordered, find_call_site(_INSIDE))

    def close(self) -> None:
        """Wait for what nobody waits for, end the thread, and close the communicator."""
        try:
            self.matcher.close()
        finally:
            self._queue.close(_CLOSE_SECONDS)
        self.comm.close()

    def _end(self) -> None:
        """Let the thread end. Any thread may close the communicator, also this one."""
        with contextlib.suppress(RuntimeError):
            self._queue.close(0)


_making = threading.Lock()
_NAME = "_mpi_part"
"""Of the communicator's attribute."""
