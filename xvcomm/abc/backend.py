"""Contract of a backend: how a vendor comes in (entry point group `xvcomm.backends`).

What the rest of xvcomm must know of a vendor is here; no other module names one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import ModuleType
from typing import ClassVar

from xvcomm.abc.collective import Collective
from xvcomm.abc.device import Device
from xvcomm.abc.store import Store
from xvcomm.config import Config
from xvcomm.types.deadline import Deadline


class Backend(ABC):
    """One vendor. Making an instance is cheap and imports no vendor library."""

    kind: ClassVar[str]
    """What `XVCOMM_DEVICE` and `RankInfo.device` call it; the name of its entry point."""

    native: ClassVar[str]
    """Name of its native library, `nccl`."""

    dlpack_device: ClassVar[int]
    """DLPack's device type of its memory, for instance 2 (kDLCUDA). No other backend has the same."""

    dlpack_host: ClassVar[tuple[int, ...]] = ()
    """DLPack's device types of host memory that the vendor's runtime has pinned; arrays there are in host memory."""

    torch_device: ClassVar[str] = ""
    """Type of `torch.device` of the tensors in its memory; empty if torch has none."""

    xla_platform: ClassVar[str] = ""
    """XLA's platform whose arrays lie in its memory; empty if there is none."""

    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions whose versions `xvcomm doctor` shows beside xvcomm's."""

    @classmethod
    def serves(cls, library: ModuleType) -> bool:
        """Whether arrays on a GPU of this build of a framework (`torch`, `cupy`) lie in its memory."""
        return False

    @abstractmethod
    def refusal(self) -> tuple[str, str] | None:
        """Why it cannot work here and what to do about it, or None if it can."""

    def devices(self) -> int:
        """How many devices of the kind this host has; asked only where nothing refuses."""
        return 1

    def peer_memory(self) -> str:
        """Whether its devices reach each other's memory, in words; asked only where there are several."""
        return ""

    def lacks(self) -> tuple[str, str] | None:
        """What it cannot do here though nothing refuses it, and what to do about that; may load the vendor's libraries."""
        return None

    def versions(self) -> dict[str, str]:
        """Versions of its driver and of its native library, which ranks of one island should share, by their names.

        Asked only where nothing refuses; may load the vendor's libraries. Leaves out what cannot be had.
        """
        return {}

    @abstractmethod
    def device(self, config: Config) -> Device:
        """This rank's device."""

    @abstractmethod
    def collective(
        self, config: Config, job: str, me: int, members: int, name: str, store: Store, deadline: Deadline
    ) -> Collective:
        """Join a native communicator of `members` as number `me`; all call it with the same `name`. Blocks.

        Raises:
            DeadlineExceeded: not all came in time.
        """
