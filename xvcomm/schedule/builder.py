"""Builds a schedule: appends steps, derives their dependencies, and allocates scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from xvcomm.schedule.hazards import Hazards
from xvcomm.schedule.layout import in_place
from xvcomm.schedule.partition import Cut, fair, grain
from xvcomm.schedule.steps import (
    Buf,
    Collective,
    Copy,
    Exchange,
    Factor,
    Get,
    GetReduce,
    Lane,
    Native,
    Put,
    Reduce,
    Request,
    Scale,
    Schedule,
    Span,
    Step,
)
from xvcomm.types.topology import Island, Topology

NOTHING = Span(Buf.TMP, 0, 0)
_LANE_NUMBER = {lane: i for i, lane in enumerate(Lane)}
_State = TypeVar("_State")
_ENDS = 5
"""The first and last segment are this many times shorter than the others. An island needs about that much less time per segment
than the border, so it has finished the second segment when the border has sent the first.
"""

_UNITS = 64
"""Segment boundaries are multiples of the segment size divided by this."""


class Builder:
    """The schedule of one rank while it is being written.

    Steps without elements are left out, except Native steps, which all members of an island must call together. `after` is
    derived from the memory that steps access, assuming that IN and OUT coincide as in an in-place call, so a schedule is valid
    in both cases. It contains at most one step per other lane, because each lane runs in order.

    Attributes:
        request, topology, rank: arguments of `build`.
        scale_before: factor for each rank's input, or None.
        scale_after: factor for the result, or None.
        wide: whether partial results are in WIDE and only the final result is rounded.
        adds_two: whether there are two islands, and data from the other one is added as it arrives.
        exchange: see `build`.
    """

    def __init__(
        self, request: Request, topology: Topology, rank: int, segment: int = 0, exchange: Exchange = Exchange.SUMS,
        wide: bool = True,
    ) -> None:  # fmt: skip
        self.request = request
        self.topology = topology
        self.rank = rank
        self.island = topology.island_of(rank)
        self.local = topology.local(rank)
        self.scale_before = Factor.PREMUL if request.premul else None
        self.scale_after = Factor.AVERAGE if request.average else None
        # If every island has one rank and nothing is scaled, only the sum over islands rounds, so WIDE is not needed.
        scaled = request.premul or request.average
        low, many = request.low_precision, topology.size > len(topology.islands)
        self.wide = wide and low and not topology.homogeneous and (scaled or many)
        self.adds_two = len(topology.islands) == 2 and not self.wide and not (low and request.average)
        self.exchange = exchange
        self._segment = segment
        self._steps: list[Step] = []
        self._reserved = dict.fromkeys((Buf.TMP, Buf.WIDE), 0)
        self._slots: dict[object, Span] = {}
        in_start, out_start = in_place(request, rank)
        callers = Hazards()
        self._memory = {
            Buf.IN: (callers, in_start),
            Buf.OUT: (callers, out_start),
            Buf.TMP: (Hazards(), 0),
            Buf.WIDE: (Hazards(), 0),
        }

    def schedule(self) -> Schedule:
        """The steps written so far."""
        return Schedule(tuple(self._steps), self._reserved[Buf.TMP], self._reserved[Buf.WIDE])

    def pieces(self, count: int) -> list[tuple[int, int]]:
        """Split `count` elements into segments, as (start, stop) pairs; an empty list for 0 elements.

        The first and the last segment are short, because the border is idle while they are processed within the islands. The
        rest is divided evenly into segments of about the segment size: few, because messages do not overlap well.
        """
        size = self._segment
        if not size or count <= size // 2:
            return [(0, count)] if count else []
        short = min(size, count) // _ENDS
        middle = count - 2 * short
        parts = max(1, round(middle / size))
        unit = max(1, size // _UNITS // grain(self.request.itemsize)) * grain(self.request.itemsize)
        cuts = {(short + middle * i // parts) // unit * unit for i in range(parts + 1)}
        return list(pairwise(sorted(cuts | {0, count})))

    def fair(self, total: int, island: Island) -> Cut:
        """Divide `total` elements evenly among the members of an island."""
        return fair(total, island.size, self.request.itemsize)

    def ahead(self) -> Iterator[Island]:
        """The other islands, in the order in which this rank sends to them.

        Together with `behind` it defines one order for all messages of a phase, the same on all ranks: by distance, then
        sender, then receiver. Lanes that follow a common order cannot deadlock.
        """
        islands = self.topology.islands
        return (islands[(self.island.index + d) % len(islands)] for d in range(1, len(islands)))

    def behind(self) -> Iterator[Island]:
        """The other islands in the order in which this rank receives from them; see `ahead`."""
        islands = self.topology.islands
        return (islands[(self.island.index - d) % len(islands)] for d in range(1, len(islands)))

    def scratch(self, count: int, slot: object = None, wide: bool = False) -> Span:
        """Allocate `count` elements of TMP or WIDE, aligned; calls with an equal `slot` share the memory."""
        buf = Buf.WIDE if wide else Buf.TMP
        held = self._slots.get(slot)
        if held is not None and held.count >= count:
            return Span(buf, held.start, count)
        unit = grain(self.request.itemsize)
        fresh = Span(buf, self._reserved[buf], count)
        self._reserved[buf] += -(-count // unit) * unit
        if slot is not None:
            self._slots[slot] = fresh
        return fresh

    def native(
        self,
        op: Collective,
        src: Span,
        dst: Span,
        counts: tuple[int, ...] = (),
        recv_counts: tuple[int, ...] = (),
        root: int = -1,
        kept: Span | None = None,
    ) -> None:
        """Call the island's native library.

        Args:
            root: index in the island.
            kept: a part of `dst` that keeps its contents if IN and OUT coincide, and is read on the native lane only.
        """
        fields = {"op": op, "src": src, "dst": dst, "counts": counts, "recv_counts": recv_counts, "root": root}
        written = (
            (dst,)
            if kept is None
            else (Span(dst.buf, dst.start, kept.start - dst.start), Span(dst.buf, kept.stop, dst.stop - kept.stop))
        )
        self._append(Native, Lane.NATIVE, (src,), written, **fields)

    def put(self, peer: int, src: Span) -> None:
        """Send `src` to `peer`."""
        if src.count:
            self._append(Put, Lane.SEND, (src,), (), peer=peer, src=src)

    def get(self, peer: int, dst: Span) -> None:
        """Receive `dst` from `peer`."""
        if dst.count:
            self._append(Get, Lane.RECV, (), (dst,), peer=peer, dst=dst)

    def get_reduce(self, peer: int, dst: Span, own: Span | None = None) -> None:
        """Receive from `peer`, reduce with `own` or else with `dst`, and write `dst`; the lower island's is the left operand."""
        if dst.count:
            first, own = self.topology.island_of(peer).index < self.island.index, own or dst
            self._append(GetReduce, Lane.RECV, (own,), (dst,), peer=peer, own=own, dst=dst, remote_first=first)

    def copy(self, src: Span, dst: Span, lane: Lane = Lane.NATIVE) -> None:
        """Copy `src` to `dst`, unless they are the same span."""
        if src.count and src != dst:
            self._append(Copy, lane, (src,), (dst,), src=src, dst=dst)

    def reduce(self, srcs: Sequence[Span], dst: Span) -> None:
        """Reduce `srcs` in their order into `dst`, and scale the result if the request asks for an average."""
        if dst.count:
            average = self.scale_after is not None
            self._append(Reduce, Lane.RECV, srcs, (dst,), srcs=tuple(srcs), dst=dst, average=average)

    def take(self, src: Span, dst: Span) -> None:
        """Copy a part of the input to `dst`, multiplied by this rank's factor if there is one."""
        if self.scale_before is None:
            self.copy(src, dst)
        elif src.count:
            self._append(Scale, Lane.NATIVE, (src,), (dst,), src=src, dst=dst, factor=self.scale_before)

    def finish(self, span: Span, lane: Lane = Lane.RECV) -> None:
        """Scale a part of the result that was not written by `reduce`, if the request asks for an average."""
        if self.scale_after is not None and span.count:
            self._append(Scale, lane, (span,), (span,), src=span, dst=span, factor=self.scale_after)

    def _append(
        self, kind: Callable[..., Step], lane: Lane, reads: Sequence[Span], writes: Sequence[Span], **fields: Any
    ) -> None:
        index = len(self._steps)
        waits: set[int] = set()
        for span in reads:
            if span.count:
                memory, base = self._memory[span.buf]
                waits |= memory.read(base + span.start, base + span.stop, index, _LANE_NUMBER[lane])
        for span in writes:
            if span.count:
                memory, base = self._memory[span.buf]
                waits |= memory.write(base + span.start, base + span.stop, index)
        latest: dict[Lane, int] = {}
        for wait in waits - {-1, index}:
            other = self._steps[wait].lane
            if other is not lane:
                latest[other] = max(wait, latest.get(other, -1))
        self._steps.append(kind(lane, tuple(sorted(latest.values())), **fields))


def part(span: Span, start: int, stop: int) -> Span:
    """Elements `start` to `stop` of `span`, counted from its beginning."""
    return Span(span.buf, span.start + start, stop - start)


def pipelined(
    pieces: Sequence[tuple[int, int]],
    first: Callable[[int, int, int], _State],
    second: Callable[[_State], None],
) -> None:
    """Write the two halves of each piece, with the first half of a piece before the second half of the previous one.

    So the native lane works on the next piece while the border carries this one. Two pieces are in progress at a time:
    `first(slot, start, stop)` gets slot 0 and 1 alternately.
    """
    pending: list[_State] = []
    for i, (start, stop) in enumerate(pieces):
        pending.append(first(i % 2, start, stop))
        if len(pending) == 2:
            second(pending.pop(0))
    for state in pending:
        second(state)
