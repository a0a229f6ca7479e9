"""GPU memory shared between processes: exported to others, or imported from them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

from xvcomm.abc.peer_memory import ExportedMemory, PeerMemory
from xvcomm.backends.gpu.guard import CAPTURE_ERRORS, OUT_OF_MEMORY
from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import ResourceError

_SWITCHED_OFF = "XVCOMM_PEER_MEMORY=0"
_REMEDY = "set XVCOMM_PEER_MEMORY=0 on all ranks to use rings in host memory"


def reached(runtime: Runtime, index: int, wanted: bool) -> PeerMemory:
    """The devices that a device has peer access to."""
    names = {n: runtime.bus(n) for n in range(runtime.count())}
    others = [n for n in names if n != index and _reaches(runtime, index, n)]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "ipc")]
    return PeerMemory(
        runtime.kind, "/".join((boot, *namespaces)), names[index], tuple(names[n] for n in (index, *others)),
        "" if wanted else _SWITCHED_OFF, runtime.visible,
    )  # fmt: skip


def _reaches(runtime: Runtime, index: int, other: int) -> bool:
    try:
        return runtime.reaches(index, other)
    except VendorError:  # the runtime does not know the device
        return False


def apart(runtime: Runtime) -> list[tuple[int, int]]:
    """Pairs of this process's devices without peer access."""
    pairs = combinations(range(runtime.count()), 2)
    return [(a, b) for a, b in pairs if not (_reaches(runtime, a, b) and _reaches(runtime, b, a))]


class PeerPool:
    """Exported and imported memory of a device, which must be current on the calling thread. Thread-safe.

    Exported memory is never freed, because freeing could wait for kernels that wait for a peer. It is exported again once no
    process has it imported.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle: list[ExportedMemory] = []
        self._away: list[tuple[ExportedMemory, Callable[[], bool]]] = []
        self._lock = threading.Lock()

    def export_memory(self, nbytes: int) -> ExportedMemory:
        """See `SupportsPeerMemory.export_memory`."""
        with self._lock:
            self._look()
            fitting = next((exported for exported in self._idle if exported.nbytes == nbytes), None)
            if fitting is not None:
                self._idle.remove(fitting)
                return fitting
        try:
            address = self._runtime.shareable(nbytes)
            return ExportedMemory(address, nbytes, self._runtime.export(address))
        except VendorError as error:
            if error.code in CAPTURE_ERRORS:
                raise
            less = "use smaller arrays, lower XVCOMM_PEER_RING_SLOTS, or " if error.code == OUT_OF_MEMORY else ""
            raise ResourceError(f"{error}: {nbytes} bytes for a ring in GPU memory; {less}{_REMEDY}") from error

    def reclaim(self, exported: ExportedMemory, returned: Callable[[], bool]) -> None:
        """See `SupportsPeerMemory.reclaim`."""
        with self._lock:
            self._away.append((exported, returned))
            self._look()

    def _look(self) -> None:
        """Find exported memory that no process has imported any more."""
        away, self._away = self._away, []
        for exported, returned in away:
            if returned():
                self._idle.append(exported)
            else:
                self._away.append((exported, returned))

    def import_memory(self, handle: bytes) -> int:
        """See `SupportsPeerMemory.import_memory`."""
        try:
            return self._runtime.open(handle)
        except VendorError as error:
            if error.code in CAPTURE_ERRORS:
                raise
            raise ResourceError(f"{error}: another rank's GPU memory cannot be mapped; {_REMEDY}") from error

    def release_import(self, address: int) -> None:
        """See `SupportsPeerMemory.release_import`."""
        self._runtime.close(address)
