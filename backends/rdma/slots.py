"""Slots of rings in a GPU's memory that RDMA devices have registered."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from xvcomm.abc.cards import Keys
from xvcomm.abc.device import Device
from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma.pairs import Domain
from xvcomm.backends.rdma.regions import register_all
from xvcomm.errors import ResourceError, XvcommError
from xvcomm.memory.segment import PAGE


class DirectSlots:
    """See `abc.cards.Registered`: memory of a GPU that all devices have registered which answer."""

    def __init__(self, device: Device, domains: Sequence[Domain], nbytes: int) -> None:
        """Allocate and register memory.

        Raises:
            ResourceError, BackendUnavailable: there is none, or see `register_all`.
        """
        assert isinstance(device, SupportsNicMemory)
        whole = nbytes + (PAGE if device.needs_write else 0)
        self._in_use = False
        with contextlib.ExitStack() as undo:
            self.address = device.nic_memory(whole)
            undo.callback(self._give_back, device, whole)
            self.scratch = self.address + nbytes if device.needs_write else 0
            self.how: list[str] = []

            def register(domain: Domain) -> Any:
                region, how = _register(device, domain, self.address, whole)
                undo.callback(self._release, domain, region)
                self.how.append(how)
                return region

            self.keys: Sequence[Keys] = register_all(domains, register)
            self._undo = undo.pop_all()

    def _release(self, domain: Domain, region: Any) -> None:
        self._in_use = not domain.release(region) or self._in_use

    def _give_back(self, device: SupportsNicMemory, nbytes: int) -> None:
        if not self._in_use:
            device.return_nic_memory(self.address, nbytes)

    def close(self, *, in_use: bool = False) -> None:
        """See `abc.cards.Registered.close`. Idempotent. Memory that a device does not give up is not used again either."""
        self._in_use = in_use or self._in_use
        self._undo.close()


def _register(device: SupportsNicMemory, domain: Domain, address: int, nbytes: int) -> tuple[Any, str]:
    """Register memory of a GPU by its dma-buf, or by its address as kernels with peer memory permit; and how it went.

    What is written must come in order where a WRITE behind it makes it visible, see `wire.visibility`.

    Raises:
        ResourceError: neither is possible; with both reasons.
    """
    try:
        descriptor = device.dma_buf(address, nbytes)
        try:
            return domain.register_dma_buf(descriptor, address, nbytes, ordered=device.needs_write), "as a dma-buf"
        finally:
            os.close(descriptor)
    except XvcommError as error:
        by_descriptor = str(error)
    try:
        region = domain.register(address, nbytes, readable=True, ordered=device.needs_write)
        return region, f"by its address ({by_descriptor})"
    except ResourceError as error:
        raise ResourceError(f"neither as a dma-buf: {by_descriptor}; nor by its address: {error}") from error
