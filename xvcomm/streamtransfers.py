"""How point-to-point messages move on a device whose streams go on behind the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from xvcomm import array
from xvcomm.abc.device import Stream
from xvcomm.deadline import Deadline
from xvcomm.operation import Operation
from xvcomm.pending import Flight, StreamWork
from xvcomm.ring import RingEnd
from xvcomm.transfers import Transfer, Transfers
from xvcomm.work import Work

if TYPE_CHECKING:
    from xvcomm.context import Context


class StreamTransfers(Transfers):
    """Blocking transfers go on the arrays' stream; asynchronous ones on a stream that no others are on."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._free: list[Stream] = []

    def run(self, transfers: Sequence[Transfer]) -> None:
        """See `Transfers.run`; the host waits only where nobody knows the arrays' stream."""
        user = self._user(transfers)
        flight = self._launch(transfers, user)
        self._context.pending.add(flight)
        if any(t.stream is None for t in transfers):
            self._context.pending.wait_for(flight)

    def start(self, transfers: Sequence[Transfer]) -> list[Work]:
        """See `Transfers.start`."""
        context = self._context
        own = self._free.pop() if self._free else context.device.streams(1)[0]
        own.wait(self._user(transfers).mark())
        flight = self._launch(transfers, own)
        flight.blocking, flight.keep = False, [t.view for t in transfers]
        flight.landed = partial(self._free.append, own)
        context.pending.add(flight)
        return [self._work(t, flight) for t in transfers]

    def _work(self, t: Transfer, flight: Flight) -> Work:
        def follow(mark: object) -> None:
            self._context.device.adopt(t.view.stream).wait(mark)

        return StreamWork(
            self._context.pending, flight, follow, partial(array.finish, t.view), f"{t.name} with rank {t.peer}"
        )

    def _user(self, transfers: Sequence[Transfer]) -> Stream:
        """The stream that all are ordered on: that of the first; what the others' arrays are on is waited for."""
        adopt = self._context.device.adopt
        streams = {adopt(t.stream, *(() if t.view.trusted or not t.view.count else (t.view.address,))): t for t in transfers}
        user, *others = streams
        for other in others:
            user.wait(other.mark())
        return user

    def _launch(self, transfers: Sequence[Transfer], stream: Stream) -> Flight:
        ends: list[tuple[RingEnd, int, Operation]] = []
        try:
            with self._context.enqueueing:
                if len(transfers) > 1:
                    stream.together()
                for t in transfers:
                    end = self._enqueue(t, stream)
                    assert t.operation is not None
                    ends.append((end, end.sequence, t.operation))
                mark = stream.mark()
        except BaseException as error:
            stream.discard()
            self._fail(transfers, error)
        deadline = min((t.deadline for t in transfers), key=_point)
        return Flight([operation for _, _, operation in ends], stream, mark, deadline, ends)


def _point(deadline: Deadline) -> float:
    return deadline.at
