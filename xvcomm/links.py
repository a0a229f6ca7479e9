"""The rings of one communicator: one for each direction of a pair, use and channel, opened when first needed."""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence

from xvcomm.abc.store import Store
from xvcomm.abc.transport import Capabilities, Transport, choose
from xvcomm.config import Config
from xvcomm.deadline import Deadline
from xvcomm.ring import RingEnd, RingLayout
from xvcomm.shm import PAGE, round_up

CHANNELS = 32
"""Channels of a pair; each has rings of its own, so that messages of different channels do not order each other."""


class Use(enum.IntEnum):
    """Messages of users and of collectives go through rings of their own, so neither orders the other."""

    POINT_TO_POINT = 0
    COLLECTIVE = 1

    __hash__ = int.__hash__  # an enumeration's own is a function in Python, and rings are looked up by these


class Links:
    """Opens, keeps and closes ring ends.

    Args:
        job: what the names of shared memory made for it begin with.
        transports: this rank's, by scheme.
        store: the communicator's; waiting in it ends when the communicator does.
        offers: what every rank's transports can do, in rank order.
        kinds: every rank's kind of device.
    """

    def __init__(
        self, config: Config, job: str, store: Store, rank: int, transports: Sequence[Transport],
        offers: Sequence[Sequence[Capabilities]], kinds: Sequence[str],
    ) -> None:  # fmt: skip
        self._job = job
        self._store = store
        self._rank = rank
        self._transports = {t.capabilities().scheme: t for t in transports}
        self._offers = offers
        self._word = 0
        self._left: dict[int, int] = {}
        self._kinds = kinds
        self.gpu_layout = RingLayout(config.gpu_ring_lanes, config.gpu_ring_slots, config.gpu_ring_slot_bytes)
        self._host_layout = RingLayout(config.ring_lanes, config.ring_slots, config.ring_slot_bytes)
        self._ends: dict[tuple[Use, int, bool, int], RingEnd] = {}
        self._opening = threading.Lock()

    def end(self, peer: int, use: Use, deadline: Deadline, *, producer: bool, channel: int = 0) -> RingEnd:
        """This rank's end of the ring to `peer`, or from it; opens it without waiting for the peer to do so.

        Raises:
            ResourceError: no memory for it.
        """
        found = self._ends.get((use, peer, producer, channel))
        return found if found is not None else self._open(peer, use, deadline, producer, channel)

    def _transport(self, peer: int) -> Transport:
        return self._transports[choose(self._offers[self._rank], self._offers[peer]).scheme]

    def _layout(self, peer: int, channel: int) -> RingLayout:
        """A pure function of the channel and both ends' kinds, so that it does not matter who makes the ring.

        Further channels have less memory each, as there may be many: enough to carry small messages that nobody waits
        for yet, and large ones at most of the speed. A GPU pins a quarter of what channel 0 has.
        """
        if {self._kinds[self._rank], self._kinds[peer]} == {"host"}:
            full = self._host_layout
            return RingLayout(full.lanes, max(2, full.slots // 3), full.slot_bytes) if channel else full
        full = self.gpu_layout
        half = round_up(full.slot_bytes // 2, PAGE)
        return RingLayout(max(1, full.lanes // 2), full.slots, half) if channel else full

    def _open(self, peer: int, use: Use, deadline: Deadline, producer: bool, channel: int) -> RingEnd:
        with self._opening:
            key = (use, peer, producer, channel)
            if key not in self._ends:
                source, target = (self._rank, peer) if producer else (peer, self._rank)
                end = self._transport(peer).open_ring(
                    f"ring/{use.name.lower()}/{source}-{target}/{channel}", peer, self._layout(peer, channel),
                    self._store, deadline, producer=producer, job=self._job,
                )  # fmt: skip
                end.channel = channel
                # First listed, then looked: who stops all rings at this moment does one of the two in time.
                self._ends[key] = end
                word = self._word or self._left.get(peer, 0)
                if word:
                    end.abort(word)
            return self._ends[key]

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
