"""All-reduce: native reduce-scatter, exchange of the shares between islands, native all-gather. Short arrays are sent whole.

Few ranks send very short arrays to each other without any native call, as NCCL and MPI libraries do within a host ("one shot").
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from xvcomm.schedule.builder import Builder, part, pipelined
from xvcomm.schedule.partials import island_sum, room, total, wide_sum
from xvcomm.schedule.partition import Cut, weighted
from xvcomm.schedule.steps import Buf, Collective, Exchange, Lane, Span


@dataclass(frozen=True, slots=True)
class _Piece:
    """One segment, between the two halves of its work.

    Attributes:
        slot: index of the set of scratch memory that it uses.
        whole: the segment in OUT.
        shares: how this island divides it.
        partial: the island's sum of this rank's share.
        result: place of this rank's share in OUT.
    """

    slot: int
    whole: Span
    shares: Cut
    partial: Span
    result: Span


@dataclass(frozen=True, slots=True)
class _Interval:
    """Elements that are in the share of a single rank in each island. Positions count from the start of the segment.

    Attributes:
        start: first element.
        holders: that rank of each island.
        parts: the elements that each holder sums up over the islands, counted from `start`.
    """

    start: int
    holders: tuple[int, ...]
    parts: Cut

    def finished_by(self, island: int) -> tuple[int, int]:
        """Range of elements that the holder of an island sums up, counted from the start of the segment."""
        start, stop = self.parts.part(island)
        return self.start + start, self.start + stop


def write(b: Builder) -> None:
    """Write the steps of an all-reduce.

    Two islands may send each other their sums, and both add them. Else the additions are divided, so that each rank of the
    communicator adds the same number of elements, and then the results are exchanged.
    """
    if b.exchange is Exchange.RANKS and b.request.count and not b.wide:
        _exchange_with_all(b)
        return
    if b.exchange is Exchange.ARRAYS and b.request.count and not b.wide:
        _exchange_all(b)
        return
    two = len(b.topology.islands) == 2 and b.exchange is not Exchange.PARTS

    def first(slot: int, start: int, stop: int) -> _Piece:
        return _island_part(b, slot, start, stop, two)

    def second(piece: _Piece) -> None:
        if two:
            _exchange_sums(b, piece)
        else:
            _divide_sums(b, piece)
        if b.island.size > 1:
            b.native(Collective.ALL_GATHER, piece.result, piece.whole, piece.shares.counts)

    pipelined(b.pieces(b.request.count), first, second)


def _island_part(b: Builder, slot: int, start: int, stop: int, two: bool) -> _Piece:
    whole = Span(Buf.OUT, start, stop - start)
    source = Span(Buf.IN, start, stop - start)
    shares = b.fair(stop - start, b.island)
    result = part(whole, *shares.part(b.local))
    if b.wide:
        return _Piece(slot, whole, shares, wide_sum(b, source, shares, slot), result)
    if b.scale_before is not None:
        b.take(source, whole)
        source = whole
    if b.island.size == 1 and b.adds_two and not two:
        return _Piece(slot, whole, shares, source, result)
    # With two islands, `partial` is being sent while `result` is written: it needs memory of its own.
    partial = b.scratch(result.count, ("partial", slot)) if two else result
    island_sum(b, source, shares, partial)
    if two and not b.adds_two:
        b.copy(partial, result)
    return _Piece(slot, whole, shares, partial, result)


def _exchange_with_all(b: Builder) -> None:
    """Send this rank's array to all others, and add up all arrays in the order of ranks."""
    source, whole = _operand(b)
    size, arrays = b.topology.size, {b.rank: source}
    for distance in range(1, size):
        b.put((b.rank + distance) % size, source)
    for distance in range(1, size):
        sender = (b.rank - distance) % size
        arrays[sender] = b.scratch(whole.count)
        b.get(sender, arrays[sender])
    b.reduce([arrays[rank] for rank in range(size)], whole)


def _operand(b: Builder) -> tuple[Span, Span]:
    """This rank's array, multiplied by its factor if there is one, and the result."""
    whole, source = Span(Buf.OUT, 0, b.request.count), Span(Buf.IN, 0, b.request.count)
    if b.scale_before is None:
        return source, whole
    b.take(source, whole)
    return whole, whole


def _exchange_all(b: Builder) -> None:
    """Send this island's whole sum from every rank to the corresponding ranks of the other islands."""
    source, whole = _operand(b)
    count = whole.count
    own = source if b.island.size == 1 else b.scratch(count) if b.adds_two else whole
    if b.island.size > 1:
        b.native(Collective.ALL_REDUCE, source, own)
    for other in b.ahead():
        for rank in other.ranks[b.local :: b.island.size]:
            b.put(rank, own)
    others: dict[int, Span] = {}
    for other in b.behind():
        partner = other.ranks[b.local % other.size]
        if b.adds_two:
            b.get_reduce(partner, whole, own)
        else:
            others[other.index] = room(b, other, count)
            b.get(partner, others[other.index])
    if b.adds_two:
        b.finish(whole)
    else:
        b.copy(own, whole, Lane.RECV)
        total(b, whole, others)


def _exchange_sums(b: Builder, piece: _Piece) -> None:
    (other,) = b.ahead()
    begin, end = piece.shares.part(b.local)
    overlaps = list(b.fair(piece.whole.count, other).overlaps(begin, end))
    for member, start, stop in overlaps:
        b.put(other.ranks[member], part(piece.partial, start - begin, stop - begin))
    if not b.adds_two:
        area = room(b, other, end - begin, piece.slot)
        for member, start, stop in overlaps:
            b.get(other.ranks[member], part(area, start - begin, stop - begin))
        own = piece.partial if b.wide else piece.result
        b.copy(total(b, own, {other.index: area}, piece.slot), piece.result, Lane.RECV)
        return
    for member, start, stop in overlaps:
        own = part(piece.partial, start - begin, stop - begin)
        b.get_reduce(other.ranks[member], part(piece.whole, start, stop), own)
    b.finish(piece.result)


def _divide_sums(b: Builder, piece: _Piece) -> None:
    intervals = _intervals(b, piece)
    me, (begin, _) = b.island.index, piece.shares.part(b.local)
    for other in b.ahead():
        for interval in intervals:
            start, stop = interval.finished_by(other.index)
            b.put(interval.holders[other.index], part(piece.partial, start - begin, stop - begin))
    own = [interval.finished_by(me) for interval in intervals]
    if b.adds_two:
        _add_arriving(b, piece, intervals, own)
    else:
        _add_received(b, piece, intervals, own)
    for other in b.ahead():
        for interval, mine in zip(intervals, own, strict=True):
            b.put(interval.holders[other.index], part(piece.whole, *mine))
    for other in b.behind():
        for interval in intervals:
            b.get(interval.holders[other.index], part(piece.whole, *interval.finished_by(other.index)))


def _add_arriving(b: Builder, piece: _Piece, intervals: Sequence[_Interval], own: Sequence[tuple[int, int]]) -> None:
    """Add the other island's sums, as they arrive, to this rank's; the results are in OUT."""
    begin, _ = piece.shares.part(b.local)
    for other in b.behind():
        for interval, mine in zip(intervals, own, strict=True):
            partial = part(piece.partial, mine[0] - begin, mine[1] - begin)
            b.get_reduce(interval.holders[other.index], part(piece.whole, *mine), partial)
            b.finish(part(piece.whole, *mine))


def _add_received(b: Builder, piece: _Piece, intervals: Sequence[_Interval], own: Sequence[tuple[int, int]]) -> None:
    """Receive the sums of all other islands, and add them up in the islands' order."""
    begin, _ = piece.shares.part(b.local)
    received: list[dict[int, Span]] = [{} for _ in intervals]
    packed = Cut.of(stop - start for start, stop in own)
    for other in b.behind():
        area = room(b, other, packed.total, piece.slot)
        for i, interval in enumerate(intervals):
            received[i][other.index] = part(area, *packed.part(i))
            b.get(interval.holders[other.index], received[i][other.index])
    for others, mine in zip(received, own, strict=True):
        partial = part(piece.partial, mine[0] - begin, mine[1] - begin)
        b.copy(total(b, partial, others, piece.slot), part(piece.whole, *mine), Lane.RECV)


def _intervals(b: Builder, piece: _Piece) -> list[_Interval]:
    """This rank's share, cut at every position where a share of any island ends."""
    begin, end = piece.shares.part(b.local)
    if begin == end:
        return []
    islands = b.topology.islands
    cuts = [b.fair(piece.whole.count, island) for island in islands]
    ends = {begin, end}
    for cut in cuts:
        ends.update(cut.offsets[bisect_right(cut.offsets, begin) : bisect_left(cut.offsets, end)])
    sizes = tuple(island.size for island in islands)
    return [
        _Interval(
            start,
            tuple(island.ranks[cut.holder(start)] for island, cut in zip(islands, cuts, strict=True)),
            weighted(stop - start, sizes, b.request.itemsize),
        )
        for start, stop in pairwise(sorted(ends))
    ]
