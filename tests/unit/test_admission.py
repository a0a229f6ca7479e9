"""Asynchronous messages that wait on the host: one launch per ring at a time, in order, and complete cleanup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import create_autospec

import pytest

from xvcomm.engine.inflight.admission import AT_ONCE, AdmissionQueue, Start
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.memory.ring import RingEnd
from xvcomm.types.deadline import NEVER, Deadline

SOON = 60.0


class End:
    """A ring end: messages enqueued on the device, and completed ones."""

    def __init__(self, peer: int = 1, channel: int = 0, *, producer: bool = True) -> None:
        self.peer, self.channel, self.producer = peer, channel, producer
        self.sequence, self.through, self.goes_on = 0, 0, True

    def finished(self) -> tuple[int, bool]:
        return self.through, self.goes_on


class Device:
    """Records started messages; raises `fails` instead if it is set."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.waited: list[str] = []
        self.fails: set[str] = set()
        self.queue = AdmissionQueue(create_autospec(Tracker, instance=True), self._go)

    def _go(self, launch: Start) -> None:
        (name,) = cast(list[str], launch.transfers)
        if self.queue:
            self.waited.append(name)
        if name in self.fails:
            raise ValueError(name)
        for end in cast(set[End], launch.ends):
            end.sequence += 1
        self.started.append(name)

    def add(self, name: str, *ends: End, deadline: Deadline = NEVER) -> None:
        """A Start with this name."""
        self.queue.add(Start(cast(Any, [name]), [], cast(frozenset[RingEnd], frozenset(ends)), deadline))

    def let_go(self, *ends: End) -> None:
        self.queue.let_go(cast(list[RingEnd], list(ends)))


@pytest.fixture
def device() -> Any:
    made = Device()
    yield made
    made.queue.close()


def until(condition: Callable[[], Any]) -> None:
    deadline = Deadline.after(SOON)
    while not condition():
        assert not deadline.expired()
        time.sleep(0.001)


def test_messages_on_an_idle_ring_start_without_the_thread(device: Device) -> None:
    one, other = End(), End()
    threads = threading.active_count()
    device.add("a", one)
    device.add("b", other)
    one.through = 1
    device.add("c", one)
    assert device.started == ["a", "b", "c"] and not device.queue
    assert threading.active_count() == threads


def test_no_message_is_enqueued_behind_one_that_may_wait(device: Device) -> None:
    one, other = End(), End()
    device.add("a", one)
    device.add("b", one)
    device.add("c", one, other)
    device.add("d", other)  # behind c, though its ring is free
    assert device.started == ["a"] and device.queue
    one.through = 1
    until(lambda: device.started == ["a", "b"])
    one.through = 2
    until(lambda: device.started == ["a", "b", "c"])
    other.through = 1
    until(lambda: device.started == ["a", "b", "c", "d"] and not device.queue)
    assert device.waited == ["b", "c", "d"], "who asks while one of them starts is told that it waits"


def test_other_messages_start_only_if_they_would_not_wait(device: Device) -> None:
    one, other = End(), End()

    def at_once(name: str, *ends: End) -> bool:
        def go() -> bool:
            for end in ends:
                end.sequence += name in ("a", "b")
            return name in ("a", "b")

        return device.queue.at_once(cast(list[RingEnd], list(ends)), go)

    assert at_once("a", one) and not at_once("c", other)
    assert not at_once("b", one, other), "a is under way"
    one.through = 1
    assert at_once("b", one, other)
    other.through = 1
    device.add("d", one)
    assert not at_once("a", other) and device.queue, "d waits"
    device.queue.come((cast(RingEnd, other),), lambda: True, NEVER)
    assert device.queue
    one.through = 3
    until(lambda: not device.queue)
    assert at_once("a", other) and device.started == ["d"]


def test_release_starts_earlier_messages_of_the_ring_too(device: Device) -> None:
    one, other, third = End(), End(), End()
    for end in (one, other, third):
        device.add("under way", end)
    device.add("a", one)
    device.add("b", one, other)
    device.add("c", third)
    device.add("d", other)
    device.add("e", one)
    device.let_go(other)
    assert device.started[3:] == ["a", "b", "d"]
    device.let_go(End())
    assert device.started[3:] == ["a", "b", "d"]
    device.queue.let_go_to([1], 0)  # receives only, and these are sends
    assert device.started[3:] == ["a", "b", "d"]
    device.let_go(one, third)
    assert device.started[3:] == ["a", "b", "d", "c", "e"]


def come(device: Device, over: Callable[[], bool], *ends: End, deadline: Deadline = NEVER) -> threading.Thread:
    """Another thread that waits for rings."""
    rings = cast(list[RingEnd], list(ends))
    thread = threading.Thread(target=device.queue.come, args=(rings, over, deadline))
    thread.start()
    return thread


def test_waiting_for_a_ring_blocks_while_others_wait(device: Device) -> None:
    one, other = End(), End()
    for name in ("a", "b", "c"):
        device.add(name, one)
    for name in ("d", "e"):
        device.add(name, other)
    waiting = come(device, lambda: False, one)
    one.through = 1
    until(lambda: device.started == ["a", "d", "b"])
    assert waiting.is_alive(), "e waits, and could not start behind whoever waits on the device"
    other.through = 1
    waiting.join(SOON)
    assert device.started == ["a", "d", "b", "e", "c"], "c waits for nothing but its own ring"


@pytest.mark.parametrize("how", ["over", "late"])
def test_waiting_for_a_ring_ends_when_it_is_idle_or_late(device: Device, how: str) -> None:
    one, other = End(), End()
    for end in (one, other):
        device.add("under way", end)
        device.add("waits", end)
    over = [how == "over"]
    waiting = come(device, lambda: over[0], one, deadline=Deadline.after(0.05))
    waiting.join(SOON)
    assert device.started == ["under way"] * 2 + ["waits"] * (how == "late")


def test_receives_of_a_channel_are_released(device: Device) -> None:
    ends = [End(1, 3, producer=False), End(2, 3, producer=False), End(1, 4, producer=False)]
    for name, end in zip("abc", ends, strict=True):
        device.add("under way", end)
        device.add(name, end)
    device.queue.let_go_to([1, 2], 3)
    assert device.started[3:] == ["a", "b"]


@pytest.mark.parametrize("how", ["late", "given up"])
def test_late_or_abandoned_messages_are_started_to_report_the_error(device: Device, how: str) -> None:
    end = End()
    device.add("a", end)
    device.add("b", end, deadline=Deadline.after(0.05) if how == "late" else NEVER)
    assert device.started == ["a"]
    end.goes_on = how == "late"
    until(lambda: device.started == ["a", "b"])


def test_immediate_errors_are_raised_and_later_ones_block_no_other(device: Device) -> None:
    device.fails = {"bad", "later"}
    with pytest.raises(ValueError, match="bad"):
        device.add("bad", End())
    end = End()
    for name in ("a", "later", "b"):
        device.add(name, end)
    end.through = 1
    until(lambda: device.started == ["a", "b"])


def test_messages_in_progress_are_limited(device: Device) -> None:
    ends = [End() for _ in range(AT_ONCE + 2)]
    for number, end in enumerate(ends):
        device.add(str(number), end)
    assert len(device.started) == AT_ONCE
    ends[7].through = 1
    until(lambda: len(device.started) == AT_ONCE + 1)
    assert device.started[-1] == str(AT_ONCE)
    ends[8].through = 1
    until(lambda: len(device.started) == AT_ONCE + 2)


def test_closing_leaves_nothing_behind() -> None:
    device, end = Device(), End()
    for name in "abc":
        device.add(name, end)
    thread = next(t for t in threading.enumerate() if t.name == "xvcomm-admission")
    device.queue.close()
    assert device.started == ["a", "b", "c"]
    thread.join(SOON)
    assert not thread.is_alive()
