"""Reduce to a root: native reduce-scatter, shares over the border to the root's island, native gather."""

from __future__ import annotations

from dataclasses import dataclass

from xvcomm.schedule.builder import NOTHING, Builder, part, pipelined
from xvcomm.schedule.partials import in_island_order, island_sum
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, NativeOp, Span


@dataclass(frozen=True, slots=True)
class _Piece:
    """One segment between its two halves: where it begins, its shares, and the island's sum of this rank's share."""

    slot: int
    start: int
    shares: Cut
    partial: Span


def write(b: Builder) -> None:
    """Write the steps of a reduce; only the root touches OUT."""
    at_home = b.island is b.topology.island_of(b.request.root)

    def first(slot: int, start: int, stop: int) -> _Piece:
        return _island_part(b, slot, start, stop)

    def second(piece: _Piece) -> None:
        if at_home:
            _collect(b, piece)
            _gather(b, piece)
        else:
            _send(b, piece)

    pipelined(b.pieces(b.request.count), first, second)


def _island_part(b: Builder, slot: int, start: int, stop: int) -> _Piece:
    count = stop - start
    is_root = b.rank == b.request.root
    source = Span(Buf.IN, start, count)
    if b.scale_before is not None:
        scaled = Span(Buf.OUT, start, count) if is_root else b.scratch(count, ("scaled", slot))
        b.take(source, scaled)
        source = scaled
    shares = b.fair(count, b.island)
    begin, end = shares.part(b.local)
    if is_root:
        partial = Span(Buf.OUT, start + begin, end - begin)
    elif b.island.size == 1:
        return _Piece(slot, start, shares, source)
    else:
        partial = b.scratch(end - begin, ("partial", slot))
    island_sum(b, source, shares, partial)
    return _Piece(slot, start, shares, partial)


def _send(b: Builder, piece: _Piece) -> None:
    home = b.topology.island_of(b.request.root)
    begin, end = piece.shares.part(b.local)
    for member, start, stop in b.fair(piece.shares.total, home).overlaps(begin, end):
        b.put(home.ranks[member], part(piece.partial, start - begin, stop - begin))


def _collect(b: Builder, piece: _Piece) -> None:
    two = len(b.topology.islands) == 2
    begin, end = piece.shares.part(b.local)
    others: dict[int, Span] = {}
    for other in b.behind():
        area = others[other.index] = piece.partial if two else b.scratch(end - begin, (other.index, piece.slot))
        for member, start, stop in b.fair(piece.shares.total, other).overlaps(begin, end):
            receive = b.get_reduce if two else b.get
            receive(other.ranks[member], part(area, start - begin, stop - begin))
    if not two:
        b.reduce(in_island_order(b, piece.partial, others), piece.partial)
    b.finish(piece.partial)


def _gather(b: Builder, piece: _Piece) -> None:
    if b.island.size == 1:
        return
    root = b.request.root
    result = Span(Buf.OUT, piece.start, piece.shares.total) if b.rank == root else NOTHING
    b.native(NativeOp.GATHER, piece.partial, result, piece.shares.counts, root=b.topology.local(root))
