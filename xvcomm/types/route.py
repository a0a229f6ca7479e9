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
        local, remote: the addresses; between ports of InfiniBand their GIDs.
        port: at the other end.
        interfaces: names of the network interfaces that have the addresses, this side's first; or of the ports, `mlx5_0:1`.
        number: of the connection among those between these addresses.
        via: between ports of InfiniBand, the addresses between which these are joined over TCP.
    """

    local: str
    remote: str
    port: int
    interfaces: tuple[str, str]
    number: int = 0
    via: tuple[str, str] | None = None

    @property
    def hosts(self) -> tuple[str, str]:
        """The addresses of the connection over TCP, this side's first."""
        return self.via or (self.local, self.remote)

    @property
    def gids(self) -> tuple[str, str] | None:
        """Those of the ports of InfiniBand at both ends, this side's first; None of other routes."""
        return (self.local, self.remote) if self.via else None

    @property
    def ends(self) -> Ends:
        """Of the connection that takes this way."""
        return self.local, self.remote, self.number

    def __str__(self) -> str:
        here, there = self.interfaces
        over = f"over TCP from {self.via[0]} to {self.via[1]} " if self.via else ""
        return f"{self.local} ({here}) to {self.remote} ({there}) {over}port {self.port}"
