"""What the streams of one GPU share: its own streams, events, pinned rings, and launches that were prepared."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence

from xvcomm.backends.gpu.guard import on_device
from xvcomm.backends.gpu.kernels import ROWS, STATE_BYTES, Kernels, Prepared, Transfer
from xvcomm.backends.gpu.messages import NOBODY, ArmedMessages
from xvcomm.backends.gpu.pools import EVENTS_AT_ONCE, Event, EventPool, Memory
from xvcomm.backends.gpu.ring_ports import Port, Shape, Together, Watcher
from xvcomm.backends.gpu.room import Room
from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import ArgumentError, ResourceError, XvcommError
from xvcomm.memory.ring import RingEnd
from xvcomm.types.deadline import Deadline

STREAMS = 128
"""Streams created with a device: creating one later may wait for all running kernels."""

_SHAPES = 256
"""Launches and messages of so many shapes are kept for each ring."""
_EVENTS_OF_OTHERS = 8
"""Events of a foreign stream; there may be many such streams."""
_LEAVE_SECONDS, _LEAVE_PAUSE = 5.0, 0.0005


class Engine:
    """State shared by the streams of one device.

    Attributes:
        spin: seconds that the host spins for a stream before it sleeps.
        idle: handles of the device's own unused streams; those that were never used are last.
        own: handles of its own streams in use.
        outside: the newest event on each foreign stream.
        room: limits launches of movers.
    """

    def __init__(self, runtime: Runtime, index: int, kernels: Kernels, spin: float) -> None:
        self.runtime, self.index, self.kernels, self.spin = runtime, index, kernels, spin
        self.events = EventPool(runtime)
        self.memory = Memory(runtime, self._points)
        self.watcher = Watcher(runtime, index)
        self.idle = deque(runtime.stream() for _ in range(STREAMS))
        self.outside: dict[int, Event] = {}
        self.own: set[int] = set()
        self.room = Room()
        self._events_of: dict[int, EventPool] = {}
        self._ports: dict[RingEnd, Port] = {}
        self._place = kernels.place()
        self._opening = threading.Lock()
        self._stranded: list[Port] = []

    def own_stream(self) -> int:
        """The handle of a stream of the device's own. It is never destroyed, which might wait for its work."""
        try:
            handle = self.idle.popleft()
        except IndexError:
            handle = self.runtime.stream()
            while handle in self.outside:  # the handle of a foreign stream that was destroyed
                handle = self.runtime.stream()
        self.own.add(handle)
        return handle

    def events_of(self, stream: int, *, lasting: bool) -> EventPool:
        """Events that compiled code records on a stream, whichever communicator uses it: events are never destroyed."""
        at_once = EVENTS_AT_ONCE if lasting else _EVENTS_OF_OTHERS
        return self._events_of.setdefault(stream, EventPool(self.runtime, stream, at_once))

    def messages(self, parts: Sequence[tuple[RingEnd, Shape]]) -> ArmedMessages | None:
        """Messages for compiled code, once their rings are pinned; the device is current on the thread."""
        ports = [self._ports.get(end) for end, _ in parts]
        key = tuple((port, shape) for port, (_, shape) in zip(ports, parts, strict=True) if port is not None)
        if len(key) < len(parts) or len(parts) > ROWS:
            return None
        kept = key[0][0].messages
        found = kept.get(key)
        if found is None and len(kept) < _SHAPES:
            armed = [(port.end, ctypes.addressof(port.armed)) for port, _ in key]
            ends = [(end.counter, end.carrier, handle, end.replays, end.turn) for end, handle in armed]
            found = kept[key] = ArmedMessages(ends, ctypes.addressof(self.room.version), *self._place)
        return found

    def prepare(self, rows: Sequence[tuple[Port, Transfer]], key: Together, most: int) -> Prepared:
        """A launch for compiled code with at most `most` blocks; stored in its first port."""
        kept = key[0][0].prepared
        if len(kept) >= _SHAPES:
            kept.clear()
        found = kept[key, most] = self.kernels.prepare([row for _, row in rows], most)
        return found

    def arm(self, key: Together, prepared: Prepared, stream: int) -> None:
        """Let compiled code launch the next messages of these shapes, if they are on the same stream."""
        found = key[0][0].messages.get(key)
        events = [port.own.handle for port, _ in key if port.own is not None]
        if found is not None and len(events) == len(key):
            found.arm(prepared, events, self.room.version.value)
            for port, _ in key:
                port.armed.value = stream

    def known(self, end: RingEnd) -> Port | None:
        """The port of a ring end that has been used; None otherwise."""
        return self._ports.get(end)

    def port(self, end: RingEnd, stream: int, captured: int) -> Port:
        """The port of a ring end; pins the ring's memory on first use. Its transfer will be on `stream`.

        Raises:
            ArgumentError: the first use is in a graph.
            ResourceError: the memory cannot be pinned.
        """
        found = self._ports.get(end)
        return found if found is not None else self._open(end, stream, captured)

    def _open(self, end: RingEnd, stream: int, captured: int) -> Port:
        if captured:
            raise ArgumentError(
                f"the first message to or from rank {end.peer} pins memory, which a graph cannot capture; run the "
                "operation once before the capture"
            )
        with self._opening:
            if end not in self._ports:
                state = self.memory.take(STATE_BYTES)
                size = end.layout.size
                try:
                    ring = self.runtime.register(end.address, size)
                except VendorError as error:
                    raise ResourceError(
                        f"{error}: the {size} bytes of the ring to rank {end.peer} cannot be pinned; raise `ulimit -l`, "
                        "or lower XVCOMM_GPU_RING_SLOTS or XVCOMM_GPU_RING_SLOT_BYTES"
                    ) from error
                port = Port(end, ring, state)
                end.closing.append(lambda: self._close(port))
                self.runtime.zero(state.address, STATE_BYTES, stream)
                self._ports[end] = port
            return self._ports[end]

    def _close(self, port: Port) -> None:
        self._ports.pop(port.end, None)
        self.room.forget(port)
        self.watcher.spare(port)
        with contextlib.suppress(XvcommError):  # if the device has failed, its pinned memory is gone too
            self._unpin(port)
        port.close()

    @on_device
    def _unpin(self, port: Port) -> None:
        deadline = Deadline.after(_LEAVE_SECONDS)
        while not self._left(port):
            port.stop()
            if deadline.expired():
                port.end.stuck = True
                # unmapped but pinned, the memory remains valid for a kernel that does not return
                self._stranded.append(port)
                return
            time.sleep(_LEAVE_PAUSE)
        self.runtime.unregister(port.end.address)

    def _left(self, port: Port) -> bool:
        """Whether no kernel accesses a port's memory any more; for graphs that may be replayed their owner must ensure it."""
        _, event = port.eager()
        if event is None or port.finished() == (port.end.sequence, True):
            return True
        return self.runtime.reached(event.handle)

    def _points(self) -> Sequence[Event]:
        """Events after all work on the streams; for foreign streams, which may be gone, the last one recorded."""
        own = [self.events.record(handle, 0) for handle in list(self.own) if not self.runtime.capture(handle)]
        armed = [port.own for port in list(self._ports.values()) if port.armed.value != NOBODY and port.own is not None]
        return [*own, *armed, *(event for event in list(self.outside.values()) if not event.captured)]
