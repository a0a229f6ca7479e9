"""Deadlines of operations on streams are enforced by the host's observations while the driver blocks queries of the device."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xvcomm.abc.device import RingStopped
from xvcomm.engine.context import Context
from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.tracker import Tracker
from xvcomm.memory.ring import Message, RingEnd
from xvcomm.trace.format import Stage
from xvcomm.trace.operation import NO_PEER, Operation
from xvcomm.types.deadline import Deadline
from xvcomm.types.opcode import OpCode

A_WHILE_AGO, LATE, LATER, IN_TIME = -3.0, -2.0, -1.0, 60.0
"""Seconds from the beginning of a test."""


class End:
    """A ring end."""

    peer = 1

    def __init__(self, through: int, *, goes_on: bool = True, replayed: bool = False) -> None:
        self.through, self.goes_on, self.replayed = through, goes_on, replayed

    def finished(self) -> tuple[int, bool]:
        return self.through, self.goes_on

    def abort_word(self) -> int:
        return 7


class Stream:
    """A stream whose event is never reached."""

    captured = 0
    held_up = True
    queue = (7, 0)
    lasting = True

    def reached(self, event: object) -> bool:
        assert not self.held_up, "the device was asked"
        return False


class Job:
    """A communicator whose device cannot be queried; `absent` are collectives that some rank has not joined."""

    def __init__(self, looked: float = A_WHILE_AGO) -> None:
        self.absent: set[int] = set()
        self.device = SimpleNamespace(adopt=lambda handle: Stream())
        self.recorder = SimpleNamespace(following=0)
        self.told: list[Operation] = []
        self.tracker = Tracker(cast(Context, self))
        self.begin = time.monotonic()
        self.tracker._looked = self.begin + looked

    def awaits(self, operation: Operation) -> bool:
        return operation.sequence in self.absent

    def end(self, operation: Operation, state: int) -> None:
        """Nobody is told."""

    def explain(self, error: Exception, operation: Operation) -> Exception:
        self.told.append(operation)
        return error

    def deadline(self, seconds: float) -> Deadline:
        return Deadline(self.begin + seconds)

    def add(self, seconds: float, sequence: int, *ends: End, peer: int = NO_PEER) -> Batch:
        """Add one operation, which is complete when `ends` have completed one message."""
        name = OpCode.ALL_REDUCE if peer == NO_PEER else OpCode.RECV
        operation = Operation(name, sequence, Message(+name, 0, 0, 0, 0), peer, sequence)
        self.recorder.following = sequence + 1
        used = [(cast(RingEnd, end), 1, operation) for end in ends]
        stream = cast(Any, Stream())
        return self.tracker.add(Batch([operation], self.deadline(seconds), used, stream=stream, event=stream))

    def stopped(self) -> list[int]:
        """Number of the operation for which the job was stopped, if any."""
        self.tracker.stop_late()
        return [operation.sequence for operation in self.told]


@pytest.fixture
def job() -> Job:
    return Job()


def test_a_message_that_is_late_stops_the_job(job: Job) -> None:
    batch = job.add(LATE, 0, End(0), peer=1)
    job.add(IN_TIME, 1, End(0), peer=1)
    assert job.stopped() == [0] and batch.error is not None
    assert job.stopped() == [0], "said twice"


def test_a_message_that_went_through_is_not_late(job: Job) -> None:
    job.add(LATE, 0, End(1), peer=1)
    assert job.stopped() == []


def test_no_operation_is_late_while_the_device_is_polled() -> None:
    job = Job(looked=-0.01)
    job.add(LATE, 0, End(0), peer=1)
    assert job.stopped() == []


def test_operations_seen_complete_in_time_are_not_late(job: Job) -> None:
    job.tracker._looked = job.begin + LATE + 0.1
    job.add(LATE, 0, End(0), peer=1)
    assert job.stopped() == []


@pytest.mark.parametrize("absent", [set(), {0}])
def test_a_collective_is_late_if_nothing_else_can_be(job: Job, absent: set[int]) -> None:
    job.absent = absent
    job.add(LATE, 0)
    assert job.stopped() == [0]


def test_a_collective_that_all_came_to_does_not_fail_for_a_message(job: Job) -> None:
    job.add(LATE, 0)
    message = job.add(IN_TIME, 1, End(0), peer=1)
    assert job.stopped() == []
    message.deadline = job.deadline(LATER)
    assert job.stopped() == [1]


def test_a_collective_that_a_rank_did_not_come_to_is_late_beside_a_message(job: Job) -> None:
    job.absent = {0}
    job.add(LATE, 0)
    job.add(IN_TIME, 1, End(0), peer=1)
    assert job.stopped() == [0]


@pytest.mark.parametrize("place", ["open", "sealed"])
def test_operations_without_an_event_can_be_late(job: Job, place: str) -> None:
    operation = Operation(OpCode.RECV, 5, Message(+OpCode.RECV, 0, 0, 0, 0), 1)
    job.tracker.add_blocking([operation], 1, job.deadline(LATE), [(cast(RingEnd, End(0)), 1, operation)])
    if place == "sealed":
        (open_batch,) = job.tracker._open_batches.values()
        job.tracker._sealing, _ = open_batch.take()
    assert job.stopped() == [5]


def test_a_threads_own_stream_gets_its_event_from_that_thread(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread's call would record on another stream."""
    recorded: list[int] = []
    monkeypatch.setattr(Stream, "lasting", False)
    monkeypatch.setattr(
        Stream, "record_event", lambda self: recorded.append(threading.get_ident()) or self, raising=False
    )
    operation = Operation(OpCode.RECV, 5, Message(+OpCode.RECV, 0, 0, 0, 0), 1)
    job.tracker.add_blocking([operation], 2, job.deadline(LATE), [(cast(RingEnd, End(0)), 1, operation)])
    assert recorded == [threading.get_ident()]
    assert job.stopped() == [5]


def test_polling_during_logging_does_not_block(job: Job) -> None:
    """A signal handler may poll in the thread that would have to continue."""
    operation = Operation(OpCode.RECV, 5, Message(+OpCode.RECV, 0, 0, 0, 0), 1)
    job.tracker.add_blocking([operation], 1, job.deadline(IN_TIME), [])
    with job.tracker._gate:
        begin = time.monotonic()
        job.tracker.look()
        assert time.monotonic() - begin < 1.0 and job.tracker


def test_late_operations_are_found_in_any_order(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "held_up", False)
    job.add(IN_TIME, 0, End(0), peer=1)
    job.add(LATE, 1, End(0), peer=1)
    job.tracker.look()
    assert [operation.sequence for operation in job.told] == [1]


def test_complete_operations_are_not_late_behind_the_users_work(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the default stream, whose event is recorded later, behind work that the user has enqueued meanwhile."""
    monkeypatch.setattr(Stream, "held_up", False)
    job.add(LATE, 0, End(1), peer=1)
    job.tracker.look()
    assert job.told == []
    job.add(LATE, 1, End(0), peer=1)
    job.tracker.look()
    assert [operation.sequence for operation in job.told] == [1]


@pytest.mark.parametrize(("goes_on", "fails"), [(True, False), (False, True)])
def test_messages_behind_a_graphs_are_not_over_where_the_ring_has_stopped(job: Job, goes_on: bool, fails: bool) -> None:
    """The number of replays, and so the last message's number, is unknown."""
    batch = job.add(IN_TIME, 0, End(1, goes_on=goes_on, replayed=True), peer=1)
    failure = batch.outcome(lambda newest: 0)
    assert (failure is not None) == fails and (failure is None or isinstance(failure[0], RingStopped))


@pytest.mark.parametrize("captured", [0, 5])
def test_no_event_is_recorded_while_a_stream_joins_a_capture(job: Job, captured: int) -> None:
    held: list[bool] = []
    stream: Any = SimpleNamespace(wait=lambda event: held.append(job.tracker._gate.locked()))
    job.tracker.join(stream, cast(Any, SimpleNamespace(captured=captured)))
    assert held == [captured != 0]


def test_operations_with_unlike_deadlines_do_not_share_an_event(job: Job) -> None:
    operations = [Operation(OpCode.RECV, n, Message(+OpCode.RECV, 0, 0, 0, 0), 1) for n in range(3)]
    sealed: list[int] = []
    job.tracker._seal = lambda handle, open_batch: sealed.append(len(open_batch.operations))  # type: ignore[method-assign]
    for operation, seconds in zip(operations, (1.0, 1.01, 15.0), strict=True):
        job.tracker.seal_if_deadline_differs(1, job.deadline(seconds))
        job.tracker.add_blocking([operation], 1, job.deadline(seconds), [])
    assert sealed == [2]


def test_state_of_ended_streams_is_freed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has its own streams, and an application may create new threads without end."""
    monkeypatch.setattr(Stream, "held_up", False)
    kept = [job.add(IN_TIME, number, End(1), peer=1) for number in range(3)]
    assert len(job.tracker._streams) == 3 and job.tracker
    monkeypatch.setattr(Stream, "reached", lambda self, event: True)
    job.tracker.poll()
    assert all(batch.over for batch in kept) and not job.tracker
    kept.clear()
    assert not job.tracker._streams


def test_what_is_known_of_operations_under_way(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is not queried for it."""
    batches = [job.add(IN_TIME, number, *ends, peer=1) for number, ends in enumerate([(End(1),), (End(0),), ()])]
    job.tracker._looked = time.monotonic()
    assert not job.tracker.progress().stretches, "they have just begun"
    for batch in batches:
        batch.added += A_WHILE_AGO
    found = [(stretch.records, stretch.passed, stretch.following) for stretch in job.tracker.progress().stretches]
    assert found == [([], [0], 1), ([1], [], 2), ([2], [], 3)]
    job.tracker._looked += 2 * A_WHILE_AGO
    assert job.tracker.progress().others == {1: Stage.UNANSWERED, 2: Stage.UNANSWERED}


def test_of_thousands_of_operations_the_oldest_are_known(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "held_up", False)
    monkeypatch.setattr(Stream, "reached", lambda self, event: False)
    stream = cast(Any, Stream())
    for number in range(1000):
        operation = Operation(OpCode.SEND, number, Message(+OpCode.SEND, 0, 0, 0, 0), 1, number)
        event = cast(Any, SimpleNamespace(captured=0))
        job.tracker.add(Batch([operation], job.deadline(IN_TIME), [], stream=stream, event=event)).added += A_WHILE_AGO
    job.tracker._looked = time.monotonic()
    told = [number for stretch in job.tracker.progress().stretches for number in stretch.records]
    assert told == list(range(len(told))) and 0 < len(told) < 100


def test_the_newest_operation_before_a_reached_event(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "held_up", False)
    stream = cast(Any, Stream())
    reached = {"first"}
    monkeypatch.setattr(Stream, "reached", lambda self, event: event.name in reached)
    for number, name in enumerate(("first", "second")):
        operation = Operation(OpCode.SEND, number, Message(+OpCode.SEND, 0, 0, 0, 0), 1, 10 + number)
        event = cast(Any, SimpleNamespace(name=name, captured=0))
        batch = job.tracker.add(Batch([operation], job.deadline(IN_TIME), [], stream=stream, event=event))
        batch.added += A_WHILE_AGO
    job.tracker.look()
    assert job.tracker.progress().reached == {(7, 0): 10}
