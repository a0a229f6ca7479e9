"""Transport between ranks of one host: both ends map the same shared memory, so no data needs to be carried."""

from __future__ import annotations

from xvcomm.abc.store import Store
from xvcomm.abc.transport import Capabilities, Transport
from xvcomm.config import Config
from xvcomm.errors import ResourceError
from xvcomm.memory.ring import RingEnd, RingLayout
from xvcomm.memory.segment import Segment, room
from xvcomm.types.deadline import Deadline

__all__ = ["ShmTransport"]


_RINGS = 32
"""A ring is made small enough that this many rings of its size fit into the free space of the folder."""

_KEPT_BYTES = 16 << 20
"""Bytes that rings leave free for other uses, such as arenas of native collectives; a quarter of a folder with less than four
times this. Rings of the minimum size ignore it.
"""


class ShmTransport(Transport):
    """Rings in POSIX shared memory; the end that opens a ring second unlinks its name."""

    def __init__(self, config: Config, host: str) -> None:
        self._folder = config.shm_dir
        self._host = host

    def capabilities(self) -> Capabilities:
        return Capabilities("shm", self._host, rank_order=0, shared=True)

    def open_ring(
        self, name: str, peer: int, member: int, layout: RingLayout, store: Store, deadline: Deadline, *, producer: bool,
        job: str, group: int,
    ) -> RingEnd:  # fmt: skip
        if store.add(name + "/ends", 1, deadline) > 1:
            made = store.get(name, deadline).decode()
            try:
                segment = Segment.attach(self._folder, made)
            except ResourceError:
                store.settle()
                raise
            try:
                end = RingEnd.open(segment, peer=peer, producer=producer)
            except BaseException:
                segment.close()
                raise
            segment.unlink()
            return end
        segment, layout = self._make(job, layout)
        with segment.named():
            end = RingEnd.create(segment, layout, peer=peer, producer=producer)
            store.set(name, segment.name.encode(), deadline)
        return end

    def _make(self, job: str, layout: RingLayout) -> tuple[Segment, RingLayout]:
        """Create memory for a ring, smaller than requested if there is little space, so that other rings fit too."""
        total, free = room(self._folder)
        share = (free - min(_KEPT_BYTES, total // 4)) // _RINGS
        while True:
            smaller = layout.smaller()
            if layout.size <= share or smaller is None:
                try:
                    return Segment.create(self._folder, job, layout.size), layout
                except ResourceError:  # others have taken the space meanwhile
                    if smaller is None:
                        raise
            layout = smaller

    def close(self) -> None:
        """See `Transport.close`; there is nothing to release."""
