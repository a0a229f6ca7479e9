"""Reduce-scatter: each island sums the blocks of every other island, and only these sums cross the border."""

from __future__ import annotations

from dataclasses import dataclass

from xvcomm.schedule.builder import Builder, part
from xvcomm.schedule.packing import Packed
from xvcomm.schedule.partials import island_sum, room, total
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Lane, Span
from xvcomm.types.topology import Island


@dataclass(frozen=True, slots=True)
class _Share:
    """This rank's share of the sum that its island computes for another one.

    Attributes:
        owners: division of the packed blocks among the other island's ranks.
        begin: start of the share in the packed blocks.
    """

    owners: Cut
    begin: int
    span: Span


def write(b: Builder) -> None:
    """Write the steps of a reduce-scatter; blocks may differ in size."""
    blocks = Cut.of(b.request.counts)
    shares = [(other, _sum_for(b, other, blocks)) for other in b.ahead()]
    members, own = _sum_own(b, blocks)
    for other, share in shares:
        for member, start, stop in share.owners.overlaps(share.begin, share.begin + share.span.count):
            b.put(other.ranks[member], part(share.span, start - share.begin, stop - share.begin))
    _collect(b, members, own)


def _sum_for(b: Builder, other: Island, blocks: Cut) -> _Share:
    """Sum the blocks of another island within this one, divided evenly among its members."""
    packed = Packed(b, Buf.IN, other, blocks)
    packed.collect(b)
    if b.island.size == 1 or not packed.count:
        return _Share(packed.members, 0, packed.span)
    shares = b.fair(packed.count, b.island)
    begin, end = shares.part(b.local)
    share = b.scratch(end - begin, wide=b.wide)
    island_sum(b, packed.span, shares, share)
    return _Share(packed.members, begin, share)


def _sum_own(b: Builder, blocks: Cut) -> tuple[Cut, Span]:
    """Sum this island's own blocks, each at its owner; return the division of the packed blocks and the span of the result."""
    count = b.request.counts[b.rank]
    result = b.scratch(count, wide=True) if b.wide else Span(Buf.OUT, 0, count)
    if b.island.size == 1:
        b.take(Span(Buf.IN, blocks.offsets[b.rank], count), result)
        return Cut((0, count)), result
    packed = Packed(b, Buf.IN, b.island, blocks)
    packed.collect(b)
    if packed.count:
        island_sum(b, packed.span, packed.members, result)
    return packed.members, result


def _collect(b: Builder, members: Cut, own: Span) -> None:
    """Receive the other islands' sums of this rank's block, and add them in island order."""
    begin, end = members.part(b.local)
    result = Span(Buf.OUT, 0, end - begin)
    others: dict[int, Span] = {}
    for other in b.behind():
        area = others[other.index] = result if b.adds_two else room(b, other, result.count)
        for member, start, stop in b.fair(members.total, other).overlaps(begin, end):
            receive = b.get_reduce if b.adds_two else b.get
            receive(other.ranks[member], part(area, start - begin, stop - begin))
    if b.adds_two:
        b.finish(result)
    else:
        b.copy(total(b, own, others), result, Lane.RECV)
