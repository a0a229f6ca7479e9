"""A queue pair that is joined with itself: its READs come back behind all that its device has written to the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from xvcomm.abc.cards import Loopback
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.pairs import Domain, Path, PolledQueue, ReliableQueue, Remote
from xvcomm.memory.segment import Segment

_DEPTH = 16
_WORD_BYTES = 64


class SelfPair:
    """Used by one thread at a time.

    Attributes:
        records: for compiled code.
        number: its qp_num.
        completion_queue: address of its struct ibv_cq.
        fd: its completion channel's descriptor.
    """

    def __init__(self, domain: Domain, port: Port, gid: Gid, options: Mapping[str, Any]) -> None:
        """Make one.

        Args:
            domain: of the device.
            port, gid, options: see `rails.RailPair`.

        Raises:
            ResourceError: the device refuses.
        """
        with contextlib.ExitStack() as undo:
            memory = Segment.anonymous(_WORD_BYTES)
            undo.callback(memory.close)
            region = domain.register(memory.address, _WORD_BYTES)
            undo.callback(domain.release, region)
            completions = PolledQueue(domain, _DEPTH + 2)
            undo.callback(completions.close)
            self._queue = ReliableQueue(domain, completions, _DEPTH, 0, readable=True)
            undo.callback(self._queue.close)
            lid = port.lid if port.link == "InfiniBand" else 0
            path = Path(port.number, gid.index, port.mtu, **{**options, "grh": port.grh or options["grh"]})
            self._queue.connect(path, Remote(self._queue.number, gid.value, lid))
            self._undo = undo.pop_all()
        self.records = Loopback(self._queue.address, completions.address, memory.address, region.lkey)
        self.number, self.completion_queue, self.fd = self._queue.number, completions.record.queue, completions.fd

    def failure(self) -> str:
        """What went wrong first; empty if nothing did."""
        return self._queue.failure() or ""

    def close(self) -> None:
        """Give it back. Idempotent.

        Raises:
            ResourceError: the device does not take it back.
        """
        self._undo.close()
