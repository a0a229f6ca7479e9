"""Appends steps to a schedule, finds what each must wait for, and hands out scratch memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from xvcomm.schedule.hazards import Hazards
from xvcomm.schedule.layout import in_place
from xvcomm.schedule.partition import Cut, fair, grain
from xvcomm.schedule.steps import (
    Buf,
    Copy,
    Factor,
    Get,
    GetReduce,
    Lane,
    Native,
    NativeOp,
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
"""The first and the last segment are so many times shorter than the others: an island needs about that much less time
for a segment than a border does, so that it is through with the second when the border is with the first."""

_UNITS = 64
"""Segments are cut at multiples of such a part of their size."""


class Builder:
    """The schedule of one rank while it is written.

    Steps without elements are left out, except Native steps, which all members of an island must call together.
    `after` is found from the memory that steps touch, taking IN and OUT to coincide as in a call in place, so a
    schedule is right in both cases. It names at most one step of each other lane: lanes keep their own order.

    Attributes:
        request, topology, rank: what is built, and for whom.
        island: this rank's island.
        local: this rank's place in it.
        scale_before: factor of each rank's input, or None.
        scale_after: factor of the result, or None.
        wide: whether partial results lie in WIDE, and nothing is rounded before the end.
        adds_two: whether there are two islands, and what one sends is added as it arrives.
        short: see `build`.
    """

    def __init__(
        self, request: Request, topology: Topology, rank: int, segment: int = 0, short: bool = False, wide: bool = True
    ) -> None:
        self.request = request
        self.topology = topology
        self.rank = rank
        self.island = topology.island_of(rank)
        self.local = topology.local(rank)
        self.scale_before = Factor.PREMUL if request.premul else None
        self.scale_after = Factor.AVERAGE if request.average else None
        # Where every contribution is one rank's array, the only step that rounds is the sum of all.
        scaled = request.premul or request.average
        low, many = request.low_precision, topology.size > len(topology.islands)
        self.wide = wide and low and not topology.homogeneous and (scaled or many)
        self.adds_two = len(topology.islands) == 2 and not self.wide and not (low and request.average)
        self.short = short
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
        """What was written so far."""
        return Schedule(tuple(self._steps), self._reserved[Buf.TMP], self._reserved[Buf.WIDE])

    def pieces(self, count: int) -> list[tuple[int, int]]:
        """`count` elements cut into segments, as (start, stop); none for no elements.

        The first and the last are short: while one is worked on inside the islands, the border has nothing to do. What
        lies between is cut evenly into as few as come near the segment's size, since messages do not overlap well.
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
        """Fair shares of `total` elements among the members of an island."""
        return fair(total, island.size, self.request.itemsize)

    def ahead(self) -> Iterator[Island]:
        """The other islands in the order in which this rank sends to them.

        Together with `behind` it puts all messages of a phase into one order, known to all ranks: by distance, then
        sender, then receiver. Lanes that follow a common order cannot wait for each other in a circle.
        """
        islands = self.topology.islands
        return (islands[(self.island.index + d) % len(islands)] for d in range(1, len(islands)))

    def behind(self) -> Iterator[Island]:
        """The other islands in the order in which this rank receives from them; see `ahead`."""
        islands = self.topology.islands
        return (islands[(self.island.index - d) % len(islands)] for d in range(1, len(islands)))

    def scratch(self, count: int, slot: object = None, wide: bool = False) -> Span:
        """`count` elements of TMP or WIDE, aligned; calls with an equal `slot` share the memory."""
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
        op: NativeOp,
        src: Span,
        dst: Span,
        counts: tuple[int, ...] = (),
        recv_counts: tuple[int, ...] = (),
        root: int = -1,
    ) -> None:
        """Call the island's library; `root` is a place in the island."""
        fields = {"op": op, "src": src, "dst": dst, "counts": counts, "recv_counts": recv_counts, "root": root}
        self._append(Native, Lane.NATIVE, (src,), (dst,), **fields)

    def put(self, peer: int, src: Span) -> None:
        """Send `src` to `peer`."""
        if src.count:
            self._append(Put, Lane.SEND, (src,), (), peer=peer, src=src)

    def get(self, peer: int, dst: Span) -> None:
        """Receive `dst` from `peer`."""
        if dst.count:
            self._append(Get, Lane.RECV, (), (dst,), peer=peer, dst=dst)

    def get_reduce(self, peer: int, dst: Span) -> None:
        """Receive from `peer` and reduce into `dst`, the lower island's elements on the left."""
        if dst.count:
            remote_first = self.topology.island_of(peer).index < self.island.index
            self._append(GetReduce, Lane.RECV, (dst,), (dst,), peer=peer, dst=dst, remote_first=remote_first)

    def copy(self, src: Span, dst: Span, lane: Lane = Lane.NATIVE) -> None:
        """Copy `src` to `dst`, unless they are one span."""
        if src.count and src != dst:
            self._append(Copy, lane, (src,), (dst,), src=src, dst=dst)

    def reduce(self, srcs: Sequence[Span], dst: Span) -> None:
        """Reduce what was received, in the order of `srcs`, and scale it if results are scaled."""
        if dst.count:
            average = self.scale_after is not None
            self._append(Reduce, Lane.RECV, srcs, (dst,), srcs=tuple(srcs), dst=dst, average=average)

    def take(self, src: Span, dst: Span) -> None:
        """Bring a part of the input to `dst`, scaled if inputs are scaled."""
        if self.scale_before is None:
            self.copy(src, dst)
        elif src.count:
            self._append(Scale, Lane.NATIVE, (src,), (dst,), src=src, dst=dst, factor=self.scale_before)

    def finish(self, span: Span, lane: Lane = Lane.RECV) -> None:
        """Scale a part of the result that did not come by `reduce`, if results are scaled."""
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
    """Write the two halves of each piece so that the first half of a piece comes before the second of the one before.

    The native lane can then work on the next piece while the border carries this one. Two pieces are under way at a
    time: `first(slot, start, stop)` gets slot 0 and 1 in turn.
    """
    pending: list[_State] = []
    for i, (start, stop) in enumerate(pieces):
        pending.append(first(i % 2, start, stop))
        if len(pending) == 2:
            second(pending.pop(0))
    for state in pending:
        second(state)
