"""The blocks of an island's members, side by side as native calls want them."""

from __future__ import annotations

from xvcomm.schedule.builder import Builder, part
from xvcomm.schedule.layout import runs
from xvcomm.schedule.partition import Cut
from xvcomm.schedule.steps import Buf, Span
from xvcomm.types.topology import Island


class Packed:
    """An island's blocks in one span: in the caller's array if they lie together there, else in scratch.

    Attributes:
        span: where they are packed.
        count: elements in all.
        members: how the span divides into the blocks of the island's members.
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
        """Bring the blocks together, scaled if inputs are scaled."""
        for run in self._runs:
            b.take(Span(self._buf, run.place, run.count), part(self.span, run.packed, run.packed + run.count))

    def spread(self, b: Builder) -> None:
        """Bring the blocks to their places in the caller's array."""
        for run in self._runs:
            b.copy(part(self.span, run.packed, run.packed + run.count), Span(self._buf, run.place, run.count))
