"""The admission queue: asynchronous messages of a device that the host holds back until their rings are free.

Several streams share a hardware queue. A kernel that waits for a peer blocks the kernels behind it in that queue, and the
peer may wait for one of these: a deadlock. Therefore each ring has at most one launch on the device at a time. Later
messages stay in this queue until the ring has finished the earlier ones, and a thread launches them then. A caller that
cannot wait for that launches them at once, in order, and leaves the rest to the device. A stream that waits for a message
occupies a hardware queue too, so the host itself waits while messages of other rings are in the queue.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from xvcomm.abc.device import Event
from xvcomm.memory.ring import RingEnd
from xvcomm.system.threads import Daemon
from xvcomm.types.deadline import Deadline

if TYPE_CHECKING:
    from xvcomm.engine.inflight.tracker import Tracker

T = TypeVar("T")
"""The caller's type for a message."""

_PAUSE_SECONDS = 0.00005

AT_ONCE = 96
"""Most launches under way: NVIDIA's GPUs run 128 kernels at once, those that wait for a peer included."""


@dataclass(slots=True, eq=False)
class Start(Generic[T]):
    """Messages that are launched together.

    Attributes:
        behind: events on the arrays' streams that the launch waits for.
        deadline: the earliest of their deadlines.
    """

    transfers: Sequence[T]
    behind: Sequence[Event]
    ends: frozenset[RingEnd]
    deadline: Deadline


class AdmissionQueue(Generic[T]):
    """The queue of one communicator. Thread-safe.

    Args:
        go: launches a Start. The Works of its messages raise what it raises.
    """

    def __init__(self, tracker: Tracker, go: Callable[[Start[T]], None]) -> None:
        self._tracker, self._go = tracker, go
        self._arrived = threading.Condition()
        self._queue: list[Start[T]] = []
        self._under_way: dict[RingEnd, None] = {}
        self._thread: Daemon | None = None
        self._closed = False

    def __bool__(self) -> bool:
        """Whether messages are queued."""
        return bool(self._queue)

    def held(self) -> list[T]:
        """The messages that are queued."""
        return [transfer for launch in list(self._queue) for transfer in launch.transfers]

    def add(self, launch: Start[T]) -> None:
        """Queue messages, or launch them at once if their rings are free; then this raises what the launch raises."""
        with self._arrived:
            if all(launch.ends.isdisjoint(earlier.ends) for earlier in self._queue) and self._ready(launch.ends):
                self._start(launch)
                return
            self._queue.append(launch)
            if self._thread is None:
                self._thread = Daemon("xvcomm-admission", self._run)
            self._thread.start()
            self._arrived.notify()

    def at_once(self, ends: Collection[RingEnd], go: Callable[[], bool]) -> bool:
        """Launch messages by `go` if the queue is empty and their rings are free; whether `go` was called and has done so."""
        if self._queue:
            return False
        with self._arrived:
            started = not self._queue and self._ready(ends) and go()
            if started:
                self._under_way.update(dict.fromkeys(ends))
            return started

    def let_go(self, ends: Collection[RingEnd]) -> None:
        """Launch all queued messages of these rings, and before them the earlier ones of rings that they share."""
        with self._arrived:
            concerned, chosen = set(ends), []
            for launch in reversed(self._queue):
                if not launch.ends.isdisjoint(concerned):
                    concerned |= launch.ends
                    chosen.append(launch)
            for launch in reversed(chosen):
                self._take(launch)

    def come(self, ends: Collection[RingEnd], over: Callable[[], bool], deadline: Deadline) -> None:
        """Block while messages of other rings are queued, until `over`; then, or at the deadline, launch those of these rings."""
        if not self._queue:
            return
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

    def come_next(self, ends: Collection[RingEnd], deadline: Deadline) -> None:
        """As `come`, until no message of these rings is queued: called before a message is launched at once."""
        self.come(ends, lambda: all(launch.ends.isdisjoint(ends) for launch in list(self._queue)), deadline)

    def see_through(self, ends: Collection[RingEnd], deadline: Deadline) -> None:
        """As `come`, until these rings have finished all their messages: called after such a message."""
        self.come(ends, lambda: not any(_busy(end) for end in ends), deadline)

    def let_go_to(self, peers: Collection[int], channel: int) -> None:
        """As `let_go`, for the receives of a channel from some ranks."""
        with self._arrived:
            ends = {end for launch in self._queue for end in launch.ends}
            self.let_go([e for e in ends if e.channel == channel and e.peer in peers and not e.producer])

    def close(self) -> None:
        """Launch everything, since stopped rings end it at once, and end the thread."""
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
        """Launch messages whose rings are free or whose deadline has passed: the tracker then reports these as late."""
        before: set[RingEnd] = set()
        for launch in list(self._queue):
            if before.isdisjoint(launch.ends) and (self._ready(launch.ends) or launch.deadline.expired()):
                self._take(launch)
            before |= launch.ends

    def _take(self, launch: Start[T]) -> None:
        """Launch queued messages. They leave the queue afterwards, so that no unqueued message overtakes them."""
        with contextlib.suppress(Exception):  # the messages' Works raise it
            self._start(launch)
        self._queue.remove(launch)

    def _start(self, launch: Start[T]) -> None:
        self._under_way.update(dict.fromkeys(launch.ends))
        self._go(launch)

    def _ready(self, ends: Collection[RingEnd]) -> bool:
        """Whether the rings have finished their earlier messages, and the device has room for more launches."""
        if len(self._under_way) + len(ends) > AT_ONCE:
            self._under_way = {end: None for end in self._under_way if _busy(end)}
        room = not self._under_way or len(self._under_way) + len(ends) <= AT_ONCE
        return room and not any(_busy(end) for end in ends)


def _busy(end: RingEnd) -> bool:
    """Whether messages of a ring end are under way."""
    finished, goes_on = end.finished()
    return goes_on and finished < end.sequence
