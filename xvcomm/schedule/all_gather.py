"""All-gather: native within the island; its blocks cross the border over the links of all ranks; native in the other islands."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder, part
from xvcomm.schedule.packing import Packed
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, NativeOp, Span


def write(b: Builder) -> None:
    """Write the steps of an all-gather; blocks may differ in size."""
    blocks = Cut.of(b.request.counts)
    block = Span(Buf.IN, 0, b.request.counts[b.rank])
    own = Packed(b, Buf.OUT, b.island, blocks)
    if b.island.size == 1:
        b.copy(block, own.span)
    elif own.count:
        b.native(NativeOp.ALL_GATHER, block, own.span, own.members.counts)

    begin, end = b.fair(own.count, b.island).part(b.local)
    for other in b.ahead():
        for member, start, stop in b.fair(own.count, other).overlaps(begin, end):
            b.put(other.ranks[member], part(own.span, start, stop))
    arrivals = [(other, Packed(b, Buf.OUT, other, blocks)) for other in b.behind()]
    for other, arrived in arrivals:
        begin, end = b.fair(arrived.count, b.island).part(b.local)
        for member, start, stop in b.fair(arrived.count, other).overlaps(begin, end):
            b.get(other.ranks[member], part(arrived.span, start, stop))

    own.spread(b)
    for _, arrived in arrivals:
        if b.island.size > 1 and arrived.count:
            shares = b.fair(arrived.count, b.island)
            b.native(NativeOp.ALL_GATHER, part(arrived.span, *shares.part(b.local)), arrived.span, shares.counts)
        arrived.spread(b)
