"""Blocks of an island's members, packed without gaps as native calls need them."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder, part
from xvcomm.schedule.layout import runs
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Span
from xvcomm.types.topology import Island


class Packed:
    """An island's blocks in one span: in the caller's array if they are contiguous there, otherwise in scratch memory.

    Attributes:
        members: division of the span into the blocks of the island's members.
    """

    def __init__(self, b: Builder, buf: Buf, island: Island, blocks: Cut) -> None:
        self._runs = runs(island.ranks, blocks)
        self._buf = buf
        self.members = Cut.of(stop - start for start, stop in map(blocks.part, island.ranks))
        self.count = self.members.total
        usable = buf is Buf.OUT or b.scale_before is None
        if len(self._runs) == 1 and usable:
            self.span = Span(buf, self._runs[0].place, self.count)
        else:
            self.span = b.scratch(self.count, wide=b.wide and b.scale_before is not None)

    def collect(self, b: Builder) -> None:
        """Copy the blocks into the span, scaled if the request scales inputs."""
        for run in self._runs:
            b.take(Span(self._buf, run.place, run.count), part(self.span, run.packed, run.packed + run.count))

    def spread(self, b: Builder) -> None:
        """Copy the blocks from the span to their places in the caller's array."""
        for run in self._runs:
            b.copy(part(self.span, run.packed, run.packed + run.count), Span(self._buf, run.place, run.count))
