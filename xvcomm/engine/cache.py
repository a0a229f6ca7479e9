"""Finds what compiled code runs, by the shape of a request: the one table of shapes that a communicator has seen."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

_KEPT = 2000


class LaunchCache:
    """The launches of one communicator. Bounded: a program may have ever new shapes.

    Attributes:
        enabled: whether compiled code runs anything; else Python runs every operation.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._launches: dict[Hashable, Any] = {}
        self._seen: set[Hashable] = set()
        self.find = self._launches.get
        """The launch of a shape; None if there is none. What is found must be kept until it has run."""

    def prepare(self, shape: Hashable, make: Callable[[], Any], *, at_once: bool = False) -> Any:
        """Make the launch of a shape that `find` has not found.

        Args:
            make: gives the launch; None if compiled code cannot run this shape, which is then not asked again.
            at_once: make it also where the shape is new. Most occur only once, and some launches keep much memory.

        Returns:
            The launch, or None.
        """
        if not self.enabled or shape in self._launches:
            return None
        self._make_room()
        if not at_once and shape not in self._seen:
            self._seen.add(shape)
            return None
        found = self._launches[shape] = make()
        return found

    def alias(self, key: Hashable, launch: Any) -> None:
        """Let `find` find a launch by another key, too."""
        self._make_room()
        self._launches[key] = launch

    def _make_room(self) -> None:
        if len(self._launches) + len(self._seen) >= _KEPT:
            self._launches.clear()
            self._seen.clear()
