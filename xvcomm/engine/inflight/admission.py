"""Asynchronous messages of a device that wait on the host for their turn.

A kernel that stands on the device behind one that waits for a peer holds up its hardware queue, which several streams
share; and what the peer waits for may stand behind it there. So of each ring one launch at a time is on the device, and
none stands behind a message that may wait: it stays here until the ring is through with what came before. A thread looks
after those that stay. Whoever cannot wait for that lets them go on at once, in order, for the device to sort out. Who
waits for a message stands in a hardware queue too, so the host waits as long as messages of other rings stay.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from xvcomm.abc.device import Mark
from xvcomm.engine.inflight.work import Work
from xvcomm.memory.ring import RingEnd
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.engine.inflight.tracker import Tracker

T = TypeVar("T")
"""What the caller knows a message by."""

_PAUSE_SECONDS = 0.00005

AT_ONCE = 96
"""Launches that may be under way: NVIDIA's GPUs run 128 kernels at once, and those that wait for a peer count."""


@dataclass(slots=True, eq=False)
class Start(Generic[T]):
    """Messages that start together.

    Attributes:
        behind: what comes first on the device: marks on the arrays' streams.
        ends: the rings that they use.
        deadline: the soonest of theirs.
    """

    transfers: Sequence[T]
    behind: Sequence[Mark]
    ends: frozenset[RingEnd]
    deadline: Deadline


class AdmissionQueue(Generic[T]):
    """The queue of one communicator. Any thread.

    Args:
        go: puts a Start on the device. What it raises, the messages' Works raise too.
    """

    def __init__(self, tracker: Tracker, go: Callable[[Start[T]], None]) -> None:
        self._tracker, self._go = tracker, go
        self._arrived = threading.Condition()
        self._queue: list[Start[T]] = []
        self._under_way: dict[RingEnd, None] = {}
        self._thread: Daemon | None = None
        self._closed = False

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._queue)

    def add(self, launch: Start[T]) -> None:
        """Let messages start when it is their turn; at once if it is, and then this raises what goes wrong."""
        with self._arrived:
            if all(launch.ends.isdisjoint(earlier.ends) for earlier in self._queue) and self._ready(launch.ends):
                self._start(launch)
                return
            self._queue.append(launch)
            if self._thread is None:
                self._thread = Daemon("xvcomm-turns", self._run)
            self._thread.start()
            self._arrived.notify()

    def at_once(self, ends: Collection[RingEnd], go: Callable[[], Sequence[Work] | None]) -> Sequence[Work] | None:
        """Start messages otherwise, if nothing waits and they would not; gives what `go` does, None if it has not."""
        if self._queue:
            return None
        with self._arrived:
            started = go() if not self._queue and self._ready(ends) else None
            if started is not None:
                self._under_way.update(dict.fromkeys(ends))
            return started

    def let_go(self, ends: Collection[RingEnd]) -> None:
        """Start all that waits for these rings, and what comes before it on others."""
        with self._arrived:
            concerned, chosen = set(ends), []
            for launch in reversed(self._queue):
                if not launch.ends.isdisjoint(concerned):
                    concerned |= launch.ends
                    chosen.append(launch)
            for launch in reversed(chosen):
                self._take(launch)

    def come(self, ends: Collection[RingEnd], over: Callable[[], bool], deadline: Deadline) -> None:
        """Block while messages of other rings wait, until `over`; then, or late, start what waits for these rings."""
        rings = set(ends)
        while not deadline.expired():
            with self._arrived:
                self._sweep()
                if all(launch.ends <= rings for launch in self._queue):
                    break
            if over():
                return
            self._tracker.poll()
            time.sleep(_PAUSE_SECONDS)
        self.let_go(rings)

    def come_behind(self, ends: Collection[RingEnd], over: Callable[[], bool], deadline: Deadline) -> None:
        """The same for messages that were started at once, and so need no look whether they have."""
        if self._queue:
            self.come(ends, over, deadline)

    def come_next(self, ends: Collection[RingEnd], deadline: Deadline) -> None:
        """The same until nothing waits for these rings: before a message that is put on the device at once."""
        self.come(ends, lambda: all(launch.ends.isdisjoint(ends) for launch in list(self._queue)), deadline)

    def see_through(self, ends: Collection[RingEnd], deadline: Deadline) -> None:
        """The same until these rings are through with all that they have: behind such a message."""
        self.come(ends, lambda: not any(_busy(end) for end in ends), deadline)

    def let_go_to(self, peers: Collection[int], channel: int) -> None:
        """The same for the receives of a channel from some ranks."""
        with self._arrived:
            ends = {end for launch in self._queue for end in launch.ends}
            self.let_go([e for e in ends if e.channel == channel and e.peer in peers and not e.producer])

    def close(self) -> None:
        """Let everything go, to leave the rings that were stopped, and end the thread."""
        with self._arrived:
            self._closed = True
            for launch in list(self._queue):
                self._take(launch)
            self._arrived.notify()

    def _run(self) -> None:
        while True:
            with self._arrived:
                while not self._queue:
                    if self._closed:
                        return
                    self._arrived.wait()
                self._sweep()
            self._tracker.poll()
            time.sleep(_PAUSE_SECONDS)

    def _sweep(self) -> None:
        """Start what has its turn, or is late: then it is told as any other that is under way."""
        before: set[RingEnd] = set()
        for launch in list(self._queue):
            if before.isdisjoint(launch.ends) and (self._ready(launch.ends) or launch.deadline.expired()):
                self._take(launch)
            before |= launch.ends

    def _take(self, launch: Start[T]) -> None:
        """Start one of those that wait; it counts as one until then, as nobody may come before it who does not wait."""
        with contextlib.suppress(Exception):  # the messages' Works raise it
            self._start(launch)
        self._queue.remove(launch)

    def _start(self, launch: Start[T]) -> None:
        self._under_way.update(dict.fromkeys(launch.ends))
        self._go(launch)

    def _ready(self, ends: Collection[RingEnd]) -> bool:
        """Whether the rings are through with what came before, and the device has room."""
        if len(self._under_way) + len(ends) > AT_ONCE:
            self._under_way = {end: None for end in self._under_way if _busy(end)}
        room = not self._under_way or len(self._under_way) + len(ends) <= AT_ONCE
        return room and not any(_busy(end) for end in ends)


def _busy(end: RingEnd) -> bool:
    """Whether messages of a ring end are under way."""
    finished, goes_on = end.finished()
    return goes_on and finished < end.sequence
