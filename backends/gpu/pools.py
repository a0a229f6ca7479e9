"""Pools of GPU resources, because the vendor's calls to allocate and free them may wait for kernels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from xvcomm.abc.device import Allocation
from xvcomm.backends.gpu.guard import OUT_OF_MEMORY
from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import ResourceError
from xvcomm.memory.segment import round_up

EVENTS_AT_ONCE = 64
_GRAIN = 512


class Event:
    """An event on a stream. Its handle returns to the pool when the object is freed.

    Attributes:
        captured: number of the capture, if it is part of a graph and so cannot be queried; else 0.
    """

    __slots__ = ("_free", "captured", "handle")

    def __init__(self, handle: int, captured: int, free: list[int]) -> None:
        self.handle, self.captured, self._free = handle, captured, free

    def __del__(self) -> None:
        self._free.append(self.handle)


class EventPool:
    """Creates events, and reuses their handles. Thread-safe; the events' device must be current on the thread.

    Args:
        stream: handle of the stream on which compiled code will record all of them; None if they are not for compiled code.
        at_once: number of handles to create when none is free.

    Attributes:
        free: unused handles.
    """

    def __init__(self, runtime: Runtime, stream: int | None = None, at_once: int = EVENTS_AT_ONCE) -> None:
        self._runtime, self._stream, self._at_once = runtime, stream, at_once
        self.free: list[int] = []

    def record(self, stream: int, captured: int) -> Event:
        """Record an event on a stream; `captured` is the number of the capture that it takes part in, or 0."""
        event = self.take(captured)
        self._runtime.record(event.handle, stream)
        return event

    def take(self, captured: int = 0) -> Event:
        """An event that has not been recorded."""
        while (event := self.find(captured)) is None:
            self.free.extend(self._made() for _ in range(self._at_once))
        return event

    def find(self, captured: int = 0) -> Event | None:
        """The same, if there is one; the device need not be current."""
        try:
            return Event(self.free.pop(), captured, self.free)
        except IndexError:
            return None

    def _made(self) -> int:
        handle = self._runtime.event()
        if self._stream is not None:
            self._runtime.recorded(handle, self._stream)
        return handle


class _Block:
    """Device memory in use; it returns to the pool when the object is freed."""

    __slots__ = ("_returned", "address", "nbytes")

    def __init__(self, nbytes: int, address: int, returned: list[tuple[int, int]]) -> None:
        self.nbytes, self.address, self._returned = nbytes, address, returned

    def __del__(self) -> None:
        self._returned.append((self.nbytes, self.address))


class Memory:
    """A pool of device memory. A block is reused once all work enqueued before its return is complete.

    Returning it to the vendor would wait for all kernels, which may wait for a peer that waits for this rank.

    Args:
        points: returns events after all work that is on the device's streams now.
    """

    def __init__(self, runtime: Runtime, points: Callable[[], Sequence[Event]]) -> None:
        self._runtime, self._points = runtime, points
        self._returned: list[tuple[int, int]] = []
        self._resting: list[tuple[tuple[int, int], Sequence[Event]]] = []
        self._idle: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Allocation:
        """Memory that is valid as long as the allocation's owner lives.

        Raises:
            ResourceError: there is not enough.
        """
        size = round_up(max(1, nbytes), _GRAIN)
        with self._lock:
            self._look()
            fitting = [block for block in self._idle if size <= block[0] <= 2 * size]
            if fitting:
                block = min(fitting)
                self._idle.remove(block)
            else:
                block = (size, self._allocate(size))
        return Allocation(block[1], nbytes, _Block(*block, self._returned))

    def _look(self) -> None:
        """Find returned blocks that are no longer in use."""
        count = len(self._returned)  # blocks returned while the events are recorded are not covered by them
        if count:
            points = self._points()
            self._resting.extend((block, points) for block in self._returned[:count])
            del self._returned[:count]
        still = []
        for block, points in self._resting:
            if all(self._runtime.reached(event.handle) for event in points):
                self._idle.append(block)
            else:
                still.append((block, points))
        self._resting = still

    def _allocate(self, size: int) -> int:
        try:
            return self._runtime.allocate(size)
        except VendorError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            while self._idle:
                self._runtime.free(self._idle.pop()[1])
        try:
            return self._runtime.allocate(size)
        except VendorError as error:
            raise ResourceError(
                f"{error}: no {size} bytes of device memory left; free the framework's cache "
                "(torch.cuda.empty_cache()), or use smaller arrays"
            ) from error
