"""Contract of a backend: the door by which a vendor comes in (entry point group `xvcomm.backends`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from xvcomm.abc.collective import Collective
from xvcomm.abc.device import Device
from xvcomm.abc.store import Store
from xvcomm.config import Config
from xvcomm.types.deadline import Deadline


class Backend(ABC):
    """One vendor. Making an instance is cheap and imports no vendor library."""

    kind: ClassVar[str]
    """What `XVCOMM_DEVICE` and `RankInfo.device` call it."""

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
