"""The launch gate: compiled code may use a communicator's mapped memory from its first operation until `close`."""

from __future__ import annotations

import threading

from xvcomm.engine.context import Context
from xvcomm.memory.ring import Message
from xvcomm.trace.operation import Operation
from xvcomm.types.opcode import OpCode

_CLOSE_SECONDS = 1.0


class LaunchGate:
    """Keeps a communicator's memory mapped while compiled code may use it.

    Attributes:
        lock: puts operations in order. A caller holds it during a compiled call, and checks `open` first.
        open: whether compiled calls may be made.
        places: results of `place`, by stream handle.
    """

    def __init__(self, context: Context, lock: threading.Lock) -> None:
        self._context, self.lock = context, lock
        self.open = False
        self.places: dict[int, int] = {}
        # An operation that lasts as long as the gate is open, so that the context unmaps nothing meanwhile.
        self._standing = Operation(OpCode.INIT, -1, Message(0, 0, 0, 0))

    def admit(self, op: OpCode) -> None:
        """Open the gate; the caller holds the lock.

        Raises:
            ClosedError: this rank has closed the communicator.
        """
        if not self.open:
            self._context.lifecycle.enter(self._standing, op)
            self._context.lifecycle.on_close(self._close)
            self.open = True

    def place(self, handle: int, *, blocking: bool = True) -> int:
        """Address of a stream's launch log, see `Tracker.log_address`.

        0 for a thread's own stream, on which only that thread could record an event.
        """
        if self._context.device.adopt(handle).queue[1]:
            return 0
        found = self.places[handle] = self._context.tracker.log_address(handle, blocking=blocking)
        return found

    def _close(self) -> None:
        """Close the gate. Memory stays mapped if a compiled call does not return in time."""
        if self.lock.acquire(timeout=_CLOSE_SECONDS):
            self.open = False
            self._context.lifecycle.users.discard(self._standing)
            self.lock.release()
