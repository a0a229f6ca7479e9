"""What all reductions share: the island's own sum of a range, and the sum over islands in island order.

Where partial sums lie in WIDE, nothing is rounded before the end. An island of one rank then sends its array as it is.
"""

from __future__ import annotations

from xvcomm.schedule.builder import Builder
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Lane, NativeOp, Span
from xvcomm.types.topology import Island


def island_sum(b: Builder, source: Span, shares: Cut, dst: Span) -> None:
    """Reduce every member's `source` within the island; this rank's share of the result comes to `dst`."""
    if b.island.size > 1:
        b.native(NativeOp.REDUCE_SCATTER, source, dst, shares.counts)
    else:
        b.copy(source, dst)


def wide_sum(b: Builder, source: Span, shares: Cut, slot: int) -> Span:
    """This rank's share of the island's sum of `source`, of the input: in WIDE, or an island's only input itself."""
    if b.scale_before is not None:
        scaled = b.scratch(source.count, ("scaled", slot), wide=True)
        b.take(source, scaled)
        source = scaled
    if b.island.size == 1:
        return source
    start, stop = shares.part(b.local)
    share = b.scratch(stop - start, ("partial", slot), wide=True)
    island_sum(b, source, shares, share)
    return share


def room(b: Builder, other: Island, count: int, slot: object = None) -> Span:
    """Room for what another island sends of its sum."""
    wide = b.wide and (other.size > 1 or b.scale_before is not None)
    return b.scratch(count, (other.index, slot), wide=wide)


def total(b: Builder, own: Span, others: dict[int, Span], slot: object = None) -> Span:
    """The result out of this island's part and what others sent, by island index; gives where it lies: `own`, or in WIDE."""
    spans = {b.island.index: own, **others}
    if not b.wide:
        b.reduce([spans[index] for index in sorted(spans)], own)
        return own
    for index, span in spans.items():
        if span.buf is not Buf.WIDE:
            spans[index] = b.scratch(span.count, ("wide", index, slot), wide=True)
            b.copy(span, spans[index], Lane.RECV)
    result = spans[next(iter(others))]  # what is on its way to others stays as it is
    b.reduce([spans[index] for index in sorted(spans)], result)
    return result
