"""Wildcards for rank and tag, and the status of a receive."""

from __future__ import annotations

import itertools
from typing import Any

from xvcomm.errors import ArgumentError

ANY_SOURCE = ANY_TAG = None
"""Wildcards; None as in `Communicator.probe`, which no computed number equals."""


class Status:
    """Source and tag of a received message; -1 until an operation with `status=` has received one."""

    def __init__(self) -> None:
        self.source = self.tag = -1

    def Get_source(self) -> int:
        """Rank that sent the message."""
        return self.source

    def Get_tag(self) -> int:
        """Tag of the message."""
        return self.tag


_numbers = itertools.count()


class Slot:
    """A status in a spec; compared by identity.

    Attributes:
        number: identifies it in compiled programs.
    """

    def __init__(self, op: str, status: Any) -> None:
        if not (hasattr(status, "source") and hasattr(status, "tag")) or isinstance(status, type):
            raise ArgumentError(
                f"{op}: status={status!r}: expected xvcomm.adapters.jax.Status(), or an object with settable source and tag, "
                "such as mpi4py's"
            )
        self._status, self.number = status, next(_numbers)

    def fill(self, source: int, tag: int) -> None:
        """Set source and tag of the message."""
        self._status.source, self._status.tag = source, tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self._status is other._status

    def __hash__(self) -> int:
        return id(self._status)
