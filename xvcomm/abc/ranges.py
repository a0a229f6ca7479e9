"""Contract of a device whose vendor's profiler shows ranges that a program marks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple


class Ranges(NamedTuple):
    """Functions that mark ranges on the calling thread, which may contain others.

    Attributes:
        push: begins a range with a text.
        pop: ends the one that was begun last.
    """

    push: Callable[[str], object]
    pop: Callable[[], object]


class SupportsRanges(ABC):
    """What a `Device` also implements if a profiler shows what the host does beside what the device does."""

    @abstractmethod
    def ranges(self) -> Ranges | None:
        """The functions of the vendor's library; None if the vendor has none.

        Raises:
            BackendUnavailable: the library is missing; with the remedy.
        """
