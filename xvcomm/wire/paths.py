"""The paths of a link: each pair of addresses and number over which it has had rails, with their bytes and their state."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from xvcomm.abc import transport as abc
from xvcomm.types.route import RDMA, Ends

_TOLD = 8
"""Most paths that are told in words."""
_SILENT_SECONDS = 1.0
"""Over a rail that works a sign of life comes several times a second."""


@dataclass
class Path:
    """Of rails with the same scheme and ends, one after another.

    Attributes:
        heard: when the newest one came up, or was last seen to have received more; and how many bytes it had `got` then.
        lost: when the newest one was lost; None while it is up.
        sent, received: bytes of those that are lost.
        repeated: slots that they have sent which rails had that were lost before.
        losses: how many are.
        record: of the one that is up, see `records.RAIL`.
    """

    scheme: str
    ends: Ends
    heard: float
    record: Any = None
    lost: float | None = None
    sent: int = 0
    received: int = 0
    repeated: int = 0
    losses: int = 0
    got: int = 0

    def __str__(self) -> str:
        local, remote, number = self.ends
        more = f" {number % RDMA}" if number % RDMA else ""
        return f"{local} to {remote} ({self.scheme}{more})"

    def carried(self) -> tuple[int, int]:
        """Bytes sent and received, of the rail that is up too."""
        record = self.record
        return (
            (self.sent, self.received) if record is None else (self.sent + record.sent, self.received + record.received)
        )

    def again(self) -> int:
        """Slots sent again, by the rail that is up too."""
        return self.repeated + (self.record.repeated if self.record is not None else 0)

    def look(self, now: float) -> None:
        """See `Paths.look`."""
        record = self.record
        if record is not None and record.received != self.got:
            self.got, self.heard = record.received, now

    def state(self, waits: float) -> str:
        """In words.

        Args:
            waits: since when the other host has acknowledged nothing of what was sent; infinite if nothing is due.
        """
        now, (sent, received) = time.monotonic(), self.carried()
        if self.record is None:
            how = f"lost {now - (self.lost or now):.1f} s ago"
        else:
            self.look(now)
            heard = now - self.heard
            how = f"up, nothing heard for {heard:.1f} s" if heard > _SILENT_SECONDS else "up"
            how += f", nothing acknowledged for {now - waits:.1f} s" if waits < now - _SILENT_SECONDS else ""
        return f"{self} {how}, {sent} bytes sent, {received} received"


class Paths:
    """Those of one link, numbered from 1 on."""

    def __init__(self) -> None:
        self._all: list[Path] = []

    def use(self, scheme: str, ends: Ends) -> int:
        """The number of the path of a rail that is about to come up; `begin` follows."""
        for number, path in enumerate(self._all, 1):
            if (path.scheme, path.ends) == (scheme, ends):
                return number
        self._all.append(Path(scheme, ends, time.monotonic()))
        return len(self._all)

    def route(self, number: int) -> int:
        """The number of the first path between the same addresses."""
        own = self._all[number - 1]
        return next(
            n for n, path in enumerate(self._all, 1) if (path.scheme, path.ends[:2]) == (own.scheme, own.ends[:2])
        )

    def begin(self, number: int, record: Any) -> None:
        """A rail is up."""
        path = self._all[number - 1]
        path.record, path.heard, path.lost, path.got = record, time.monotonic(), None, record.received

    def end(self, number: int, record: Any) -> None:
        """A rail is lost, which may have been replaced already; its record still has its numbers."""
        path = self._all[number - 1]
        path.sent, path.received = path.sent + record.sent, path.received + record.received
        path.repeated += record.repeated
        path.losses += 1
        if path.record is record:
            path.record, path.lost = None, time.monotonic()

    def look(self) -> None:
        """Note over which something has come since the last call. To be called several times a second."""
        now = time.monotonic()
        for path in self._all:
            path.look(now)

    def name(self, number: int) -> str:
        """Of a path, for the user."""
        return str(self._all[number - 1])

    def read(self, rank: int) -> list[abc.Path]:
        """All of them, to this rank."""
        return [
            abc.Path(rank, path.scheme, *path.ends, path.record is not None, *path.carried(), path.losses, path.again())
            for path in list(self._all)
        ]

    def told(self, waits: Mapping[int, float]) -> str:
        """All of them in words; see `Path.state` for what `waits` has of each that is up."""
        return "; ".join(self._told(waits)) or "there was no connection to it"

    def _told(self, waits: Mapping[int, float]) -> Iterator[str]:
        every = sorted(enumerate(list(self._all), 1), key=lambda each: (each[1].scheme, each[1].ends))
        for number, path in every[:_TOLD]:
            yield path.state(waits.get(number, math.inf))
        if len(every) > _TOLD:
            yield f"and {len(every) - _TOLD} more"
