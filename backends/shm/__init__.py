"""Transport between ranks of one host: both map the same memory, so there is nothing to carry."""

from __future__ import annotations

from xvcomm.abc.store import Store
from xvcomm.abc.transport import Capabilities, Transport
from xvcomm.config import Config
from xvcomm.deadline import Deadline
from xvcomm.ring import RingEnd, RingLayout
from xvcomm.shm import Segment

__all__ = ["ShmTransport"]


class ShmTransport(Transport):
    """Rings in POSIX shared memory; the end that comes second takes the name away."""

    def __init__(self, config: Config, host: str) -> None:
        self._folder = config.shm_dir
        self._host = host

    def capabilities(self) -> Capabilities:
        """See `Transport.capabilities`."""
        return Capabilities("shm", self._host, rank_order=0)

    def open_ring(
        self, name: str, peer: int, layout: RingLayout, store: Store, deadline: Deadline, *, producer: bool, job: str
    ) -> RingEnd:
        """See `Transport.open_ring`."""
        if store.add(name + "/ends", 1, deadline) > 1:
            segment = Segment.attach(self._folder, store.get(name, deadline).decode())
            try:
                end = RingEnd.open(segment, peer=peer, producer=producer)
            except BaseException:
                segment.close()
                raise
            segment.unlink()
            return end
        segment = Segment.create(self._folder, job, layout.size)
        with segment.named():
            end = RingEnd.create(segment, layout, peer=peer, producer=producer)
            store.set(name, segment.name.encode(), deadline)
        return end

    def close(self) -> None:
        """See `Transport.close`; owns nothing."""
