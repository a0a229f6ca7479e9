"""Streams of a GPU: transfers become kernel launches, and the host waits only on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

from xvcomm.abc.device import Stream
from xvcomm.backends.gpu.engine import Engine
from xvcomm.backends.gpu.guard import on_device, told
from xvcomm.backends.gpu.kernels import CAPTURING, ROWS, Transfer, start
from xvcomm.backends.gpu.messages import NOBODY
from xvcomm.backends.gpu.pools import Event
from xvcomm.backends.gpu.ring_ports import Port, Tail
from xvcomm.backends.gpu.vendor import VendorError
from xvcomm.errors import ArgumentError
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.types.deadline import NEVER, Deadline
from xvcomm.types.dtype import ReduceOp

_LEGACY, _PER_THREAD = 1, 2
_LEAST_PAUSE, _MOST_PAUSE = 0.00002, 0.0005
_KEPT = 32


def _row(port: Port, data: int, message: Message, op: ReduceOp | None, remote_first: bool, apart: int) -> Transfer:
    """A transfer for the kernels."""
    end, state = port.end, port.state.address
    place = port.ring, end.slots, state, end.geometry, end.producer, data
    return Transfer(*place, message, end.peer, op, remote_first, apart)


class GpuStream(Stream):
    """A vendor's stream, the device's own or a foreign one. Used by one thread at a time."""

    def __init__(self, engine: Engine, handle: int, *, owned: bool) -> None:
        self.runtime, self.index = engine.runtime, engine.index
        self.deadline = NEVER
        self._engine, self._handle, self._owned = engine, handle, owned
        self.queue = (handle, threading.get_ident()) if handle == _PER_THREAD else (handle, 0)
        self.lasting = handle <= _LEGACY or handle in engine.own
        self._newest: Event | None = None
        self._empty = owned
        self._transfers: dict[Port, int] = {}
        self._together: list[tuple[Port, Transfer]] | None = None
        self._captured = 0  # the capture that they belong to

    def __del__(self) -> None:
        if self._owned:
            self._engine.idle.appendleft(self._handle)

    @property
    def handle(self) -> int:
        """The vendor's handle, for enqueueing work; it is ordered after transfers that were collected to start together."""
        if self._together:
            self.record_event()
        self.enqueued()
        return self._handle

    def enqueued(self) -> None:
        """Note that work may have been enqueued on the stream."""
        self._empty, self._newest = False, None

    @on_device
    def record_event(self) -> Event:
        return self._start() or self._newest_event()

    def _newest_event(self) -> Event:
        newest, captured = self._newest, self.runtime.capture(self._handle)
        if newest is None or newest.captured != captured:
            return self._record(captured)
        return newest

    def _record(self, captured: int) -> Event:
        self._newest = event = self._engine.events.record(self._handle, captured)
        if not self._owned:
            self._engine.outside[self._handle] = event
        return event

    @on_device
    def wait(self, event: object) -> None:
        self._start()
        self.runtime.wait(self._handle, cast(Event, event).handle)
        self.enqueued()

    def reached(self, event: object) -> bool:
        """See `Stream.reached`; captured work is not on the stream."""
        event = cast(Event, event)
        try:
            return event.captured != 0 or self.runtime.reached(event.handle)
        except VendorError as error:
            raise told(error, self.runtime.kind, self.index) from error

    def capturing(self) -> bool:
        try:
            return self.runtime.capture(self._handle) != 0
        except VendorError as error:
            raise told(error, self.runtime.kind, self.index) from error

    def together(self) -> None:
        if self._together is None:
            self._together = []

    def transfer(
        self, end: RingEnd, data: int, message: Message, op: ReduceOp | None, remote_first: bool, apart: int = 0
    ) -> None:
        """Enqueue one message through a ring end; the device is current on the thread. See `Transfer`."""
        known = self._engine.known(end)
        if known is not None and self._starts(known, data, message, op, remote_first, apart):
            return
        if not self._together:
            self._captured = self.runtime.capture(self._handle)
        captured = self._captured
        port = self._engine.port(end, self._handle, captured)
        row = _row(port, data, message, op, remote_first, apart)
        if captured:
            end.replayed, port.armed.value = True, NOBODY
        else:
            self._catch_up(end)
            self._count(port)
        self._empty = False
        if self._together is None:
            self._launch([(port, row)], captured)
        else:
            self._together.append((port, row))

    def _starts(
        self, port: Port, data: int, message: Message, op: ReduceOp | None, remote_first: bool, apart: int
    ) -> bool:
        """Let compiled code launch a transfer that follows another one of its port on this stream; returns whether it could."""
        before = port.event
        if self._together is not None or before is None or before.captured or port.queue != self.queue:
            return False
        engine, handle = self._engine, self._handle
        key, most = ((port, (message._replace(tag=0), op, remote_first)),), engine.room.left(handle)
        prepared = port.prepared.get((key, most))
        if prepared is None:
            prepared = engine.prepare([(port, _row(port, data, message, op, remote_first, apart))], key, most)
        own = port.own
        if port.event is not own or own is None:
            own = self._own_event(port)
            self.runtime.recorded(own.handle, handle)
        self._catch_up(port.end)
        code = start(prepared.address, data, apart, message.tag, handle, own.handle)
        if code == CAPTURING:
            return False
        if code:
            raise self.runtime.failure(code)
        self._count(port)
        self._empty, self._newest, port.event = False, None, own
        if not self._owned:
            engine.outside[handle] = own
        engine.room.take(handle, port, prepared.blocks)
        if port.messages and not self.queue[1]:
            engine.arm(key, prepared, handle)
        return True

    def _own_event(self, port: Port) -> Event:
        """The event that compiled code records after a port's transfers."""
        own = port.own = port.own or self._engine.events.take()
        return own

    @staticmethod
    def _catch_up(end: RingEnd) -> None:
        """Count the messages of graphs that have finished, before another one is launched: the host does not see them start."""
        if end.replayed:
            end.sequence = max(end.sequence, end.finished()[0])

    def _count(self, port: Port) -> None:
        """Assign the transfer's number, and register it for a later check of its outcome."""
        end = port.end
        end.sequence += 1
        if end.begun is not None:
            end.begun()
        if port not in self._transfers and len(self._transfers) >= _KEPT:
            self._transfers = {p: n for p, n in self._transfers.items() if p.finished()[0] < n}
        self._transfers[port] = end.sequence

    def _start(self) -> Event | None:
        """Launch the collected transfers: first the first transfer of every end, then the second, and so on.

        Returns:
            The event after them, if there were any.
        """
        rows, self._together = self._together, None
        event = None
        rounds: list[list[tuple[Port, Transfer]]] = []
        seen: dict[Port, int] = {}
        for port, row in rows or ():
            turn = seen.get(port, 0)
            seen[port] = turn + 1
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append((port, row))
        for part in rounds:
            for first in range(0, len(part), ROWS):
                event = self._launch(part[first : first + ROWS], self._captured)
        return event

    def _launch(self, rows: Sequence[tuple[Port, Transfer]], captured: int) -> Event:
        for port, _ in rows:
            self._follow(port, captured)
        engine, handle = self._engine, self._handle
        blocks = engine.kernels.move([row for _, row in rows], handle, engine.room.left(handle))
        engine.room.take(handle, rows[-1][0], blocks)
        event = self._record(captured)
        for port, _ in rows:
            port.queue, port.event, port.armed.value = self.queue, event, NOBODY
        if not captured and len(rows) > 1 and not self.queue[1]:
            self._arm(rows)
        return event

    def _arm(self, rows: Sequence[tuple[Port, Transfer]]) -> None:
        """Let compiled code launch the next transfers of these shapes, if it has prepared messages for them."""
        key = tuple((port, (row.message._replace(tag=0), row.op, row.remote_first)) for port, row in rows)
        if key not in rows[0][0].messages:
            return
        engine, handle = self._engine, self._handle
        most = engine.room.left(handle)
        prepared = key[0][0].prepared.get((key, most)) or engine.prepare(rows, key, most)
        for port, _ in rows:
            port.event = own = self._own_event(port)
            # until compiled code records it; other streams may wait for this launch
            self.runtime.record(own.handle, handle)
        engine.room.take(handle, rows[-1][0], prepared.blocks)
        engine.arm(key, prepared, handle)

    def _follow(self, port: Port, captured: int) -> None:
        """Make the stream wait for a port's last transfer, if that is on another stream.

        In a graph only work of the same graph can be waited for, outside only work outside of graphs.
        """
        if captured:
            port.before = port.eager()
        queue, event = (port.queue, port.event) if captured else port.eager()
        if event is not None and queue != self.queue and event.captured == captured:
            self.runtime.wait(self._handle, event.handle)

    @on_device
    def synchronize(self) -> None:
        """See `Stream.synchronize`; releases the interpreter lock."""
        self._start()
        if self._empty:
            return
        if self.runtime.capture(self._handle):
            raise ArgumentError("the host cannot wait for a stream while a graph is captured from it; wait afterwards")
        tail = self._tail()
        spinning = Deadline.after(self._engine.spin)
        pause = _LEAST_PAUSE
        while not tail.through():
            if spinning.expired():
                time.sleep(pause)
                pause = min(2 * pause, _MOST_PAUSE)
        self._forget()

    @on_device
    def flush(self) -> Future[None]:
        """See `Stream.flush`; captured work is never on the stream."""
        self._start()
        if self._empty or self.runtime.capture(self._handle):
            future: Future[None] = Future()
            future.set_result(None)
        else:
            future = self._engine.watcher.submit(self._tail())
        self._forget()
        return future

    def discard(self) -> None:
        """See `Stream.discard`; kernels that wait in the stream's rings return soon."""
        ports = {port for port, _ in self._together or ()}
        ports.update(port for port, following in self._transfers.items() if port.finished()[0] < following)
        self._together = None
        self._forget()
        if ports:
            self._engine.watcher.doom(ports)

    def _tail(self) -> Tail:
        return Tail(self.runtime, self._newest_event(), self._transfers, self.deadline)

    def _forget(self) -> None:
        self._transfers, self._empty = {}, True
