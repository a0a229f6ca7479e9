"""Contract of a device whose memory other processes of the host can map: rings between such devices have their slots in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """What decides whether a device and one of another process reach each other's memory; see `transport.peer_refusal`.

    Attributes:
        runtime: whose handles for memory it takes: `cuda`, `rocm`.
        processes: equal for processes that may pass such handles to each other.
        device: the device's name on the host's bus.
        reaches: names of the devices whose memory it reads and writes, itself included.
        refused: why this rank shares no memory; empty if it does.
        visible: the variable of the environment that tells a process which of the vendor's devices it sees.
    """

    runtime: str
    processes: str
    device: str
    reaches: tuple[str, ...]
    refused: str = ""
    visible: str = ""


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Memory of a device that other processes can import by its handle."""

    address: int
    nbytes: int
    handle: bytes


class SupportsPeerMemory(ABC):
    """What a `Device` also implements if it can export memory to other processes and import theirs."""

    @abstractmethod
    def peer_memory(self) -> PeerMemory:
        """With which devices it shares memory. Never blocks."""

    @abstractmethod
    def export_memory(self, nbytes: int) -> ExportedMemory:
        """Memory for the slots of a ring, which other processes can import. Does not wait for running kernels.

        Raises:
            ResourceError: there is not enough.
        """

    @abstractmethod
    def reclaim(self, exported: ExportedMemory, returned: Callable[[], bool]) -> None:
        """Use exported memory again once no process has imported it. Never blocks.

        Args:
            returned: tells whether no process has it any more; called now and later, by any thread.
        """

    @abstractmethod
    def import_memory(self, handle: bytes) -> int:
        """Map memory that another process has exported, and give its address here. Does not wait for running kernels.

        Raises:
            ResourceError: it cannot be mapped.
        """

    @abstractmethod
    def release_import(self, address: int) -> None:
        """Unmap imported memory. May wait for running kernels."""
