"""All-to-all: native within the island, direct messages to the ranks of other islands."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder
from xvcomm.schedule.packing import Packed
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, NativeOp, Span


def write(b: Builder) -> None:
    """Write the steps of an all-to-all; counts may differ."""
    request, topology = b.request, b.topology
    sends, receives = Cut.of(request.counts), Cut.of(request.recv_counts)
    _inside(b, sends, receives)
    # Ordered by distance, so that not all ranks send to the same rank first. A common order of messages excludes deadlock.
    for distance in range(1, topology.size):
        peer = (b.rank + distance) % topology.size
        if topology.island_of(peer) is not b.island:
            b.put(peer, Span(Buf.IN, sends.offsets[peer], request.counts[peer]))
    for distance in range(1, topology.size):
        peer = (b.rank - distance) % topology.size
        if topology.island_of(peer) is not b.island:
            b.get(peer, Span(Buf.OUT, receives.offsets[peer], request.recv_counts[peer]))


def _inside(b: Builder, sends: Cut, receives: Cut) -> None:
    """Exchange within the island. Every member makes the native call, because no rank knows whether the others have data."""
    outgoing, incoming = Packed(b, Buf.IN, b.island, sends), Packed(b, Buf.OUT, b.island, receives)
    outgoing.collect(b)
    if b.island.size == 1:
        b.copy(outgoing.span, incoming.span)
    else:
        counts, recv_counts = outgoing.members.counts, incoming.members.counts
        b.native(NativeOp.ALL_TO_ALL, outgoing.span, incoming.span, counts, recv_counts)
    incoming.spread(b)
