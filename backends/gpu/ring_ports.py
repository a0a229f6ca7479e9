"""Ring ends as a GPU uses them, their operations on streams, and the thread that polls flushed streams."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future

from xvcomm.abc.device import Allocation, RingStalled, RingStopped
from xvcomm.backends.gpu.guard import told
from xvcomm.backends.gpu.kernels import Prepared
from xvcomm.backends.gpu.messages import NOBODY, ArmedMessages
from xvcomm.backends.gpu.pools import Event
from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.memory.ring import Message, Reason, RingEnd
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline
from xvcomm.types.dtype import ReduceOp

_PAUSE_SECONDS = 0.0005
_GRACE_SECONDS = 0.5

Shape = tuple[Message, ReduceOp | None, bool]
"""A message with tag 0; its reduction; and whether the remote elements are the left operand."""


Together = tuple[tuple["Port", Shape], ...]
"""Messages of one launch, each of another port."""


class Port:
    """A ring end as its device uses it. Its transfers are ordered, whichever streams they are on.

    Attributes:
        ring: address of the ring's memory for the device.
        state: device memory in which kernels keep their position.
        queue, event: stream of the last transfer (with its capture), and the event after it.
        before: the same for the last transfer outside of graphs, if the last one is in a graph.
        own: the event that compiled code records repeatedly after the transfers that it launches.
        prepared: launches that begin with one of its transfers, by their shapes and maximum number of blocks.
        armed: handle of the stream that messages are armed for, or NOBODY; if armed, `event` is `own`.
        messages: messages for compiled code that begin with one of its messages.
    """

    __slots__ = (
        "_closed", "armed", "before", "end", "event", "messages", "own", "prepared", "queue", "ring", "state",
    )  # fmt: skip

    def __init__(self, end: RingEnd, ring: int, state: Allocation) -> None:
        self.end, self.ring, self.state = end, ring, state
        self.queue: tuple[int, int] = (0, 0)
        self.event: Event | None = None
        self.before: tuple[tuple[int, int], Event | None] = (0, 0), None
        self.own: Event | None = None
        self.prepared: dict[tuple[Together, int], Prepared] = {}
        self.armed = ctypes.c_int64(NOBODY)
        self.messages: dict[Together, ArmedMessages] = {}
        self._closed: tuple[tuple[int, bool], int] | None = None

    def finished(self) -> tuple[int, bool]:
        """See `RingEnd.finished`; the final value, once the end is closed."""
        return self._closed[0] if self._closed else self.end.finished()

    def abort_word(self) -> int:
        """See `RingEnd.abort_word`; the final value, once the end is closed."""
        return self._closed[1] if self._closed else self.end.abort_word()

    def eager(self) -> tuple[tuple[int, int], Event | None]:
        """`queue` and `event` of the last transfer outside of graphs."""
        return self.before if self.event is not None and self.event.captured else (self.queue, self.event)

    def stop(self) -> None:
        """Make a kernel that waits in the ring return, unless the ring was already stopped."""
        self.end.abort(Reason.ABORTED.word(self.end.peer))

    def close(self) -> None:
        """Save the final values of an end that is being closed."""
        self._closed = self.end.finished(), self.end.abort_word()


class Tail:
    """The work that was on a stream at one moment, to be waited for.

    Attributes:
        transfers: ports, each with the number of the message after the last one that the stream has for it.
    """

    __slots__ = ("_event", "_runtime", "deadline", "transfers")

    def __init__(self, runtime: Runtime, event: Event, transfers: dict[Port, int], deadline: Deadline) -> None:
        self._runtime, self._event = runtime, event
        self.transfers, self.deadline = transfers, deadline

    def through(self) -> bool:
        """Whether all of it is complete. Never blocks.

        Raises:
            RingStopped: a transfer was given up.
            RingStalled: the deadline has passed.
        """
        # read first: ports that are checked afterwards have their final state
        reached = self._runtime.reached(self._event.handle)
        for port, following in self.transfers.items():
            finished, goes_on = port.finished()
            if finished < following and not goes_on:
                raise RingStopped(port.end, port.abort_word(), finished)
        if not reached and self.deadline.expired():
            raise RingStalled(
                [port.end for port, following in self.transfers.items() if port.finished()[0] < following]
            )
        return reached


class Watcher:
    """Polls flushed streams and abandoned ports: one daemon thread per device, asleep while there are none."""

    def __init__(self, runtime: Runtime, index: int) -> None:
        self._runtime, self._index = runtime, index
        self._tails: list[tuple[Tail, Future[None]]] = []
        self._doomed: dict[Port, Deadline] = {}
        self._arrived = threading.Condition()
        self._thread: Daemon | None = None

    def submit(self, tail: Tail) -> Future[None]:
        """A future that completes with the tail; it raises what `Tail.through` raises."""
        future: Future[None] = Future()
        with self._arrived:
            self._tails.append((tail, future))
            self._wake()
        return future

    def doom(self, ports: Collection[Port]) -> None:
        """Stop the ports' rings after a while in which others may stop them with a better reason."""
        with self._arrived:
            self._doomed.update(dict.fromkeys(ports, Deadline.after(_GRACE_SECONDS)))
            self._wake()

    def spare(self, port: Port) -> None:
        """Do not access a port any more."""
        with self._arrived:
            self._doomed.pop(port, None)

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = Daemon(f"xvcomm-gpu-{self._index}", self._run)
        self._thread.start()
        self._arrived.notify()

    def _run(self) -> None:
        self._runtime.use(self._index)
        while True:
            with self._arrived:
                while not self._tails and not self._doomed:
                    self._arrived.wait()
                for port in [port for port, deadline in self._doomed.items() if deadline.expired()]:
                    port.stop()
                    del self._doomed[port]
                tails = list(self._tails)
            ended = [entry for entry in tails if self._end(*entry)]
            with self._arrived:
                self._tails = [entry for entry in self._tails if entry not in ended]
            time.sleep(_PAUSE_SECONDS)

    def _end(self, tail: Tail, future: Future[None]) -> bool:
        """Complete the future of a tail that is complete or has failed; returns whether it was."""
        try:
            if not tail.through():
                return False
        except VendorError as error:
            future.set_exception(told(error, self._runtime.kind, self._index))
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        return True
