"""The network interfaces of this host that wires use, and the routes to those of another."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path

import msgspec

from xvcomm.backends.tcp import choice
from xvcomm.config import Config
from xvcomm.errors import ConfigError, ResourceError
from xvcomm.types.route import MAX_RAILS, RDMA, Route
from xvcomm.types.subnets import SubnetPort
from xvcomm.wire.congestion import unpace
from xvcomm.wire.reachability import disjoint

_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"
_NET = Path("/sys/class/net")
_CONNECTION_MEGABITS = 20_000
"""What one connection carries at least, on one core."""
_JOINING = 4
"""Over how many connections, one after the other, ports of InfiniBand may be joined."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """An address on which a process listens.

    Attributes:
        interface: name of the network interface.
        address: with the length of the network's prefix, `10.0.0.7/24`.
        port: on which it listens.
        rdma: whether an RDMA device in use belongs to it.
    """

    interface: str
    address: str
    port: int
    rdma: bool = False

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
        ports: those of InfiniBand that are in use.
    """

    stack: str
    addresses: list[Address]
    loopback: int
    ports: list[SubnetPort] = []

    def with_rdma(self, reaches: Callable[[str], bool], ports: Sequence[SubnetPort] = ()) -> Place:
        """The same, with the addresses that RDMA devices serve, and ports of InfiniBand."""
        addresses = [msgspec.structs.replace(address, rdma=reaches(address.host)) for address in self.addresses]
        return msgspec.structs.replace(self, addresses=addresses, ports=list(ports))

    def interfaces(self, rdma: bool = False) -> list[str]:
        """Names of the interfaces in use, in their order; or of those with RDMA."""
        return list(dict.fromkeys(address.interface for address in self.addresses if address.rdma or not rdma))


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
    """Listen on the interfaces in use and on loopback, and nowhere else; on one port, if `XVCOMM_PORTS` is set.

    Raises:
        ResourceError: no port is free.
        ConfigError: see `usable`; or the ports are no numbers; or the system refuses `XVCOMM_TCP_CONGESTION`.
    """
    found = usable(config)
    sockets = _bind([_LOOPBACK, *(str(ip_interface(address).ip) for _, address in found)], config)
    if config.tcp_congestion:
        _choose_congestion(sockets, config.tcp_congestion)
    else:
        for listener in sockets:
            unpace(listener)
    loopback, *ports = (int(listener.getsockname()[1]) for listener in sockets)
    addresses = [Address(name, address, port) for (name, address), port in zip(found, ports, strict=True)]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return sockets, Place(f"{boot}/{os.readlink('/proc/self/ns/net')}", addresses, loopback)


def _bind(hosts: Sequence[str], config: Config) -> list[socket.socket]:
    """Listen on all these addresses, on the first port that is free on each of them."""
    why = ""
    for port in config.port_range():
        sockets: list[socket.socket] = []
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                sockets.append(socket.create_server((host, port), family=family, backlog=_BACKLOG))
            except OSError as error:
                why = f"{host}, XVCOMM_PORTS={config.ports}: {error.strerror}"
                break
        else:
            return sockets
        for listener in sockets:
            listener.close()
    raise ResourceError(f"cannot listen on {why}; allow more ports")


def _choose_congestion(sockets: Sequence[socket.socket], congestion: str) -> None:
    """Choose the congestion control of connections that are accepted here."""
    try:
        for listener in sockets:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    except OSError as error:
        for listener in sockets:
            listener.close()
        why = f"XVCOMM_TCP_CONGESTION={congestion}: {error.strerror}"
        with contextlib.suppress(OSError):
            allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
            why += f"; this system lets every user choose {', '.join(allowed)}"
        raise ConfigError(why) from error


def routes(mine: Place, theirs: Place, threads: int = 1, pairs: int = 1) -> list[Route]:
    """The ways to another process, the preferred ones first: over loopback on one network stack, else of every pair of addresses.

    Addresses of one network belong together. Other interfaces are joined in their order, for routers between the networks. A
    fast interface has several connections, at most one for each of the threads that carry.

    Where both hosts have RDMA, an interface has one connection, and those with RDMA have up to so many pairs of queues as well.
    So have ports of InfiniBand, see `_between_ports`.
    """
    if mine.stack == theirs.stack:
        return [
            Route(_LOOPBACK, _LOOPBACK, theirs.loopback, ("lo", "lo"), number)
            for number in range(min(threads, MAX_RAILS))
        ]
    here, there = mine.interfaces(), theirs.interfaces()
    rdma = _rdma(mine, theirs, pairs)
    most = 1 if rdma else max(1, min(threads, MAX_RAILS // max(1, len(here))))
    found: list[tuple[tuple[bool, int, int], Route]] = []
    behind: list[tuple[tuple[bool, int, int], Route]] = []
    for local in mine.addresses:
        near, position = ip_interface(local.address), here.index(local.interface)
        for remote in theirs.addresses:
            far, apart = ip_interface(remote.address), abs(position - there.index(remote.interface))
            if near.version == far.version:
                rank = near.network != far.network, apart, near.version
                route = Route(local.host, remote.host, remote.port, (local.interface, remote.interface))
                for number in range(min(most, _connections(local.interface))):
                    found.append((rank, route._replace(number=number)))
                for number in range(rdma.get(local.interface, 0) if local.rdma and remote.rdma else 0):
                    behind.append((rank, route._replace(number=RDMA + number)))
    first, second = ([route for _, route in sorted(ways, key=lambda way: way[0])] for ways in (found, behind))
    return [*first, *second, *_between_ports(mine, theirs, first, rdma)]


def _between_ports(
    mine: Place, theirs: Place, connections: Sequence[Route], pairs: Mapping[str, int]
) -> list[Route]:  # fmt: skip
    """The ways between ports of InfiniBand: of one subnet first, then in their order.

    Each may be joined over one of several connections, whichever can be had. Ports of different subnets are tried behind all
    others, over one connection: if no routers join them the devices refuse them, which tells the reason.

    Args:
        connections: routes over TCP, the preferred ones first.
        pairs: pairs of queues of each port.
    """
    ways = list(dict.fromkeys(route for route in connections if route.number == 0))
    ways = list(dict.fromkeys([*disjoint(ways), *ways]))[:_JOINING]
    found = []
    for (position, near), (place, far) in itertools.product(enumerate(mine.ports), enumerate(theirs.ports)):
        apart = not near.shares_subnet(far)
        for number in range(pairs.get(near.name, 0)):
            for turn, way in enumerate(ways[:1] if apart else ways):
                route = Route(near.gid, far.gid, way.port, (near.name, far.name), RDMA + number, way.hosts)
                found.append(((apart, abs(position - place), turn), route))
    return [route for _, route in sorted(found, key=lambda way: way[0])]


def _rdma(mine: Place, theirs: Place, pairs: int) -> dict[str, int]:
    """How many pairs of queues each interface with RDMA has, and each port of InfiniBand, if both sides have such.

    Beside a connection of each interface there must be room for them. If there is not for all, the first ones have them.
    """
    here, there = [], []
    if mine.ports and theirs.ports:
        here, there = [port.name for port in mine.ports], [port.name for port in theirs.ports]
    if mine.interfaces(rdma=True) and theirs.interfaces(rdma=True):
        here, there = mine.interfaces(rdma=True) + here, theirs.interfaces(rdma=True) + there
    count = len(there)
    room = max(0, MAX_RAILS - min(len(mine.interfaces()), len(theirs.interfaces())))
    each = min(pairs, max(1, room // max(1, min(len(here), count))))
    return dict.fromkeys(here[:room], each) if count else {}


def _connections(interface: str) -> int:
    """How many connections fill an interface; as many as there may be if the kernel does not know its speed."""
    try:
        megabits = int((_NET / interface / "speed").read_text())
    except (OSError, ValueError):
        megabits = -1
    return -(-megabits // _CONNECTION_MEGABITS) if megabits > 0 else MAX_RAILS
