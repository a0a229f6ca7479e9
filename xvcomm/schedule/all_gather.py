"""All-gather: native within the island; its blocks cross the border over the links of all ranks; native in the other islands."""

from __future__ import annotations

from collections.abc import Sequence

from xvcomm.schedule.builder import Builder, part
from xvcomm.schedule.packing import Packed
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, NativeOp, Span
from xvcomm.types.topology import Island


def write(b: Builder) -> None:
    """Write the steps of an all-gather; blocks may differ in size."""
    blocks = Cut.of(b.request.counts)
    block = Span(Buf.IN, 0, b.request.counts[b.rank])
    own = Packed(b, Buf.OUT, b.island, blocks)
    arrivals = [(other, Packed(b, Buf.OUT, other, blocks)) for other in b.behind()]
    # Where every rank sends just its own block, messages need not wait for the native calls.
    early = all(each.members == b.fair(each.count, island) for island, each in ((b.island, own), *arrivals))
    if early and b.island.size > 1:
        _cross(b, own.count, block, own.members.part(b.local)[0], arrivals)
    if b.island.size == 1:
        b.copy(block, own.span)
    elif own.count:
        b.native(NativeOp.ALL_GATHER, block, own.span, own.members.counts)
    if not early or b.island.size == 1:
        _cross(b, own.count, own.span, 0, arrivals)
    own.spread(b)
    for _, arrived in arrivals:
        if b.island.size > 1 and arrived.count:
            shares = b.fair(arrived.count, b.island)
            b.native(NativeOp.ALL_GATHER, part(arrived.span, *shares.part(b.local)), arrived.span, shares.counts)
        arrived.spread(b)


def _cross(b: Builder, count: int, source: Span, at: int, arrivals: Sequence[tuple[Island, Packed]]) -> None:
    """Send this rank's share of its island's `count` packed elements, and receive its share of the others'.

    Args:
        source: what it sends, from position `at` of the packed elements on.
    """
    begin, end = b.fair(count, b.island).part(b.local)
    for other in b.ahead():
        for member, start, stop in b.fair(count, other).overlaps(begin, end):
            b.put(other.ranks[member], part(source, start - at, stop - at))
    for other, arrived in arrivals:
        begin, end = b.fair(arrived.count, b.island).part(b.local)
        for member, start, stop in b.fair(arrived.count, other).overlaps(begin, end):
            b.get(other.ranks[member], part(arrived.span, start, stop))
