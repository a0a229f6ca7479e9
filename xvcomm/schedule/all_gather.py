"""All-gather: native within the island; its blocks cross the border over the links of all ranks; native in the other islands."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder, part
from xvcomm.schedule.packing import Packed
from xvcomm.schedule.partition import Cut, grain
from xvcomm.schedule.steps import Buf, Collective, Span
from xvcomm.types.topology import Island


def write(b: Builder) -> None:
    """Write the steps of an all-gather; blocks may differ in size."""
    blocks = Cut.of(b.request.counts)
    own = Packed(b, Buf.OUT, b.island, blocks)
    arrivals = [(other, Packed(b, Buf.OUT, other, blocks)) for other in b.behind()]
    alike = len(set(b.request.counts)) == 1 and b.request.counts[0] % grain(b.request.itemsize) == 0
    _gather_own(b, own, alike=alike)
    _cross(b, own, arrivals, alike=alike)
    own.spread(b)
    for _, arrived in arrivals:
        if b.island.size > 1 and arrived.count:
            shares = b.fair(arrived.count, b.island)
            b.native(Collective.ALL_GATHER, part(arrived.span, *shares.part(b.local)), arrived.span, shares.counts)
        arrived.spread(b)


def _gather_own(b: Builder, own: Packed, *, alike: bool) -> None:
    block = Span(Buf.IN, 0, b.request.counts[b.rank])
    if b.island.size == 1:
        b.copy(block, own.span)
    elif own.count:
        kept = part(own.span, *own.members.part(b.local)) if alike else None  # else it is sent from there
        b.native(Collective.ALL_GATHER, block, own.span, own.members.counts, kept=kept)


def _cross(b: Builder, own: Packed, arrivals: list[tuple[Island, Packed]], *, alike: bool) -> None:
    """Send this rank's share of the island's blocks to the other islands, and receive shares of theirs.

    Args:
        alike: whether all blocks are equal and end at a multiple of 16 bytes, as shares do: then each rank sends its own one,
            which waits for no native call.
    """
    begin, end = _sent(b, own, b.island, alike=alike).part(b.local)
    first = Span(Buf.IN, -begin, end) if alike else own.span  # the block itself
    for other in b.ahead():
        for member, start, stop in b.fair(own.count, other).overlaps(begin, end):
            b.put(other.ranks[member], part(first, start, stop))
    for other, arrived in arrivals:
        begin, end = b.fair(arrived.count, b.island).part(b.local)
        for member, start, stop in _sent(b, arrived, other, alike=alike).overlaps(begin, end):
            b.get(other.ranks[member], part(arrived.span, start, stop))


def _sent(b: Builder, packed: Packed, island: Island, *, alike: bool) -> Cut:
    """The shares of an island's blocks that each of its ranks sends."""
    return packed.members if alike else b.fair(packed.count, island)
