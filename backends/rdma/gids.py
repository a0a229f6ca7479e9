"""By which GID a port serves an address of this host, and in which partition."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from xvcomm.backends.rdma import sysfs
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.errors import ResourceError

_MEMBER = 0x8000
"""Bit of a partition's key: full member. The other bits name the partition."""
_ROUTED = bytes.fromhex("fec00000")
"""How a GID begins that routers of InfiniBand know; its FLID follows, and then 16 bits that name its subnet."""


def gid_of(port: Port, address: str) -> Gid | None:
    """The GID by which a port serves an address; None if it does not.

    On Ethernet that is RoCE v2's of this very address, because a port has those of several interfaces and versions: packets of
    another one take another way. On InfiniBand the address is the GID, see `subnet_gid`.
    """
    wanted = ip_address(address)
    if port.link == "InfiniBand":
        gid = subnet_gid(port)
        return gid if gid is not None and ip_address(gid.address) == wanted else None
    return next((gid for gid in port.gids if gid.version == "RoCE v2" and ip_address(gid.address) == wanted), None)


def subnet_gid(port: Port) -> Gid | None:
    """The GID of a port of InfiniBand that has its place in a subnet: the first one; None if it has not."""
    if port.link != "InfiniBand" or not port.lid:
        return None
    return next((gid for gid in port.gids if gid.index == 0), None)


def flid(gid: bytes) -> int:
    """The LID by which routers of InfiniBand are asked to take packets to a GID in another subnet; 0 if they do not know it."""
    return int.from_bytes(gid[4:6]) if gid[:4] == _ROUTED else 0


def routed_gid(port: Port) -> Gid | None:
    """The GID by which routers of InfiniBand find a port; None if there is none."""
    return next((gid for gid in port.gids if gid.version == "InfiniBand" and flid(gid.value)), None)


def partition_key(device: str, port: int, index: int, root: Path = sysfs.ROOT) -> int:
    """The key at a place of a port's table; 0 if the kernel does not tell it."""
    return sysfs.partition_keys(device, port, root).get(index, 0)


def apart(ours: int, theirs: int) -> bool:
    """Whether ports with these keys of partitions cannot talk: they are of two, or both limited members; 0 is not known."""
    return bool(ours and theirs and ((ours ^ theirs) & ~_MEMBER or not (ours | theirs) & _MEMBER))


def partition(device: str, port: int, key: int | None, root: Path = sysfs.ROOT) -> int:
    """Where a partition's key is in the table of a port; of full members first. The first place if there is no key to look for.

    Raises:
        ResourceError: it is not there; names those that are.
    """
    if key is None:
        return 0
    table = sysfs.partition_keys(device, port, root)
    same = [index for index, other in table.items() if (key ^ other) & ~_MEMBER == 0]
    if not same:
        have = ", ".join(f"{other:#06x}" for other in table.values()) or "none"
        raise ResourceError(
            f"port {port} of {device} is not in the partition XVCOMM_RDMA_PARTITION_KEY={key:#06x}; its keys are {have}"
        )
    return max(same, key=lambda index: (table[index] == key, table[index] & _MEMBER))
