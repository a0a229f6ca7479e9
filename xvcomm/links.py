"""The rings of one communicator: one for each direction of a pair and each use, opened when first needed."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence

from xvcomm.abc.store import Store
from xvcomm.abc.transport import Capabilities, Transport, choose
from xvcomm.config import Config
from xvcomm.deadline import Deadline
from xvcomm.errors import DeadlineExceeded
from xvcomm.ring import RingEnd, RingLayout

_LOOK_UP_SECONDS = 0.1


class Use(enum.Enum):
    """Messages of users and of collectives go through rings of their own, so neither orders the other."""

    POINT_TO_POINT = "p2p"
    COLLECTIVE = "coll"


class Links:
    """Opens, keeps and closes ring ends.

    Args:
        transports: this rank's, by scheme.
        offers: what every rank's transports can do, in rank order.
        check: called while waiting for a peer; raises if the communicator is finished.
    """

    def __init__(
        self, config: Config, store: Store, rank: int, transports: Sequence[Transport],
        offers: Sequence[Sequence[Capabilities]], check: Callable[[], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._rank = rank
        self._transports = {t.capabilities().scheme: t for t in transports}
        self._offers = offers
        self._check = check
        self._layout = RingLayout(config.ring_lanes, config.ring_slots, config.ring_slot_bytes)
        self._ends: dict[tuple[Use, int, bool], RingEnd] = {}
        self._lock = threading.Lock()

    def producer(self, peer: int, use: Use) -> RingEnd:
        """This rank's end of the ring to `peer`; opens it without waiting for the peer."""
        found = self._ends.get((use, peer, True))
        return found if found is not None else self._open(peer, use)

    def consumer(self, peer: int, use: Use, deadline: Deadline) -> RingEnd:
        """This rank's end of the ring from `peer`; blocks until the peer opens it.

        Raises:
            DeadlineExceeded: it did not in time.
        """
        found = self._ends.get((use, peer, False))
        return found if found is not None else self._accept(peer, use, deadline)

    def _transport(self, peer: int) -> Transport:
        return self._transports[choose(self._offers[self._rank], self._offers[peer]).scheme]

    def _open(self, peer: int, use: Use) -> RingEnd:
        with self._lock:
            key = (use, peer, True)
            if key not in self._ends:
                name = f"ring/{use.value}/{self._rank}-{peer}"
                self._ends[key] = self._transport(peer).open_ring(name, peer, self._layout, self._store)
            return self._ends[key]

    def _accept(self, peer: int, use: Use, deadline: Deadline) -> RingEnd:
        name = f"ring/{use.value}/{peer}-{self._rank}"
        while True:
            self._check()
            try:
                self._store.wait([name], Deadline.after(deadline.sooner(_LOOK_UP_SECONDS)))
                break
            except DeadlineExceeded:
                if deadline.expired():
                    raise
        with self._lock:
            key = (use, peer, False)
            if key not in self._ends:
                self._ends[key] = self._transport(peer).accept_ring(name, peer, self._store, deadline)
            return self._ends[key]

    def ends(self) -> list[RingEnd]:
        """All ring ends that are open."""
        return list(self._ends.values())

    def abort(self, word: int) -> None:
        """Stop everybody on every ring."""
        for end in self.ends():
            end.abort(word)

    def close(self) -> None:
        """Unmap all. Idempotent."""
        with self._lock:
            for end in self._ends.values():
                end.close()
            self._ends.clear()
