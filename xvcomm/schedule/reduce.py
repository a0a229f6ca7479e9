"""Reduce: native reduce-scatter, shares sent to the root's island, native gather to the root."""

from __future__ import annotations

from dataclasses import dataclass

from xvcomm.schedule.builder import NOTHING, Builder, part, pipelined
from xvcomm.schedule.partials import island_sum, room, total, wide_sum
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Collective, Lane, Span


@dataclass(frozen=True, slots=True)
class _Piece:
    """One segment, between the two halves of its work: its start, its shares, and the island's sum of this rank's share."""

    slot: int
    start: int
    shares: Cut
    partial: Span


def write(b: Builder) -> None:
    """Write the steps of a reduce; only the root uses OUT."""
    at_home = b.island is b.topology.island_of(b.request.root)

    def first(slot: int, start: int, stop: int) -> _Piece:
        return _island_part(b, slot, start, stop)

    def second(piece: _Piece) -> None:
        if at_home:
            _gather(b, piece, _collect(b, piece))
        else:
            _send(b, piece)

    pipelined(b.pieces(b.request.count), first, second)


def _island_part(b: Builder, slot: int, start: int, stop: int) -> _Piece:
    count = stop - start
    is_root = b.rank == b.request.root
    source = Span(Buf.IN, start, count)
    shares = b.fair(count, b.island)
    if b.wide:
        return _Piece(slot, start, shares, wide_sum(b, source, shares, slot))
    if b.scale_before is not None:
        scaled = Span(Buf.OUT, start, count) if is_root else b.scratch(count, ("scaled", slot))
        b.take(source, scaled)
        source = scaled
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


def _collect(b: Builder, piece: _Piece) -> Span:
    """Add the other islands' sums of this rank's share; return the span of the result."""
    begin, end = piece.shares.part(b.local)
    others: dict[int, Span] = {}
    for other in b.behind():
        area = others[other.index] = piece.partial if b.adds_two else room(b, other, end - begin, piece.slot)
        for member, start, stop in b.fair(piece.shares.total, other).overlaps(begin, end):
            receive = b.get_reduce if b.adds_two else b.get
            receive(other.ranks[member], part(area, start - begin, stop - begin))
    result = piece.partial
    if b.adds_two:
        b.finish(result)
        return result
    if b.wide and b.rank == b.request.root:
        result = Span(Buf.OUT, piece.start + begin, end - begin)
    elif b.wide:
        result = b.scratch(end - begin, ("result", piece.slot))
    b.copy(total(b, piece.partial, others, piece.slot), result, Lane.RECV)
    return result


def _gather(b: Builder, piece: _Piece, share: Span) -> None:
    if b.island.size == 1:
        return
    root = b.request.root
    result = Span(Buf.OUT, piece.start, piece.shares.total) if b.rank == root else NOTHING
    b.native(Collective.GATHER, share, result, piece.shares.counts, root=b.topology.local(root))
