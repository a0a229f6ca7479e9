"""Connections to a listener that have not proved yet that they belong to the job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_MOST = 256
"""Maximum number of them."""
_CROWDED_SECONDS = 0.5
"""Seconds that one may last once the maximum is reached."""
_CROWDED_PAUSE = 0.02

_Connection = TypeVar("_Connection", bound=Hashable)


class Strangers(Generic[_Connection]):
    """Those of one event loop."""

    def __init__(self, end: Callable[[_Connection], None]) -> None:
        """`end` closes a connection for which there is no room any more."""
        self._end = end
        self._since: dict[_Connection, float] = {}  # oldest first

    async def room(self) -> None:
        """Wait until another connection may be accepted. At the maximum, the oldest one is closed.

        So silent connections cannot exhaust the file descriptors, and delay the job's own only briefly.
        """
        while len(self._since) >= _MOST:
            first, since = next(iter(self._since.items()))
            over = since + _CROWDED_SECONDS - asyncio.get_running_loop().time()
            if over > 0:
                await asyncio.sleep(min(over, _CROWDED_PAUSE))
            else:
                self.leave(first)
                self._end(first)

    def enter(self, connection: _Connection) -> None:
        """Count a connection that was accepted."""
        self._since[connection] = asyncio.get_running_loop().time()

    def leave(self, connection: _Connection) -> None:
        """Count it no longer: it has proved what it should, or was closed. Idempotent."""
        self._since.pop(connection, None)
