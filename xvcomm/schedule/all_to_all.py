"""All-to-all: native within the island, direct messages to the ranks of other islands."""

from __future__ import annotations

from collections.abc import Iterator

from xvcomm.schedule.builder import Builder
from xvcomm.schedule.packing import Packed
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Collective, Span
from xvcomm.types.topology import Island


def write(b: Builder) -> None:
    """Write the steps of an all-to-all; counts may differ."""
    request = b.request
    sends, receives = Cut.of(request.counts), Cut.of(request.recv_counts)
    _inside(b, sends, receives)
    for other in b.ahead():
        for peer in _in_turn(b, other, 1):
            b.put(peer, Span(Buf.IN, sends.offsets[peer], request.counts[peer]))
    for other in b.behind():
        for peer in _in_turn(b, other, -1):
            b.get(peer, Span(Buf.OUT, receives.offsets[peer], request.recv_counts[peer]))


def _in_turn(b: Builder, other: Island, way: int) -> Iterator[int]:
    """The ranks of another island in the order in which this rank sends to them, or receives from them.

    In turn k, member i of an island sends to member i + k of the other one. So in each turn every rank sends to one rank and
    receives from one, and links are in use both ways. All messages have one order, by island and turn, which excludes deadlock.

    Args:
        way: 1 to send, -1 to receive.
    """
    turns = max(b.island.size, other.size)
    members = ((b.local + way * turn) % turns for turn in range(turns))
    return (other.ranks[member] for member in members if member < other.size)


def _inside(b: Builder, sends: Cut, receives: Cut) -> None:
    """Exchange within the island. Every member makes the native call, because no rank knows whether the others have data."""
    outgoing, incoming = Packed(b, Buf.IN, b.island, sends), Packed(b, Buf.OUT, b.island, receives)
    outgoing.collect(b)
    if b.island.size == 1:
        b.copy(outgoing.span, incoming.span)
    else:
        counts, recv_counts = outgoing.members.counts, incoming.members.counts
        b.native(Collective.ALL_TO_ALL, outgoing.span, incoming.span, counts, recv_counts)
    incoming.spread(b)
