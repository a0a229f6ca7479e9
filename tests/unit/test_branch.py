"""The Work of a collective on an internal stream, while its completion is observed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from xvcomm.engine.branch import Branch, Launched
from xvcomm.engine.inflight.batch import Batch
from xvcomm.engine.inflight.open_batch import AsyncGroup
from xvcomm.engine.inflight.work import Work
from xvcomm.engine.request import CollectiveRequest, MessageRequest
from xvcomm.errors import ArgumentError, DeadlineExceeded, PeerLost
from xvcomm.memory.array_view import ArrayView
from xvcomm.memory.ring import Reason, RingEnd
from xvcomm.trace.operation import Operation
from xvcomm.types.deadline import NEVER
from xvcomm.types.dtype import BY_NAME
from xvcomm.types.opcode import OpCode

HOME, ELSEWHERE = 16, 32
LOST, LEFT = Reason.PEER_LOST.word(1), Reason.LEFT.word(1)


class End:
    """A ring end of a job."""

    peer, replayed = 1, False

    def __init__(self, job: Job) -> None:
        self.job = job

    def finished(self) -> tuple[int, bool]:
        return self.job.received, True

    def abort_word(self) -> int:
        return self.job.stop


class Job:
    """A communicator, its stream beside the users', and a collective that was started there as number 7.

    Attributes:
        through: whether the stream has reached the collective's event.
        stop: the communicator's abort word.
        received: messages that the collective's ring end is through with; it needs one.
        followed: streams that were told to come behind.
    """

    def __init__(self) -> None:
        self.through, self.stop, self.received, self.followed = False, 0, 1, list[int | None]()
        self.native: Any = SimpleNamespace(error=lambda: 0)
        self.context, self.lifecycle, self.stream = self, self, SimpleNamespace(reached=lambda event: self.through)
        self.tracker, self.handle, self.event, self.companions = self, 48, None, AsyncGroup()
        view, part = (self.view() for _ in range(2))
        self.call = CollectiveRequest(OpCode.ALL_GATHER, part, view, view.dtype, count=3)
        self.sequence, self.ends = 7, [(cast(RingEnd, End(self)), 1)]
        self.work = Work(self.call, Launched(cast(Branch, self), self.call, self.ends))

    @staticmethod
    def view() -> ArrayView:
        return ArrayView(0, (3,), BY_NAME["int32"], 3, 12, object(), "cuda", 0, stream=HOME)

    def async_group(self, handle: int) -> AsyncGroup:
        assert handle == self.handle
        return self.companions

    def message(self) -> Work:
        """The Work of a message, which records in `followed` that it was waited for."""
        view = self.view()
        transfer = MessageRequest(OpCode.RECV, view, 1, 5, NEVER, HOME, 2)
        work = Work(transfer, Launched(cast(Branch, self), transfer, self.ends))
        work.come = lambda over, deadline: self.followed.append(None)
        return work

    def word(self) -> int:
        return self.stop

    def stopped(self, newest: Any) -> int:
        assert newest().sequence == 7 and newest().name is OpCode.ALL_GATHER
        return self.stop if Reason.bad(self.stop) else 0

    def joined_native(self) -> Any:
        return self.native

    def explain(self, error: Exception, operation: Operation) -> Exception:
        return PeerLost(f"{operation}: {type(error).__name__}")

    def follow(self, stream: int | None, event: object, over: Callable[[], bool]) -> None:
        self.followed.append(stream)

    def end_all(self, error: Exception | None = None) -> None:
        """The batch of everything in the group is over."""
        where: Any = self.stream
        self.companions.batch = Batch([], NEVER, stream=where, event=where, error=error, over=True)


@pytest.fixture
def job() -> Job:
    return Job()


def test_complete_when_its_event_is_reached(job: Job) -> None:
    assert not job.work.done() and job.work.exception() is None
    with pytest.raises(DeadlineExceeded, match=r"all_gather #7 was not done after 0\.01 s"):
        job.work.synchronize(0.01)
    job.through = True
    assert job.work.done() and job.work.synchronize() is job.call.dst.array  # type: ignore[union-attr]


def test_it_is_over_with_everything_in_its_group(job: Job) -> None:
    job.end_all()
    job.stop = LOST
    assert job.work.done() and job.work.exception() is None, "it went well before the communicator was stopped"


@pytest.mark.parametrize("what", ["behind", "native", "stopped", "ring"])
def test_the_work_fails_with_the_communicator(job: Job, what: str) -> None:
    if what == "behind":
        job.stop = LOST
    elif what == "stopped":
        job.through = True
        job.stop = LOST
    elif what == "native":
        job.through = True
        job.native = SimpleNamespace(error=lambda: LOST)
    else:
        job.through = True
        job.received, job.stop = 0, LEFT
    assert job.work.done() and isinstance(job.work.exception(), PeerLost)
    for call in (job.work.synchronize, lambda: job.work.order(HOME)) if job.stop else (job.work.synchronize,):
        with pytest.raises(PeerLost, match="all_gather #7"):
            call()


def test_a_departure_does_not_fail_operations_that_the_rank_joined(job: Job) -> None:
    job.stop = LEFT
    job.work.order(HOME)
    assert not job.work.done() and job.followed == [HOME]
    job.through = True
    assert job.work.done() and job.work.exception() is None


def test_arrays_are_released_when_their_stream_waits(job: Job) -> None:
    job.work.order(ELSEWHERE)
    assert job.companions.keep == {job.call}
    assert job.call.src is not None
    job.work.order(HOME)
    assert not job.companions.keep and job.call.src is None and job.followed == [ELSEWHERE, HOME]


def test_arrays_with_unknown_stream_are_kept(job: Job) -> None:
    assert job.call.dst is not None
    job.call.dst.stream = None
    job.work.order(None)
    assert job.companions.keep == {job.call} and job.call.src is not None


def test_callbacks_are_refused(job: Job) -> None:
    with pytest.raises(ArgumentError, match="wait"):
        job.work.add_done_callback(lambda future: None)


def test_a_message_is_complete_with_its_ring(job: Job) -> None:
    message = job.message()
    job.through, job.stop = True, LEFT
    assert message.done() and message.exception() is None, "it came before that rank left"
    lost, job.received = job.message(), 0
    assert lost.done() and "recv with rank 1 (channel 2)" in str(lost.exception())


def test_waiting_for_a_message_releases_earlier_ones(job: Job) -> None:
    message = job.message()
    assert len(job.companions.keep) == 2
    message.order(HOME)
    assert job.followed == [None, HOME] and job.companions.keep == {job.call}
