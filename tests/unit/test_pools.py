"""Reuse of GPU memory: not before all work has completed that was enqueued before it was returned."""

from __future__ import annotations

from typing import Any, cast

from xvcomm.abc.device import Allocation
from xvcomm.backends.gpu.pools import Event, Memory
from xvcomm.backends.gpu.vendor import Runtime


class Gpu:
    """Allocates memory; enqueued work completes on request."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.events = 0
        self.memory = Memory(cast(Runtime, self), self.points)
        self.coming_back: list[Allocation] = []
        self._next = 0

    def allocate(self, nbytes: int) -> int:
        self._next += nbytes
        return self._next

    def reached(self, event: int) -> bool:
        return event in self.done

    def points(self) -> list[Event]:
        """An event; another thread gives memory back as soon as it is made."""
        self.events += 1
        event = Event(self.events, 0, [])
        self.coming_back.clear()
        return [event]


def test_memory_returned_after_the_events_waits_for_later_ones() -> None:
    gpu = Gpu()
    first, second = gpu.memory.take(1000), gpu.memory.take(1000)
    before, behind = first.address, second.address
    gpu.coming_back.append(second)
    del first, second
    others: list[Any] = [gpu.memory.take(1000)]
    gpu.done.add(1)
    others.append(gpu.memory.take(1000))
    assert others[1].address == before, "all is done that was enqueued before it came back"
    others.append(gpu.memory.take(1000))
    assert behind not in [taken.address for taken in others], "an event from before it came back was taken for it"
    gpu.done.add(2)
    assert gpu.memory.take(1000).address == behind
