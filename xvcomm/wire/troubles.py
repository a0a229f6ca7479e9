"""What has gone wrong with a link's rails of RDMA: how long each is left alone, and when rings that need them are lost."""

from __future__ import annotations

import math
import time

from xvcomm.types.route import Ends
from xvcomm.wire.carrier import Carrier
from xvcomm.wire.wires import Need

_FIRST_SECONDS, _LONGEST_SECONDS = 0.5, 60.0
"""How long a rail of RDMA is left alone that came up and failed, again and again, as where only large packets are lost: twice as
long each time. A rail that stayed up for longer begins anew."""
_PATIENCE = 1.5
"""Rings that need RDMA are lost after this multiple of the time for which a host may be silent. Rails are sound if none has
failed for that time."""


class Troubles:
    """Those of one link. Used in the event loop of `Network`; other threads may read `newest`.

    Attributes:
        newest: when the newest one was.
    """

    def __init__(self, carrier: Carrier, link: int, timeout: float) -> None:
        """Begin without any; `timeout`: seconds for which a host may be silent."""
        self._carrier, self._link, self._timeout = carrier, link, timeout
        self.newest = -math.inf
        self._failure = self._refusal = ""  # of the rail that has failed last, and of the newest one after it
        self._follows = False  # whether the failure has another cause, which is not known
        self._worked = time.monotonic()  # when a rail of RDMA worked, or none was needed
        self._moved = 0
        self._broken: dict[Ends, tuple[float, float]] = {}  # when rails failed, and seconds until they are tried

    @property
    def text(self) -> str:
        """How a rail has failed, and why there is none since; empty if there was no trouble."""
        return "; then ".join(filter(None, (self._failure, self._refusal)))

    def note(self, why: str) -> None:
        """A device has refused a rail."""
        self._refusal, self.newest = why, time.monotonic()

    def note_route(self, why: str) -> None:
        """No connection to make a rail could be had; of less interest than what devices have said."""
        self._refusal, self.newest = self._refusal if self.text else why, time.monotonic()

    def hear(self, why: str) -> None:
        """The other side has given up its end of a rail; of less interest than a failure here that was told a moment ago."""
        if not self._failure or time.monotonic() - self.newest > self._timeout:
            self._failure, self._refusal, self._follows = why, "", True
        self.newest = time.monotonic()

    def explain(self, why: str) -> None:
        """What has caused the failure of a rail that has failed before."""
        if self._follows:
            self._failure, self._follows = why, False

    def fail(self, ends: Ends, why: str, *, follows: bool = False) -> None:
        """A rail that was up has failed.

        Args:
            follows: whether something else has caused that, which is not known: a cause that was told a moment ago says more.
        """
        if not follows or time.monotonic() - self.newest > self._timeout or not self._failure:
            self._failure, self._refusal, self._follows = why, "", follows
        self.newest = time.monotonic()
        before, pause = self._broken.get(ends, (-math.inf, 0.0))
        lasting = time.monotonic() - before > pause + _LONGEST_SECONDS
        needed = self._carrier.need_of_rdma(self._link) is Need.RDMA
        longest = min(_LONGEST_SECONDS, self._timeout / 4) if needed else _LONGEST_SECONDS
        self._broken[ends] = time.monotonic(), _FIRST_SECONDS if lasting else min(longest, 2 * pause)

    def pause(self, ends: Ends) -> float:
        """How long a rail is left alone before it is tried."""
        return self._broken[ends][1] if ends in self._broken else 0.0

    def excuse(self) -> None:
        """No rail at all is up: then those of RDMA are not to blame."""
        self._worked = time.monotonic()

    def verdict(self, *, up: bool) -> str:
        """Why rings in a GPU's memory cannot go on; empty if they can, or there are none.

        Args:
            up: whether a rail of RDMA is up.
        """
        need, now = self._carrier.need_of_rdma(self._link), time.monotonic()
        moved = self._carrier.moved(self._link) if need is Need.RDMA else self._moved
        sound = up and now - self.newest > self._timeout
        if need is Need.NOTHING or sound or moved != self._moved:
            self._worked, self._moved = now, moved
        if need is Need.IMPOSSIBLE:
            why = "a ring has slots in GPU memory at one end, and memory at the other that RDMA devices cannot register"
        elif now - self._worked > _PATIENCE * self._timeout and self.newest > self._worked:
            why = f"no RDMA reaches it any more, and rings in GPU memory need it: {self.text}"
        else:
            return ""
        return f"{why}; with XVCOMM_DEVICE_DIRECT=0 all rings are in host memory"
