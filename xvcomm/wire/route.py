"""A way to another process."""

from __future__ import annotations

from typing import NamedTuple


class Route(NamedTuple):
    """From an address of this host to an address and port of another.

    Attributes:
        local, remote: the addresses.
        port: at the other end.
        interfaces: names of the network interfaces that have the addresses, this side's first.
    """

    local: str
    remote: str
    port: int
    interfaces: tuple[str, str]

    def __str__(self) -> str:
        here, there = self.interfaces
        return f"{self.local} ({here}) to {self.remote} ({there}) port {self.port}"
