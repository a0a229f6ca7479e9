"""Memory that a GPU shares with those of other processes: lent to them, or mapped from what they lend."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from xvcomm.abc.device import Loan, PeerMemory
from xvcomm.backends.gpu.guard import CAPTURE_ERRORS, OUT_OF_MEMORY
from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import ResourceError

_SWITCHED_OFF = "XVCOMM_PEER_MEMORY=0"
_REMEDY = "set XVCOMM_PEER_MEMORY=0 on all ranks, and rings lie in host memory"


def reached(runtime: Runtime, index: int, wanted: bool) -> PeerMemory:
    """With whom a device shares memory.

    Args:
        wanted: whether the user lets it.
    """
    names = {n: runtime.bus(n) for n in range(runtime.count())}
    others = [n for n in names if n != index and _reaches(runtime, index, n)]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "ipc")]
    return PeerMemory(
        runtime.kind, "/".join((boot, *namespaces)), names[index], tuple(names[n] for n in (index, *others)),
        "" if wanted else _SWITCHED_OFF,
    )  # fmt: skip


def _reaches(runtime: Runtime, index: int, other: int) -> bool:
    try:
        return runtime.reaches(index, other)
    except VendorError:  # unknown to this runtime
        return False


def apart(runtime: Runtime) -> list[tuple[int, int]]:
    """Pairs of this process's devices that do not reach each other's memory."""
    pairs = combinations(range(runtime.count()), 2)
    return [(a, b) for a, b in pairs if not (_reaches(runtime, a, b) and _reaches(runtime, b, a))]


class PeerPool:
    """What a device lends and borrows. Any thread whose current device it is.

    Lent memory is never given back to the vendor, which could wait for kernels that wait for a peer. It is lent again
    once nobody has it mapped.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle: list[Loan] = []
        self._away: list[tuple[Loan, Callable[[], bool]]] = []
        self._lock = threading.Lock()

    def lend(self, nbytes: int) -> Loan:
        """See `Device.lend`."""
        with self._lock:
            self._look()
            fitting = next((loan for loan in self._idle if loan.nbytes == nbytes), None)
            if fitting is not None:
                self._idle.remove(fitting)
                return fitting
        try:
            address = self._runtime.shareable(nbytes)
            return Loan(address, nbytes, self._runtime.export(address))
        except VendorError as error:
            if error.code in CAPTURE_ERRORS:
                raise
            less = "use smaller arrays, lower XVCOMM_PEER_RING_SLOTS, or " if error.code == OUT_OF_MEMORY else ""
            raise ResourceError(f"{error}: {nbytes} bytes for a ring in GPU memory; {less}{_REMEDY}") from error

    def take_back(self, loan: Loan, returned: Callable[[], bool]) -> None:
        """See `Device.take_back`."""
        with self._lock:
            self._away.append((loan, returned))
            self._look()

    def _look(self) -> None:
        """See which of the lent memory nobody has mapped any more."""
        away, self._away = self._away, []
        for loan, returned in away:
            if returned():
                self._idle.append(loan)
            else:
                self._away.append((loan, returned))

    def borrow(self, handle: bytes) -> int:
        """See `Device.borrow`."""
        try:
            return self._runtime.open(handle)
        except VendorError as error:
            if error.code in CAPTURE_ERRORS:
                raise
            raise ResourceError(f"{error}: another rank's GPU memory cannot be mapped; {_REMEDY}") from error

    def give_back(self, address: int) -> None:
        """See `Device.give_back`."""
        self._runtime.close(address)
