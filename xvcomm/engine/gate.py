"""The launch gate: compiled code may use a communicator's mapped memory from its first operation until `close`."""

from __future__ import annotations

import threading

from xvcomm.engine.context import Context
from xvcomm.memory.ring import Message
from xvcomm.trace.operation import Operation
from xvcomm.types.opcode import OpCode

CLOSE_SECONDS = 1.0


class LaunchGate:
    """Keeps a communicator's memory mapped while compiled code may use it.

    Attributes:
        lock: puts operations in order. A caller holds it during a compiled call, and checks `open` first.
        open: whether compiled calls may be made.
        logs: results of `log`, by stream handle.
    """

    def __init__(self, context: Context, lock: threading.Lock) -> None:
        self._context, self.lock = context, lock
        self.open = False
        self.logs: dict[int, int] = {}
        # An operation that lasts as long as the gate is open, so that the context unmaps nothing meanwhile.
        self._standing = Operation(OpCode.INIT, -1, Message(0, 0, 0, 0))

    def admit(self, op: OpCode) -> None:
        """Open the gate.

        Raises:
            ClosedError: this rank has closed the communicator.
        """
        with self.lock:
            if not self.open:
                self._context.lifecycle.enter(self._standing, op)
                self._context.lifecycle.on_close(self._close)
                self._opened()
                self.open = True

    def log(self, handle: int) -> int:
        """Address of the launch log of a user's stream, see `Tracker.log_address`.

        0 for a thread's own stream, on which only that thread could record an event.
        """
        if self._context.device.adopt(handle).queue[1]:
            return 0
        found = self.logs[handle] = self._context.tracker.log_address(handle)
        return found

    def _opened(self) -> None:
        """Called with the lock held, before the gate opens."""

    def _close(self) -> None:
        """Close the gate. Memory stays mapped if a compiled call does not return in time."""
        if self.lock.acquire(timeout=CLOSE_SECONDS):
            self.open = False
            self._context.lifecycle.users.discard(self._standing)
            self.lock.release()
