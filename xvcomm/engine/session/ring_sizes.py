"""The shapes of rings that a rank's settings ask for, as all ranks know them, so that both ends of a ring compute its shape."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from xvcomm.config import Config
from xvcomm.memory.ring import MAX_LANES, RingLayout
from xvcomm.memory.segment import PAGE, round_up

_Size = tuple[int, int, int]


class RingSizes(msgspec.Struct, frozen=True, array_like=True):
    """Those of one rank; of two ranks the lower one's are used. Lanes, slots and bytes of a slot of each kind of ring.

    Attributes:
        host: between ranks on host memory.
        wire: the same, on different hosts.
        gpu: with a GPU at one or both ends.
        peer: in a GPU's memory.
    """

    host: _Size
    wire: _Size
    gpu: _Size
    peer: _Size

    @classmethod
    def of(cls, config: Config) -> RingSizes:
        """What settings ask for."""
        return cls(
            (config.ring_lanes, config.ring_slots, config.ring_slot_bytes),
            (1, config.wire_slots, config.wire_slot_bytes),
            (config.gpu_ring_lanes, config.gpu_ring_slots, config.gpu_ring_slot_bytes),
            (config.peer_ring_lanes, config.peer_ring_slots, config.peer_ring_slot_bytes),
        )

    def host_layout(self, *, wired: bool) -> RingLayout:
        """Of messages between ranks on host memory, on one host or on two."""
        return RingLayout(*(self.wire if wired else self.host))

    def gpu_layout(self) -> RingLayout:
        """Of messages with a GPU at one or both ends."""
        return RingLayout(*self.gpu)

    def gpu_wire_layout(self) -> RingLayout:
        """The same of collectives, on different hosts."""
        # No cache spans two hosts: with the slots of one host, an all_gather of 256 MiB over loopback took 16.1 ms, with these
        # 12.2.
        return self._in_lanes(2)

    def gpu_collective_layout(self) -> RingLayout:
        """The same of collectives, on one host."""
        # A collective uses all links of a host in both directions at once. Less memory, in more lanes with smaller slots,
        # stays in the CPU's caches: an all_reduce of 256 MiB over 2 + 2 H200 took 4.1 ms, and 4.9 ms with the rings of messages.
        # With twice the lanes an all_gather of 16 MiB took 238 us on four H100, with these 207; those of 256 MiB differ by 3 %.
        full = self._in_lanes(1.5)
        return replace(full, slot_bytes=round_up(full.slot_bytes // 4, PAGE))

    def _in_lanes(self, factor: float) -> RingLayout:
        """The rings of messages with a GPU, with so many times the lanes."""
        full = self.gpu_layout()
        return replace(full, lanes=min(MAX_LANES, int(factor * full.lanes)))

    def peer_layout(self) -> RingLayout:
        """In a GPU's memory."""
        return RingLayout(*self.peer, apart=True)
