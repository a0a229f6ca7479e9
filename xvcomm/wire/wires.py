"""This process's halves of mirrored rings, as compiled code works on them, in a table whose places are used again."""

from __future__ import annotations

import contextlib
import ctypes
import enum
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from xvcomm.abc.cards import Registered
from xvcomm.errors import ResourceError
from xvcomm.memory.ring import COUNTERS, LINE, MAX_LANES, RingEnd, RingLayout
from xvcomm.memory.segment import PAGE
from xvcomm.wire.changes import FULL, attach, detach, is_settled
from xvcomm.wire.frames import FRAME
from xvcomm.wire.records import OF_LINK, PLACES, Wire
from xvcomm.wire.shares import Shares


class Need(enum.Enum):
    """What the rings of a link need."""

    NOTHING = enum.auto()
    RDMA = enum.auto()
    IMPOSSIBLE = enum.auto()
    """One has slots in a GPU's memory at one end, and at the other in memory that RDMA devices have not registered."""


class Offer(NamedTuple):
    """What another process says of its half of a ring that it has opened: see `frames.OPEN_WORDS`, and `records.OFFER`."""

    link: int
    name: int
    there: int
    lanes: int
    slots: int
    slot_bytes: int
    producer: int
    group: int
    peer: int
    apart: int
    slots_address: int
    keys: list[int]

    @classmethod
    def of(cls, link: int, name: int, there: int, words: np.ndarray[Any, Any]) -> Offer:
        """From a record of a link."""
        lanes, slots, slot_bytes, producer, group, peer, apart, address = words[:8].tolist()
        keys = words[8:].tolist()
        return cls(link, name, there, lanes, slots, slot_bytes, producer, group, peer, apart, address, keys)

    @property
    def layout(self) -> RingLayout:
        """Its shape."""
        return RingLayout(self.lanes, self.slots, self.slot_bytes, wired=True)

    def sound(self) -> bool:
        """Whether there may be such a ring."""
        ring = 0 < self.lanes <= MAX_LANES and self.slots > 0 and self.slot_bytes > 0 and self.slot_bytes % PAGE == 0
        return ring and -1 <= self.peer < 1 << 24


class WireEnd:
    """This process's half of a ring that is mirrored on another host.

    Attributes:
        link, name: see `records.WIRE`.
        record: see `records.WIRE`; `address`: its own.
        shares: what each path has carried of the newest messages.
    """

    def __init__(
        self, link: int, name: int, group: int, end: RingEnd, slots: Registered | None, offer: Offer | None
    ) -> None:
        ring = end.layout
        self.link, self.name = link, name
        self._end = end  # which owns the counter that compiled code reads
        self._owners = np.zeros(ring.lanes * ring.slots, np.int64)
        self._sources = np.zeros(ring.lanes * ring.slots, np.int64)
        self._flights = np.zeros(ring.lanes * ring.slots, np.int64)
        self._frames = np.zeros(ring.lanes * ring.slots, FRAME)
        self.shares = Shares()
        self.record = Wire(
            link=link, number=-1, most=ring.slot_bytes, name=name, group=group, peer=end.peer,
            there=offer.there if offer else -1, open=1 if offer else 2, shut=end.abort_word() != 0,
            producer=end.producer, ring=end.address, geometry=end.geometry, counter=end.counter, turn=end.turn,
            replays=end.replays, owners=self._owners.ctypes.data, sources=self._sources.ctypes.data,
            flights=self._flights.ctypes.data, frames=self._frames.ctypes.data, shares=self.shares.address, entries=-1,
            apart=ring.apart, slots=end.slots or end.address + ring.data, registered=slots is not None,
        )  # fmt: skip
        self.record.direct.may_wait = slots is None
        self.address = ctypes.addressof(self.record)
        if slots is not None:
            self.record.scratch = slots.scratch
            for device, key in enumerate(slots.keys):
                self.record.keys[device], self.record.given[device] = key
        if offer is not None:
            self.record.apart_there = offer.apart
            self.record.slots_there, self.record.keys_there[:] = offer.slots_address, offer.keys
        end.direct = self.address + Wire.direct.offset

    def settled(self) -> bool:
        """See `changes.is_settled`."""
        return bool(is_settled(self.address))


class WireTable:
    """The halves of a process, each in a place that another ring of the same link takes once a half is removed.

    What still comes for an earlier half in the place is told by its number. A signal handler may add and remove others in the
    middle of any method.

    Args:
        carrier: address of its record.
    """

    def __init__(self, carrier: int) -> None:
        self._carrier = carrier
        self._halves: dict[WireEnd, None] = {}
        self._removed: dict[int, WireEnd] = {}  # by place; compiled code reads the record until another one is there
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def add(self, half: WireEnd) -> None:
        """Let threads carry for a half. If this is interrupted, the half must be removed.

        Raises:
            ResourceError: there is no room for it.
        """
        self._halves[half] = None
        place = -1
        with contextlib.suppress(IndexError):
            place = self._free[half.link].pop()
        number = attach(self._carrier, half.address, place)
        self._removed.pop(place, None)
        if number < 0:
            del self._halves[half]
            most, whose = (PLACES, "a rank") if number == FULL else (OF_LINK, "two ranks")
            raise ResourceError(
                f"{whose} cannot have more than {most} rings with other hosts at a time; close communicators, or use fewer"
            )

    def remove(self, half: WireEnd, *, anyway: bool) -> bool:
        """Let no thread carry for a half any more, so that another one may have its place; see `changes.detach`. Idempotent."""
        found = detach(self._carrier, half.address, anyway)
        place = int(half.record.number) % PLACES
        if found > 0:
            self._removed[place] = half
        if found >= 0:
            self._halves.pop(half, None)
        if found > 0:
            self._free[half.link].append(place)
        return bool(found >= 0)

    def need_of_rdma(self, link: int) -> Need:
        """See `Carrier.need_of_rdma`."""
        apart = [r for r in self._attached(link) if r.apart or r.apart_there]
        if any(r.there >= 0 and not (r.registered and r.slots_there) for r in apart):
            return Need.IMPOSSIBLE
        return Need.RDMA if apart else Need.NOTHING

    def moved(self, link: int) -> int:
        """See `Carrier.moved`."""
        total = 0
        for r in self._attached(link):
            ring = r.ring + COUNTERS + (LINE if r.producer else 0)
            total += sum(ctypes.c_int64.from_address(ring + 2 * n * LINE).value for n in range(r.geometry.lanes))
        return total

    def _attached(self, link: int) -> Iterator[Any]:
        """The records of a link's halves that are in use."""
        return (half.record for half in list(self._halves) if half.link == link and half.record.ring)
