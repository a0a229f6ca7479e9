"""RDMA devices of this host: ports and GIDs, through pyverbs. Why there are none, and what to do about that."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from ipaddress import IPv6Address
from types import ModuleType
from typing import Any

from xvcomm.errors import BackendUnavailable

ACTIVE = 4
"""IBV_PORT_ACTIVE."""
STATES = {1: "down", 2: "initializing", 3: "armed", ACTIVE: "active", 5: "active, deferred"}
_LINKS = {1: "InfiniBand", 2: "Ethernet"}
_GRH_REQUIRED = 1
"""IBV_QPF_GRH_REQUIRED."""
_VERSIONS = {0: "InfiniBand", 1: "RoCE v1", 2: "RoCE v2"}


@dataclass(frozen=True, slots=True)
class Gid:
    """An address of a port.

    Attributes:
        index: in the port's table; it may change when addresses come and go.
        value: its 16 bytes.
        version: `RoCE v2`, `RoCE v1` or `InfiniBand`.
        interface: the network interface that it belongs to; empty if there is none.
        address: IPv4 or IPv6, as the interface has it.
    """

    index: int
    value: bytes
    version: str
    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device.

    Attributes:
        number: from 1.
        state: `active` if it can be used.
        link: `Ethernet` or `InfiniBand`.
        mtu: payload bytes of a packet.
        lid: its address in an InfiniBand subnet; 0 on Ethernet.
        gids: without those that are not in use.
        grh: whether it requires a GRH in packets of InfiniBand, within its subnet too; verbs alone tell it.
    """

    number: int
    state: str
    link: str
    mtu: int
    lid: int
    gids: tuple[Gid, ...]
    grh: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its name, `mlx5_0`."""

    name: str
    ports: tuple[Port, ...]


def pyverbs(module: str) -> ModuleType:
    """A module of pyverbs.

    Raises:
        BackendUnavailable: it does not load; with the remedy.
    """
    try:
        return import_module(f"pyverbs.{module}")
    except ImportError as error:
        raise BackendUnavailable(". ".join(_missing(str(error)))) from error


_NO_DEVICE = (
    "load the driver of the network card (`rdma link` lists devices); in containers pass them in: --device=/dev/infiniband "
    "--ulimit memlock=-1, and the host's network: --network=host"
)
NONE = ("this host has no RDMA device", _NO_DEVICE)
"""Reason and remedy where libibverbs lists none."""


def refusal() -> tuple[str, str] | None:
    """Why no RDMA device can be used here and what to do about it, or None if one can."""
    try:
        found = import_module("pyverbs.device").get_device_list()
    except ImportError as error:
        return _missing(str(error))
    except Exception as error:  # pyverbs' own, which derive from Exception; the import of their class may fail as well
        return f"RDMA devices cannot be listed: {error}", _NO_DEVICE
    return None if found else NONE


def _missing(error: str) -> tuple[str, str]:
    """Reason and remedy where pyverbs does not load."""
    if "IBVERBS_PRIVATE" in error or "libibverbs" in error or "librdmacm" in error:
        return (
            f"pyverbs finds no libibverbs of its own version: {error}",
            "use pyverbs and rdma-core of one version: Debian's python3-pyverbs with Debian's Python, or the libraries of "
            "pyverbs' version in LD_LIBRARY_PATH",
        )
    return (
        f"pyverbs is missing: {error}",
        "pip install 'xvcomm[rdma]', which compiles it (apt-get install gcc cmake ninja-build pkg-config libnl-3-dev "
        "libnl-route-3-dev libudev-dev; PIP_CONSTRAINT with cython<3.1), or apt-get install python3-pyverbs",
    )


def devices() -> list[Device]:
    """All devices of this host, opened and closed again to ask them.

    Raises:
        BackendUnavailable: pyverbs does not load, or there is no device; with the remedy.
    """
    if (refused := refusal()) is not None:
        raise BackendUnavailable("; ".join(refused))
    return [ask(name) for name in names()]


def names() -> list[str]:
    """The devices that libibverbs lists; those that this process may not open are not among them.

    Raises:
        BackendUnavailable: pyverbs does not load.
    """
    return [found.name.decode() for found in pyverbs("device").get_device_list()]


def ask(name: str) -> Device:
    """A device, opened and closed again to ask it."""
    context = pyverbs("device").Context(name=name)
    try:
        return describe(name, context)
    finally:
        context.close()


def describe(name: str, context: Any) -> Device:
    """A device that is open, as it is now."""
    count = context.query_device().phys_port_cnt
    ports = [context.query_port(number) for number in range(1, count + 1)]
    entries = context.query_gid_table(sum(port.gid_tbl_len for port in ports))
    return Device(name, tuple(_port(number, port, entries) for number, port in enumerate(ports, 1)))


def _port(number: int, port: Any, entries: Any) -> Port:
    state, link = STATES.get(port.state, f"state {port.state}"), _LINKS.get(port.link_layer, "InfiniBand")
    gids, grh = tuple(_gids(number, entries)), bool(port.flags & _GRH_REQUIRED)
    return Port(number, state, link, 128 << port.active_mtu, port.lid, gids, grh)


def _gids(port: int, entries: Any) -> Iterator[Gid]:
    for entry in entries:
        if entry.port_num == port:
            value = struct.pack("=QQ", entry.gid_subnet_prefix, entry.gid_interface_id)  # both in the network's order
            address = IPv6Address(value)
            version = _VERSIONS.get(entry.gid_type, f"type {entry.gid_type}")
            yield Gid(
                entry.gid_index, value, version, _interface(entry.ndev_ifindex), str(address.ipv4_mapped or address)
            )


def _interface(index: int) -> str:
    """Name of a network interface; empty if there is none, or if it is in another network namespace."""
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:
        return ""
