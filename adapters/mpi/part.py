"""State shared by all views of one communicator: its matcher, and the queue of its collectives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from xvcomm.adapters.mpi.matching import Matcher
from xvcomm.adapters.mpi.progress import busy, wait_until
from xvcomm.comm.communicator import Communicator
from xvcomm.engine.inflight.work import OrderedWorker
from xvcomm.errors import ArgumentError
from xvcomm.system import forking
from xvcomm.trace.callsite import find_call_site
from xvcomm.types.deadline import NEVER

_CLOSE_SECONDS = 2.0
_INSIDE = 2  # minimum depth of xvcomm's own frames when `start` looks up the call site


class Part:
    """The MPI state of one communicator."""

    def __init__(self, communicator: Communicator) -> None:
        if communicator.device != "host":
            raise ArgumentError(
                f"this rank's device is {communicator.device}, but MPI's buffers must be in host memory: join with "
                "xvcomm.init(device='host'), or use the Communicator's own operations, which accept arrays of the device"
            )
        self.comm = communicator
        self.matcher = Matcher(communicator)
        self._queue = OrderedWorker("xvcomm-collectives")
        self._order = threading.Lock()
        forking.register(self)

    def after_fork(self) -> None:
        """Replace locks that threads of the parent may hold, so that calls reach the communicator, which refuses them."""
        self._order = threading.Lock()
        self.matcher.after_fork()

    @classmethod
    def of(cls, communicator: Communicator) -> Part:
        """The Part of a communicator, created on first use."""
        with _making:
            # Stored on the communicator: a global table would keep all communicators alive.
            found: Part | None = vars(communicator).get(_NAME)
            if found is None:
                found = vars(communicator)[_NAME] = cls(communicator)
                communicator.on_close(found._end)
            return found

    def run(self, action: Callable[[], Any]) -> Any:
        """Run a collective after those that were started before."""
        if not self._queue.pending and not busy():
            with self._order:
                return action()
        future = self.start(action)
        wait_until(future.done, NEVER)  # the operations of the action have deadlines of their own
        return future.result()

    def start(self, action: Callable[[], Any]) -> Future[Any]:
        """Run a collective in a thread, after those that were started before."""

        def ordered() -> Any:
            with self._order:
                return action()

        return self._queue.submit(ordered, find_call_site(_INSIDE))

    def close(self) -> None:
        """Wait for detached sends, stop the thread, and close the communicator."""
        try:
            self.matcher.close()
        finally:
            self._queue.close(_CLOSE_SECONDS)
        self.comm.close()

    def _end(self) -> None:
        """Stop the thread. Any thread may close the communicator, including this one."""
        with contextlib.suppress(RuntimeError):
            self._queue.close(0)


_making = threading.Lock()
_NAME = "_mpi_part"
"""Name of the communicator's attribute that stores the Part."""
