"""Contract of a device whose transfers compiled code can repeat on other arrays: host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from xvcomm.abc.collective import PreparedCollective
from xvcomm.abc.device import Stream

INPUT, OUTPUT = 0, 1 << 62
"""Where arrays begin in a recording: addresses from there on mean places in the later calls' input and output."""


class Recording(NamedTuple):
    """Transfers that are put on streams to be moved later, and perhaps often.

    Attributes:
        streams: what takes the transfers, and events between them; nothing else may be enqueued there.
        prepared: gives them as one operation, in which the tag of each is the collective's number. `resume` raises RingStopped
            or RingStalled.
    """

    streams: Sequence[Stream]
    prepared: Callable[[], PreparedCollective]


class SupportsRecording(ABC):
    """What a `Device` that is not asynchronous may implement too; else Python enqueues the transfers of each collective."""

    @abstractmethod
    def recording(self, streams: int) -> Recording:
        """A new recording with so many streams."""
