"""The network interfaces of this host that wires use, and the routes to those of another."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import ip_interface
from pathlib import Path

import msgspec

from xvcomm.backends.tcp import choice
from xvcomm.config import Config
from xvcomm.errors import ConfigError, ResourceError
from xvcomm.wire.route import Route

_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"


class Address(msgspec.Struct, frozen=True, array_like=True):
    """An address on which a process listens.

    Attributes:
        interface: name of the network interface.
        address: with the length of the network's prefix, `10.0.0.7/24`.
        port: on which it listens.
    """

    interface: str
    address: str
    port: int

    @property
    def host(self) -> str:
        """The address alone."""
        return str(ip_interface(self.address).ip)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a process can be reached.

    Attributes:
        stack: identifies the network stack: kernel and network namespace.
        addresses: of the interfaces in use.
        loopback: port on the loopback interface.
    """

    stack: str
    addresses: list[Address]
    loopback: int


def usable(config: Config, env: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Name and address, with prefix length, of the interfaces that wires use.

    Raises:
        ConfigError: there is none.
    """
    every = choice.examine(config, env)
    found = [(interface.name, interface.address) for interface in every if interface.used]
    if not found:
        have = "; ".join(f"{i.name} ({i.address}): {i.reason}" for i in every) or "none at all"
        raise ConfigError(f"no network interface can be used between hosts, set XVCOMM_NICS; there are {have}")
    return found


def listen(config: Config) -> tuple[list[socket.socket], Place]:
    """Listen on the interfaces in use and on loopback, and nowhere else.

    Raises:
        ResourceError: no port is free.
        ConfigError: see `usable`; or the ports are no numbers.
    """
    sockets: list[socket.socket] = []
    ports = _ports(config)

    def bind(host: str) -> int:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in ports:
            try:
                sockets.append(socket.create_server((host, port), family=family, backlog=_BACKLOG))
            except OSError as error:
                last = error
                continue
            return int(sockets[-1].getsockname()[1])
        for listener in sockets:
            listener.close()
        raise ResourceError(f"cannot listen on {host}, XVCOMM_PORTS={config.ports}: {last.strerror}; allow more ports")

    loopback = bind(_LOOPBACK)
    addresses = [Address(name, address, bind(str(ip_interface(address).ip))) for name, address in usable(config)]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return sockets, Place(f"{boot}/{os.readlink('/proc/self/ns/net')}", addresses, loopback)


def _ports(config: Config) -> range:
    """The ports to try; port 0 is any free one."""
    if not config.ports:
        return range(1)
    first, _, last = config.ports.partition("-")
    try:
        found = range(int(first), int(last or first) + 1)
    except ValueError:
        found = range(0)
    if not found or found[0] < 1 or found[-1] > 65535:
        raise ConfigError(f"XVCOMM_PORTS={config.ports!r}: expected a port, 29600, or a range, 29600-29699")
    return found


def routes(mine: Place, theirs: Place) -> list[Route]:
    """The ways to another process, the preferred ones first: over loopback on one network stack, else of every pair of addresses.

    Addresses of one network belong together. Other interfaces are joined in their order, for routers between the networks.
    """
    if mine.stack == theirs.stack:
        return [Route(_LOOPBACK, _LOOPBACK, theirs.loopback, ("lo", "lo"))]
    here, there = (list(dict.fromkeys(a.interface for a in place.addresses)) for place in (mine, theirs))
    found: list[tuple[tuple[bool, int, int], Route]] = []
    for local in mine.addresses:
        near, position = ip_interface(local.address), here.index(local.interface)
        for remote in theirs.addresses:
            far, apart = ip_interface(remote.address), abs(position - there.index(remote.interface))
            if near.version == far.version:
                both = local.interface, remote.interface
                rank = near.network != far.network, apart, near.version
                found.append((rank, Route(local.host, remote.host, remote.port, both)))
    return [route for _, route in sorted(found, key=lambda pair: pair[0])]
