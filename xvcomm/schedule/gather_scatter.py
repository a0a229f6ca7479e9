"""Gather and scatter: native in the root's island, direct messages between the root and ranks of other islands."""

from __future__ import annotations

from xvcomm.schedule.builder import NOTHING, Builder
from xvcomm.schedule.packing import Packed
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Collective, Span


def write_gather(b: Builder) -> None:
    """Write the steps of a gather; only the root uses OUT."""
    root, counts = b.request.root, b.request.counts
    block = Span(Buf.IN, 0, counts[b.rank])
    if b.island is not b.topology.island_of(root):
        b.put(root, block)
        return
    if b.rank != root:
        _native(b, Collective.GATHER, block, NOTHING)
        return
    blocks = Cut.of(counts)
    packed = Packed(b, Buf.OUT, b.island, blocks)
    if b.island.size == 1:
        b.copy(block, packed.span)
    _native(b, Collective.GATHER, block, packed.span)
    for rank in _foreign(b):
        b.get(rank, Span(Buf.OUT, blocks.offsets[rank], counts[rank]))
    packed.spread(b)


def write_scatter(b: Builder) -> None:
    """Write the steps of a scatter; only the root uses IN."""
    root, counts = b.request.root, b.request.counts
    block = Span(Buf.OUT, 0, counts[b.rank])
    if b.island is not b.topology.island_of(root):
        b.get(root, block)
        return
    if b.rank != root:
        _native(b, Collective.SCATTER, NOTHING, block)
        return
    blocks = Cut.of(counts)
    packed = Packed(b, Buf.IN, b.island, blocks)
    packed.collect(b)
    if b.island.size == 1:
        b.copy(packed.span, block)
    _native(b, Collective.SCATTER, packed.span, block)
    for rank in _foreign(b):
        b.put(rank, Span(Buf.IN, blocks.offsets[rank], counts[rank]))


def _native(b: Builder, op: Collective, src: Span, dst: Span) -> None:
    counts = tuple(b.request.counts[rank] for rank in b.island.ranks)
    if b.island.size > 1 and any(counts):
        b.native(op, src, dst, counts, root=b.topology.local(b.request.root))


def _foreign(b: Builder) -> list[int]:
    return [rank for rank in range(b.topology.size) if b.topology.island_of(rank) is not b.island]
