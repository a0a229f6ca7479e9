"""Helpers of the reductions: the island's sum of a range, and the sum over islands in island order.

If partial sums are in WIDE, only the final result is rounded. An island of one rank then sends its array unchanged.
"""

from __future__ import annotations

from xvcomm.schedule.builder import Builder
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Collective, Lane, Span
from xvcomm.types.topology import Island


def island_sum(b: Builder, source: Span, shares: Cut, dst: Span) -> None:
    """Reduce every member's `source` within the island, and write this rank's share of the result to `dst`."""
    if b.island.size > 1:
        b.native(Collective.REDUCE_SCATTER, source, dst, shares.counts)
    else:
        b.copy(source, dst)


def wide_sum(b: Builder, source: Span, shares: Cut, slot: int) -> Span:
    """This rank's share of the island's sum of `source`, in WIDE; `source` itself if the island has one rank."""
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
    """Scratch memory for the sum that another island sends."""
    wide = b.wide and (other.size > 1 or b.scale_before is not None)
    return b.scratch(count, (other.index, slot), wide=wide)


def total(b: Builder, own: Span, others: dict[int, Span], slot: object = None) -> Span:
    """Sum this island's part and those of the others (by island index); gives the result's span: `own`, or one in WIDE."""
    spans = {b.island.index: own, **others}
    if not b.wide:
        b.reduce([spans[index] for index in sorted(spans)], own)
        return own
    for index, span in spans.items():
        if span.buf is not Buf.WIDE:
            spans[index] = b.scratch(span.count, ("wide", index, slot), wide=True)
            b.copy(span, spans[index], Lane.RECV)
    result = spans[next(iter(others))]  # not `own`, which is still being sent to other islands
    b.reduce([spans[index] for index in sorted(spans)], result)
    return result
