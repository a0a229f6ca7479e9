"""The rings of one communicator: one for each direction of a pair, use and channel, opened when first needed.

Rings lie in host memory, and between GPUs of one island that reach each other's memory in a GPU's. Between islands they
lie in host memory also in a rehearsal, which stands for a job whose islands share no other.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from xvcomm.abc.peer_memory import PeerMemory
from xvcomm.abc.store import NotSet, Store
from xvcomm.abc.transport import Capabilities, Transport, choose, peer_refusal
from xvcomm.config import Config
from xvcomm.engine.session.peer_rings import PeerRings
from xvcomm.errors import DeadlineExceeded
from xvcomm.memory.ring import MAX_LANES, RingEnd, RingLayout
from xvcomm.memory.segment import PAGE, round_up
from xvcomm.types.deadline import Deadline

CHANNELS = 32
"""Channels of a pair; each has rings of its own, so that messages of different channels do not order each other."""


class Use(enum.IntEnum):
    """Messages of users and of collectives go through rings of their own, so neither orders the other."""

    POINT_TO_POINT = 0
    COLLECTIVE = 1

    __hash__ = int.__hash__  # an enumeration's own is a function in Python, and rings are looked up by these


class Member(NamedTuple):
    """What decides about rings to and from a rank.

    Attributes:
        rank: its number in the whole job.
        offers: what its transports can do.
        kind: of its device.
        island: equal for ranks of one island.
        memory: with whom its device shares memory.
    """

    rank: int
    offers: Sequence[Capabilities]
    kind: str
    island: str
    memory: PeerMemory | None = None


def at_once(config: Config) -> int:
    """Bytes of a message that any empty ring between islands takes, in a job with GPUs, before any of it is received."""
    return min(_host_layout(config).at_once(1), _gpu_collective_layout(config).at_once(1))


def _host_layout(config: Config) -> RingLayout:
    return RingLayout(config.ring_lanes, config.ring_slots, config.ring_slot_bytes)


def _gpu_layout(config: Config) -> RingLayout:
    return RingLayout(config.gpu_ring_lanes, config.gpu_ring_slots, config.gpu_ring_slot_bytes)


def _gpu_collective_layout(config: Config) -> RingLayout:
    # A collective keeps all links of a host busy at once, both ways. Half the memory, in more and shorter lanes, stays
    # in the CPU's caches: an all_reduce of 256 MiB over 2 + 2 H200 took 4.1 ms, and 4.9 in rings as of messages.
    full = _gpu_layout(config)
    return RingLayout(min(MAX_LANES, 2 * full.lanes), full.slots, round_up(full.slot_bytes // 4, PAGE))


class Rings:
    """Opens, keeps and closes ring ends.

    Args:
        job: what the names of shared memory made for it begin with.
        transports: this rank's, by scheme.
        store: the communicator's; waiting in it ends when the communicator does.
        peer_rings: this process's.
        members: all ranks, in order.

    Attributes:
        gpu_collective_layout: of rings between islands for collectives, with a GPU at one end or both.
    """

    def __init__(
        self, config: Config, job: str, store: Store, rank: int, transports: Sequence[Transport],
        peer_rings: PeerRings, members: Sequence[Member],
    ) -> None:  # fmt: skip
        self._job = job
        self._store = store
        self._rank = rank
        self._transports = {t.capabilities().scheme: t for t in transports}
        self._peer_rings = peer_rings
        self._members = members
        self._gpus = any(member.kind != "host" for member in members)
        self._word = 0
        self._left: dict[int, int] = {}
        self._gpu_layout, self.gpu_collective_layout = _gpu_layout(config), _gpu_collective_layout(config)
        self._host_layout = _host_layout(config)
        self._peer_layout = RingLayout(
            config.peer_ring_lanes, config.peer_ring_slots, config.peer_ring_slot_bytes, apart=True
        )
        self._ends: dict[tuple[Use, int, bool, int], RingEnd] = {}
        self._opening = threading.Lock()

    def end(self, peer: int, use: Use, deadline: Deadline, *, producer: bool, channel: int = 0) -> RingEnd:
        """This rank's end of the ring to `peer`, or from it; opens it without waiting for the peer to do so.

        Raises:
            ResourceError: no memory for it.
            RingStopped: its slots are in the peer's GPU, and the peer has left.
        """
        found = self._ends.get((use, peer, producer, channel))
        return found if found is not None else self._open(peer, use, deadline, producer, channel)

    def schemes(self) -> list[str]:
        """Names of the transports between this rank and the others."""
        mine = self._members[self._rank].offers
        others = [m.offers for rank, m in enumerate(self._members) if rank != self._rank]
        return sorted({choose(mine, offers).scheme for offers in others})

    def _transport(self, peer: int) -> Transport:
        return self._transports[choose(self._members[self._rank].offers, self._members[peer].offers).scheme]

    def _layout(self, peer: int, use: Use, channel: int) -> RingLayout:
        """A function of use, channel and the members, so that it does not matter who makes the ring.

        Further channels have less memory each, as there may be many: enough to carry small messages that nobody waits
        for yet, and large ones at most of the speed. With GPUs it is a quarter of what channel 0 has. In a job with GPUs
        plans count on what rings for collectives take at once.
        """
        layout = self._full_layout(peer, use, channel)
        return replace(layout, fixed=True) if use is Use.COLLECTIVE and self._gpus else layout

    def _full_layout(self, peer: int, use: Use, channel: int) -> RingLayout:
        me, other = self._members[self._rank], self._members[peer]
        if me.kind == other.kind == "host":
            full = self._host_layout
            return RingLayout(full.lanes, max(2, full.slots // 3), full.slot_bytes) if channel else full
        apart = me.island == other.island and not peer_refusal(me.memory, other.memory)
        if use is Use.COLLECTIVE and not apart:
            return self.gpu_collective_layout
        full = self._peer_layout if apart else self._gpu_layout
        half = round_up(full.slot_bytes // 2, PAGE)
        return RingLayout(max(1, full.lanes // 2), full.slots, half, apart) if channel else full

    def _open(self, peer: int, use: Use, deadline: Deadline, producer: bool, channel: int) -> RingEnd:
        with self._opening:
            key = (use, peer, producer, channel)
            if key not in self._ends:
                source, target = (self._rank, peer) if producer else (peer, self._rank)
                name = f"ring/{use.name.lower()}/{source}-{target}/{channel}"
                end = self._make(name, peer, self._layout(peer, use, channel), deadline, producer=producer)
                end.channel = channel
                # First listed, then looked: who stops all rings at this moment does one of the two in time.
                self._ends[key] = end
                word = self._word or self._left.get(peer, 0)
                if word:
                    end.abort(word)
            return self._ends[key]

    def _make(self, name: str, peer: int, layout: RingLayout, deadline: Deadline, *, producer: bool) -> RingEnd:
        world = self._members[peer].rank
        try:
            end = self._transport(peer).open_ring(
                name, peer, layout, self._store, deadline, producer=producer, job=self._job
            )
            if end.layout.apart:
                try:
                    self._peer_rings.furnish(end, world, self._store, name, deadline)
                except BaseException:
                    end.close()
                    raise
        except NotSet as error:
            raise DeadlineExceeded(
                f"rank {world} of the job began to open a ring and did not end it in time", peer=world
            ) from error
        return end

    def lose(self, peer: int, word: int) -> None:
        """A peer left: stop the rings to and from it, also those opened later; what it sent can still be read."""
        self._left[peer] = word
        for end in self.ends():
            if end.peer == peer:
                end.abort(word)

    def ends(self) -> list[RingEnd]:
        """All ring ends that are open."""
        return list(self._ends.values())

    def abort(self, word: int) -> None:
        """Stop everybody on every ring, also on those opened later."""
        self._word = self._word or word
        for end in self.ends():
            end.abort(word)

    def close(self) -> None:
        """Unmap all. Nobody may use an end any more. Idempotent."""
        with self._opening:
            for end in self._ends.values():
                end.close()
            self._ends.clear()
