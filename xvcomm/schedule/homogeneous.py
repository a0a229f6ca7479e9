"""Communicators with one island: one native call, or one copy for a single rank."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder
from xvcomm.schedule.layout import in_count, out_count
from xvcomm.schedule.steps import Buf, Collective, Lane, Span


def write(b: Builder) -> None:
    """Write any collective as one call of the native library."""
    request = b.request
    source = Span(Buf.IN, 0, in_count(request, b.rank))
    result = Span(Buf.OUT, 0, out_count(request, b.rank))
    if not (request.count or any(request.counts) or request.op is Collective.ALL_TO_ALL):
        return
    if b.scale_before is not None:
        scaled = result if result.count == source.count else b.scratch(source.count)
        b.take(source, scaled)
        source = scaled
    if b.topology.size == 1:
        b.copy(source, result)
    else:
        b.native(request.op, source, result, request.counts, request.recv_counts, request.root)
    b.finish(result, Lane.NATIVE)
