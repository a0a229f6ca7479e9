"""Subnets of InfiniBand, as far as two hosts must tell each other of them."""

from __future__ import annotations

from ipaddress import ip_network

import msgspec


class SubnetPort(msgspec.Struct, frozen=True, array_like=True):
    """A port of InfiniBand, which needs no network interface.

    Attributes:
        name: `mlx5_0:1`.
        gid: as an address; its first 64 bits are the prefix of the subnet.
    """

    name: str
    gid: str

    def shares_subnet(self, other: SubnetPort) -> bool:
        """Whether both are of one subnet, by their prefixes."""
        return prefix(self.gid) == prefix(other.gid)


def prefix(gid: str) -> str:
    """Of the subnet of a GID, `fe80::/64`."""
    return str(ip_network((gid, 64), strict=False))
