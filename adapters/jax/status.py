"""Messages of any rank or tag, and what a receive tells of the one that it took."""

from __future__ import annotations

import itertools
from typing import Any

from xvcomm.errors import ArgumentError

ANY_SOURCE = ANY_TAG = None
"""In place of a rank or a tag that is known: as in `Communicator.probe`, and no number that a program could compute."""


class Status:
    """Source and tag of a received message; -1 until an operation with `status=` has received one."""

    def __init__(self) -> None:
        self.source = self.tag = -1

    def Get_source(self) -> int:
        """Rank that sent it."""
        return self.source

    def Get_tag(self) -> int:
        """Its tag."""
        return self.tag


_numbers = itertools.count()


class Slot:
    """A status in a spec: equal if it is the same object, whatever it holds.

    Attributes:
        number: what stands for it in compiled programs.
    """

    def __init__(self, op: str, status: Any) -> None:
        if not (hasattr(status, "source") and hasattr(status, "tag")) or isinstance(status, type):
            raise ArgumentError(
                f"{op}: status={status!r}: expected xvcomm.adapters.jax.Status(), or another object whose source and tag "
                "can be set, as mpi4py's"
            )
        self._status, self.number = status, next(_numbers)

    def fill(self, source: int, tag: int) -> None:
        """Say where a message came from."""
        self._status.source, self._status.tag = source, tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self._status is other._status

    def __hash__(self) -> int:
        return id(self._status)
