"""What the kernel says of RDMA devices, also without pyverbs: where they are in the machine, and their ports and GIDs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from xvcomm.backends.rdma.devices import STATES, Gid, Port

ROOT = Path("/sys/class/infiniband")
_PCIE = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a device is, and what it is.

    Attributes:
        pcie: its PCIe address; empty for software devices.
        numa_node: that it is near to; -1 if the kernel does not know.
        firmware: version; empty if it tells none.
        card: its vendor's name for it.
    """

    pcie: str
    numa_node: int
    firmware: str
    card: str


def names(root: Path = ROOT) -> list[str]:
    """The devices of this host."""
    return sorted(folder.name for folder in root.glob("*"))


def place(name: str, root: Path = ROOT) -> Place:
    """Where a device is."""
    folder = root / name
    address = (folder / "device").resolve().name
    firmware, node = _text(folder / "fw_ver"), _text(folder / "device" / "numa_node")
    card = " ".join(filter(None, (_text(folder / "hca_type"), _text(folder / "board_id"))))
    known = address if _PCIE.fullmatch(address) else ""
    return Place(known, int(node or -1), "" if set(firmware) <= set("0. ") else firmware, card)


def ports(name: str, root: Path = ROOT) -> tuple[Port, ...]:
    """The ports of a device; their `mtu` is 0, which the kernel does not tell here."""
    folders = sorted((root / name / "ports").glob("*"), key=lambda folder: int(folder.name))
    return tuple(_port(folder) for folder in folders)


def node_file(name: str, root: Path = ROOT) -> Path | None:
    """The file through which a process uses a device, as /dev/infiniband/uverbs0; it may be missing, as in containers."""
    for found in root.with_name("infiniband_verbs").glob("uverbs*/ibdev"):
        if _text(found) == name:
            return Path("/dev/infiniband", found.parent.name)
    return None


def interfaces(name: str, root: Path = ROOT) -> dict[str, int]:
    """The network interfaces of a device, and to which port each belongs; on Ethernet also a bond or VLAN that its GIDs name."""
    found = {
        folder.name: int(_text(folder / "dev_port") or 0) + 1
        for folder in sorted((root / name / "device" / "net").glob("*"))
    }
    for port in ports(name, root):
        if port.link == "Ethernet":
            found |= {gid.interface: port.number for gid in port.gids if gid.interface}
    return found


def gigabits(name: str, port: int, root: Path = ROOT) -> float:
    """The speed of a port in Gbit/s; 0 if the kernel does not know."""
    return float((_text(root / name / "ports" / str(port) / "rate") or "0").split()[0])


def partition_keys(name: str, port: int, root: Path = ROOT) -> dict[int, int]:
    """The keys of a port's partitions, by their places in its table."""
    found = {
        int(file.name): int(_text(file) or "0", 16) for file in (root / name / "ports" / str(port) / "pkeys").glob("*")
    }
    return {index: key for index, key in sorted(found.items()) if key}


def _port(folder: Path) -> Port:
    number, link = int(folder.name), _text(folder / "link_layer")
    state = _text(folder / "state").partition(":")[0]
    lid = int(_text(folder / "lid") or "0", 16)
    return Port(number, STATES.get(int(state or 0), f"state {state}"), link, 0, lid, tuple(_gids(folder, link)))


def _gids(folder: Path, link: str) -> Iterator[Gid]:
    for file in sorted((folder / "gids").glob("*"), key=lambda file: int(file.name)):
        value = IPv6Address(_text(file) or "::").packed
        kind = _text(folder / "gid_attrs" / "types" / file.name)
        if any(value) and kind:
            address = IPv6Address(value)
            version = kind if kind == "RoCE v2" else "RoCE v1" if link == "Ethernet" else "InfiniBand"
            interface = _text(folder / "gid_attrs" / "ndevs" / file.name)
            yield Gid(int(file.name), value, version, interface, str(address.ipv4_mapped or address))


def _text(file: Path) -> str:
    """The line of a file; empty if there is none: unused GIDs have files that cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
