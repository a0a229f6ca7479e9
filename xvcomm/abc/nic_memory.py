"""Contract of a device whose memory network cards can read and write, without host memory in between (GPUDirect RDMA)."""

from __future__ import annotations

from abc import ABC, abstractmethod


class SupportsNicMemory(ABC):
    """What a `Device` also implements if a card may reach its memory. Whether one does is tried, see `backends.rdma.trials`.

    Attributes:
        needs_write: whether the device sees what cards have written only after one more write of the same card, not only a read.
    """

    needs_write: bool

    @abstractmethod
    def bus(self) -> str:
        """PCIe address of the device, `0000:65:00.0`, or what the vendor calls it."""

    @abstractmethod
    def nic_memory(self, nbytes: int) -> int:
        """Address of memory for the slots of a ring, on whole pages of the host. Does not wait for running kernels.

        Raises:
            ResourceError: there is not enough.
        """

    @abstractmethod
    def return_nic_memory(self, address: int, nbytes: int) -> None:
        """Give such memory back, that no card reaches any more; it is kept for later rings. Never blocks."""

    @abstractmethod
    def dma_buf(self, address: int, nbytes: int) -> int:
        """A descriptor of a dma-buf of such memory, which the caller closes.

        Raises:
            BackendUnavailable, ResourceError: the driver gives none; with the reason.
        """
