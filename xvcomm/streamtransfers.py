"""How point-to-point messages move on a device whose streams go on behind the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from xvcomm import array
from xvcomm.abc.device import Mark, Stream
from xvcomm.deadline import Deadline
from xvcomm.opcode import OpCode
from xvcomm.pending import Ends, Flight, StreamWork
from xvcomm.transfers import Transfer, Transfers
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context


class StreamTransfers(Transfers):
    """Blocking messages go on their arrays' stream; asynchronous ones on one of their ring's, groups on one of their own.

    A device runs only so many kernels at once (128 on NVIDIA's), and those that wait for a peer count. Messages of one ring
    follow one another anyway: on one stream only the first of them is a kernel that runs.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._free: list[Stream] = []
        self._of_rings: dict[tuple[OpCode, int, int], Stream] = {}

    def run_alone(self, t: Transfer) -> None:
        """See `Transfers.run_alone`."""
        context, view = self._context, t.view
        if t.stream is None:
            self.run([t])
            return
        look = () if view.trusted or not view.count else (view.address,)
        user = context.device.adopt(t.stream, *look)
        try:
            with context.enqueueing:
                end = self._enqueue(t, user)
        except BaseException as error:
            user.discard()
            self._fail([t], error)
        assert t.operation is not None
        if user.capturing():
            context.end(t.operation)
        else:
            context.pending.board(t.operation, t.stream, t.deadline, None, [(end, end.sequence, t.operation)])

    def run(self, transfers: Sequence[Transfer]) -> None:
        """See `Transfers.run`; the host waits only where nobody knows an array's stream."""
        user, *others = self._streams(transfers)
        for other in others:
            user.wait(other.mark())
        flight = self._launch(transfers, user)
        for other in others:
            other.wait(flight.mark)
        if any(t.stream is None for t in transfers):
            self._context.pending.wait_for(flight)

    def work(self, t: Transfer) -> Work:
        """See `Transfers.work`."""

        def follow(mark: object) -> None:
            self._context.device.adopt(array.stream_now(t.view, t.stream)).wait(mark)

        finish = partial(array.finish, t.view)
        work = t.promise = StreamWork(self._context.pending, follow, finish, f"{t.name} with rank {t.peer}")
        return work

    def start(self, transfers: Sequence[Transfer]) -> None:
        """See `Transfers.start`."""
        alone = len(transfers) == 1
        own = self._stream_of_ring(transfers[0]) if alone else self._take_stream()
        self._launch(transfers, own, self._streams(transfers), background=True, taken=not alone)

    def give_up(self, transfers: Sequence[Transfer], error: BaseException) -> None:
        """See `Transfers.give_up`."""
        for t in transfers:
            if t.promise is not None:
                t.promise.give_up(error)

    def _streams(self, transfers: Sequence[Transfer]) -> list[Stream]:
        """The streams that the arrays are on, each once."""
        adopt = self._context.device.adopt
        found = {}
        for t in transfers:
            look = () if t.view.trusted or not t.view.count else (t.view.address,)
            found[adopt(t.stream, *look)] = t
        return list(found)

    def _stream_of_ring(self, t: Transfer) -> Stream:
        ring = t.name, t.peer, t.channel
        found = self._of_rings.get(ring)
        return found or self._of_rings.setdefault(ring, self._context.device.streams(1)[0])

    def _take_stream(self) -> Stream:
        return self._free.pop() if self._free else self._context.device.streams(1)[0]

    def _launch(
        self, transfers: Sequence[Transfer], stream: Stream, behind: Sequence[Stream] = (), *, background: bool = False,
        taken: bool = False,
    ) -> Flight:  # fmt: skip
        """Let messages go on a stream, those of further channels each on one beside it.

        Messages of one ring follow one another, in several launches; on one stream they would wait for other channels'.

        Args:
            behind: what is on these now comes first.
            background: whether they have Works.
            taken: whether the stream is one of `_take_stream`.
        """
        ends: Ends = []
        further = {t.channel for t in transfers if t.channel != transfers[0].channel}
        beside = {channel: self._take_stream() for channel in further}
        try:
            with self._context.enqueueing:  # threads may have messages for one ring, and so for its stream
                for user in behind:
                    stream.wait(user.mark())
                if beside:
                    start = stream.mark()
                for other in beside.values():
                    other.wait(start)
                    other.together()
                if len(transfers) > 1:
                    stream.together()
                for t in transfers:
                    end = self._enqueue(t, beside.get(t.channel, stream))
                    assert t.operation is not None
                    ends.append((end, end.sequence, t.operation))
                for through in [other.mark() for other in beside.values()]:
                    stream.wait(through)
                mark = cast(Mark, stream.mark())
                flight = self._flight(transfers, ends, stream, mark, background)
                back = [stream, *beside.values()] if taken else list(beside.values())
                flight.landed = partial(self._free.extend, back) if back else None
                self._context.pending.add(flight)
        except BaseException as error:
            for used in (stream, *beside.values()):
                used.discard()
            self._fail(transfers, error)
        for t in transfers:
            if t.promise is not None:
                t.promise.flight = flight
        return flight

    @staticmethod
    def _flight(transfers: Sequence[Transfer], ends: Ends, stream: Stream, mark: Mark, background: bool) -> Flight:
        deadline = min((t.deadline for t in transfers), key=_point)
        operations = [operation for _, _, operation in ends]
        keep = [t.view for t in transfers] if background else None
        return Flight(operations, stream, mark, deadline, ends, None, not background, keep)


def _point(deadline: Deadline) -> float:
    return deadline.at
