"""Where compiled code comes to what a communicator has mapped, from its first operation until the communicator is closed."""

from __future__ import annotations

import threading

from xvcomm.engine.context import Context
from xvcomm.memory.ring import Message
from xvcomm.trace.operation import Operation
from xvcomm.types.opcode import OpCode

_CLOSE_SECONDS = 1.0


class LaunchGate:
    """Lets compiled code at a communicator's memory, under a lock, from its first operation until `Context.close`.

    Attributes:
        lock: under which operations are put in order; whoever makes a call holds it, and has looked whether the gate is open.
        open: whether calls may be made.
        places: what `place` gave, by handle.
    """

    def __init__(self, context: Context, lock: threading.Lock) -> None:
        self._context, self.lock = context, lock
        self.open = False
        self.places: dict[int, int] = {}
        # While the gate is open, compiled code may be inside: an operation that keeps memory mapped.
        self._standing = Operation(OpCode.INIT, -1, Message(0, 0, 0, 0))

    def admit(self, op: OpCode) -> None:
        """Open it; the caller holds the lock.

        Raises:
            ClosedError: this rank has closed the communicator.
        """
        if not self.open:
            self._context.enter(self._standing, op)
            self._context.closing.append(self._close)
            self.open = True

    def place(self, handle: int, *, blocking: bool = True) -> int:
        """Where operations on a stream are noted, see `Tracker.log`; the stream is looked at.

        0 for a thread's own stream: only that thread could mark it.
        """
        if self._context.device.adopt(handle).queue[1]:
            return 0
        found = self.places[handle] = self._context.tracker.log_address(handle, blocking=blocking)
        return found

    def _close(self) -> None:
        """Let no compiled code in any more; memory stays mapped if some does not come out."""
        if self.lock.acquire(timeout=_CLOSE_SECONDS):
            self.open = False
            self._context.leave(self._standing, moved=False)
            self.lock.release()
