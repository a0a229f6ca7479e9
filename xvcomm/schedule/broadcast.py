"""Broadcast: native in the root's island, divided among all its links to other islands, native all-gather in those."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder, part
from xvcomm.schedule.steps import Buf, Collective, Span


def write(b: Builder) -> None:
    """Write the steps of a broadcast. At the root, IN and OUT are the same memory."""
    at_home = b.island is b.topology.island_of(b.request.root)
    for start, stop in b.pieces(b.request.count):
        if at_home:
            _send(b, start, stop)
        else:
            _receive(b, start, stop)


def _send(b: Builder, start: int, stop: int) -> None:
    root = b.request.root
    whole = Span(Buf.OUT, start, stop - start)
    source = Span(Buf.IN, start, stop - start) if b.rank == root else Span(Buf.OUT, start, 0)
    if b.island.size > 1:
        b.native(Collective.BROADCAST, source, whole, root=b.topology.local(root))
    held = source if b.rank == root else whole
    begin, end = b.fair(whole.count, b.island).part(b.local)
    for other in b.ahead():
        for member, lower, upper in b.fair(whole.count, other).overlaps(begin, end):
            b.put(other.ranks[member], part(held, lower, upper))


def _receive(b: Builder, start: int, stop: int) -> None:
    home = b.topology.island_of(b.request.root)
    whole = Span(Buf.OUT, start, stop - start)
    shares = b.fair(whole.count, b.island)
    begin, end = shares.part(b.local)
    for member, lower, upper in b.fair(whole.count, home).overlaps(begin, end):
        b.get(home.ranks[member], part(whole, lower, upper))
    if b.island.size > 1:
        b.native(Collective.ALL_GATHER, part(whole, begin, end), whole, shares.counts)
