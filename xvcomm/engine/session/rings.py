"""The rings of one communicator: one per pair, direction, use and channel, opened on first use.

Rings are in host memory, except for those between GPUs of one island with peer access, which are in GPU memory. Rings between
islands are always in host memory, also in a rehearsal, which represents a job whose islands share no other memory.
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
from xvcomm.engine.session.ring_sizes import RingSizes
from xvcomm.errors import DeadlineExceeded
from xvcomm.memory.ring import FROM_ARRAY_BYTES, Reason, RingEnd, RingLayout
from xvcomm.memory.segment import PAGE, round_up
from xvcomm.schedule.tuning import RANKS_BYTES
from xvcomm.types.deadline import Deadline, poll

SHORT_LAYOUT = RingLayout(4, 4, RANKS_BYTES // 4)
"""Layout of the rings of `Use.SHORT`, whatever the settings: one slot of each lane holds the longest of these arrays."""
CHANNELS = 32
"""Channels per pair. Each has its own rings, so messages of different channels are not ordered with each other."""


class Use(enum.IntEnum):
    """Users' messages and those of collectives have separate rings, so they are not ordered with each other.

    Very short arrays of collectives have rings of their own: they cross between all ranks, which would need much memory.
    """

    POINT_TO_POINT = 0
    COLLECTIVE = 1
    SHORT = 2

    __hash__ = int.__hash__  # Enum.__hash__ is a Python function, too slow for lookups of rings


class Member(NamedTuple):
    """The properties of a rank that determine its rings.

    Attributes:
        rank: rank in the whole job.
        island: equal for ranks of one island.
        memory: which devices its device has peer access to.
        sizes: of its rings; None if they are the same as this rank's.
    """

    rank: int
    offers: Sequence[Capabilities]
    kind: str
    island: str
    memory: PeerMemory | None = None
    sizes: RingSizes | None = None


def at_once(sizes: RingSizes, *, gpus: bool) -> int:
    """Largest message in bytes that an empty ring between islands can buffer whole; without GPUs, one between hosts."""
    if not gpus:
        return min(sizes.host_layout(wired=True).at_once(1), FROM_ARRAY_BYTES) - 1  # a larger one goes from its array
    return min(sizes.host_layout(wired=False).at_once(1), sizes.gpu_collective_layout().at_once(1))


class Rings:
    """Opens, keeps and closes ring ends. The other ranks may open theirs from now on.

    Args:
        job: prefix of the names of the shared memory.
        group: number of the communicator, see `Transport.open_ring`.
        store: of the communicator; waits in it end when the communicator does.

    Attributes:
        gpu_collective_layout: layout of collectives' rings between islands of one host with a GPU at one or both ends; between
            hosts they hold more.
    """

    def __init__(
        self, config: Config, job: str, group: int, store: Store, rank: int, transports: Sequence[Transport],
        peer_rings: PeerRings, members: Sequence[Member],
    ) -> None:  # fmt: skip
        self._job, self._group = job, group
        self._store = store
        self._rank = rank
        self._transports = {t.capabilities().scheme: t for t in transports}
        self._peer_rings = peer_rings
        self._members = members
        self._gpus = any(member.kind != "host" for member in members)
        self._word = 0
        self._left: dict[int, int] = {}
        self._sizes = RingSizes.of(config)
        self.gpu_collective_layout = self._sizes.gpu_collective_layout()
        self._ends: dict[tuple[Use, int, bool, int], RingEnd] = {}
        self._opening = threading.Lock()
        for transport in transports:
            transport.enter(group)

    def end(self, peer: int, use: Use, deadline: Deadline, *, producer: bool, channel: int = 0) -> RingEnd:
        """This rank's end of the ring to or from `peer`; opens it without waiting for the peer.

        Raises:
            ResourceError: its memory cannot be allocated.
            RingStopped: its slots are in the peer's GPU, and the peer has left.
        """
        found = self._ends.get((use, peer, producer, channel))
        return found if found is not None else self._open(peer, use, deadline, producer, channel)

    def schemes(self) -> list[str]:
        """Names of the transports between this rank and the others."""
        return sorted({self.scheme(rank) for rank in range(len(self._members)) if rank != self._rank})

    def scheme(self, peer: int) -> str:
        """Name of the transport between this rank and another."""
        return choose(self._members[self._rank].offers, self._members[peer].offers).scheme

    def _transport(self, peer: int) -> Transport:
        return self._transports[self.scheme(peer)]

    def _layout(self, peer: int, use: Use, channel: int) -> RingLayout:
        """Layout of a ring, the same on both ranks because it depends only on use, channel, members, and settings of one.

        Channels other than 0 get less memory each, because there may be many of them: enough to buffer small messages, and to
        carry large ones at most of the speed; with GPUs a quarter of channel 0's memory. In a job with GPUs the rings of
        collectives have a fixed size, because plans rely on the size that they can buffer.
        """
        layout = self._full_layout(peer, use, channel)
        return replace(layout, fixed=True) if use is not Use.POINT_TO_POINT and self._gpus else layout

    def _full_layout(self, peer: int, use: Use, channel: int) -> RingLayout:
        me, other = self._members[self._rank], self._members[peer]
        sizes = min(me, other, key=lambda member: member.rank).sizes or self._sizes
        shared = choose(me.offers, other.offers).shared
        apart = shared and me.island == other.island and not peer_refusal(me.memory, other.memory)
        if use is Use.SHORT:
            return replace(SHORT_LAYOUT, apart=apart)
        if me.kind == other.kind == "host":
            if channel:
                full = sizes.host_layout(wired=False)
                return replace(full, slots=max(2, full.slots // 3))
            in_gpu_plans = use is not Use.POINT_TO_POINT and self._gpus
            return sizes.host_layout(wired=not shared and not in_gpu_plans)
        if use is Use.COLLECTIVE and not apart:
            return sizes.gpu_collective_layout() if shared else sizes.gpu_wire_layout()
        full = sizes.peer_layout() if apart else sizes.gpu_layout()
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
                # Listed before the check: a concurrent `abort` or `lose` either finds it in the list or has set the word read
                # here.
                self._ends[key] = end
                word = self._word or self._left.get(peer, 0)
                if word:
                    end.abort(word)
            return self._ends[key]

    def _make(self, name: str, peer: int, layout: RingLayout, deadline: Deadline, *, producer: bool) -> RingEnd:
        world = self._members[peer].rank
        try:
            end = self._transport(peer).open_ring(
                name, peer, world, layout, self._store, deadline, producer=producer, job=self._job, group=self._group
            )  # fmt: skip
            if end.layout.apart and not end.layout.wired:
                try:
                    self._peer_rings.furnish(end, world, self._store, name, deadline)
                except BaseException:
                    end.close()
                    raise
        except NotSet as error:
            raise DeadlineExceeded(
                f"rank {world} of the job began to open a ring and did not complete it in time", peer=world
            ) from error
        return end

    def lose(self, peer: int, word: int) -> None:
        """Stop all present and future rings to and from a peer that has left; messages that it sent can still be received."""
        self._left[peer] = word
        for end in self.ends():
            if end.peer == peer:
                end.abort(word)

    def ends(self) -> list[RingEnd]:
        """All open ring ends."""
        return list(self._ends.values())

    def told(self) -> int:
        """0, or the abort word that a rank of another host has sent over one of the rings; not that it has left."""
        words = (end.abort_word() for end in self.ends() if end.carrier)
        return next(filter(Reason.bad, words), 0)

    def abort(self, word: int) -> None:
        """Stop all present and future rings, for both ends."""
        self._word = self._word or word
        for end in self.ends():
            end.abort(word)

    def tell(self, deadline: Deadline) -> None:
        """Wait until the other ends of all rings know that they were stopped, or until the deadline."""
        poll(lambda: all(end.told() for end in self.ends()) or None, deadline)

    def leave(self, word: int) -> None:
        """Stop by an abort word what other ranks open and this one has not; it opens nothing any more."""
        for transport in self._transports.values():
            transport.leave(self._group, word)

    def close(self) -> None:
        """Unmap all ring ends, which must not be used any more. Idempotent."""
        with self._opening:
            for end in self._ends.values():
                end.close()
            self._ends.clear()
