"""A way to another process."""

from __future__ import annotations

from typing import NamedTuple

MAX_RAILS = 32
"""Most connections between two processes."""

RDMA = 1000
"""Numbers of routes from this one on are of rails of RDMA between the routes' addresses."""

Ends = tuple[str, str, int]
"""What tells a connection from all others to the same process: both addresses, this side's first, and its number."""


class Route(NamedTuple):
    """From an address of this host to an address and port of another.

    Attributes:
        local, remote: the addresses.
        port: at the other end.
        interfaces: names of the network interfaces that have the addresses, this side's first.
        number: of the connection among those between these addresses.
    """

    local: str
    remote: str
    port: int
    interfaces: tuple[str, str]
    number: int = 0

    @property
    def ends(self) -> Ends:
        """Of the connection that takes this way."""
        return self.local, self.remote, self.number

    def __str__(self) -> str:
        here, there = self.interfaces
        return f"{self.local} ({here}) to {self.remote} ({there}) port {self.port}"
