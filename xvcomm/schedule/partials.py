"""What all reductions share: the island's own sum of a range, and the sum over islands in island order."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import NativeOp, Span


def island_sum(b: Builder, source: Span, shares: Cut, dst: Span) -> None:
    """Reduce every member's `source` within the island; this rank's share of the result comes to `dst`."""
    if b.island.size > 1:
        b.native(NativeOp.REDUCE_SCATTER, source, dst, shares.counts)
    else:
        b.copy(source, dst)


def in_island_order(b: Builder, own: Span, others: dict[int, Span]) -> list[Span]:
    """This rank's span and those of the other islands, by island index."""
    spans = {b.island.index: own, **others}
    return [spans[index] for index in sorted(spans)]
