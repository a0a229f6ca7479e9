"""How point-to-point messages move on a device whose streams go on behind the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from xvcomm import array
from xvcomm.abc.device import Mark, Stream
from xvcomm.deadline import Deadline
from xvcomm.pending import Ends, Flight, StreamWork
from xvcomm.transfers import Transfer, Transfers
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context


class StreamTransfers(Transfers):
    """Blocking messages go on their arrays' stream; asynchronous ones on a stream that no others are on."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._free: list[Stream] = []

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
        own = self._free.pop() if self._free else self._context.device.streams(1)[0]
        for stream in self._streams(transfers):
            own.wait(stream.mark())
        self._launch(transfers, own, [t.view for t in transfers], partial(self._free.append, own))

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

    def _launch(
        self, transfers: Sequence[Transfer], stream: Stream, keep: object = None, landed: Callable[[], None] | None = None
    ) -> Flight:
        ends: Ends = []
        try:
            with self._context.enqueueing:
                if len(transfers) > 1:
                    stream.together()
                for t in transfers:
                    end = self._enqueue(t, stream)
                    assert t.operation is not None
                    ends.append((end, end.sequence, t.operation))
                mark = cast(Mark, stream.mark())
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        deadline = min((t.deadline for t in transfers), key=_point)
        operations = [operation for _, _, operation in ends]
        flight = Flight(operations, stream, mark, deadline, ends, None, landed is None, keep, landed)
        self._context.pending.add(flight)
        for t in transfers:
            if t.promise is not None:
                t.promise.flight = flight
        return flight


def _point(deadline: Deadline) -> float:
    return deadline.at
