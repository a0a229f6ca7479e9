"""GPU memory that network cards read and write: the slots of rings between hosts."""

from __future__ import annotations

import threading
from collections import defaultdict

from xvcomm.backends.gpu.guard import OUT_OF_MEMORY
from xvcomm.backends.gpu.vendor import Runtime, VendorError
from xvcomm.errors import BackendUnavailable, ResourceError
from xvcomm.memory.segment import PAGE, round_up

_WHOLE = 2 << 20
"""Allocations of this size have pages of their own, which can be exported."""


class NicPool:
    """Memory of a device for network cards; the device must be current on the calling thread. Thread-safe.

    Memory is never freed, because freeing could wait for kernels that wait for a peer. It is used again.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._idle: defaultdict[int, list[int]] = defaultdict(list)
        self._useless: list[int] = []  # does not begin a page
        self._lock = threading.RLock()  # reentrant, because a signal handler may close at any point

    def take(self, nbytes: int) -> int:
        """See `SupportsNicMemory.nic_memory`."""
        size = round_up(nbytes, _WHOLE)
        with self._lock:
            if self._idle[size]:
                return self._idle[size].pop()
        try:
            with self._runtime.during_captures():
                address = self._runtime.shareable(size)
        except VendorError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise ResourceError(f"{error}: {size} bytes for a ring in GPU memory") from error
        if address % PAGE:
            self._useless.append(address)
            raise ResourceError(f"the driver gives memory at {address:#x}, which does not begin a page")
        return address

    def give_back(self, address: int, nbytes: int) -> None:
        """See `SupportsNicMemory.return_nic_memory`."""
        with self._lock:
            self._idle[round_up(nbytes, _WHOLE)].append(address)

    def dma_buf(self, address: int, nbytes: int) -> int:
        """See `SupportsNicMemory.dma_buf`."""
        try:
            return self._runtime.dma_buf(address, round_up(nbytes, PAGE))
        except VendorError as error:
            raise BackendUnavailable(f"the driver exports no dma-buf: {error}") from error
