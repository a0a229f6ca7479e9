"""The network interfaces of this host that wires use, and the routes to those of another."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from ipaddress import ip_address, ip_interface, ip_network
from pathlib import Path

import msgspec
import psutil

from xvcomm.config import Config
from xvcomm.errors import ConfigError, ResourceError
from xvcomm.wire.route import Route

_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"
_OTHERS: dict[str, Callable[[str], str]] = {
    "NCCL_SOCKET_IFNAME": lambda text: text.replace("=", ""),
    "GLOO_SOCKET_IFNAME": lambda text: text,
    "UCX_NET_DEVICES": lambda text: ",".join(part.partition(":")[0] for part in text.split(",") if part != "all"),
}
"""Other libraries' variables for the same, and how to read them."""


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
    """Name and address, with prefix length, of the interfaces that wires may use.

    `XVCOMM_NICS` chooses: names, beginnings of names, addresses, networks; `^` before the list excludes what it names. Else
    NCCL's, Gloo's or UCX's variable does. Else all that are up count, but loopback, bridges and link-local addresses.

    Raises:
        ConfigError: no interface is left.
    """
    chosen, variable = config.nics, "XVCOMM_NICS"
    if not chosen:
        variable = next((other for other in _OTHERS if env.get(other)), variable)
        chosen = _OTHERS[variable](env[variable]) if variable in _OTHERS else None
    found = [(name, address) for name, address in _up() if not chosen and _plain(name, address)]
    if chosen:
        excludes, names = chosen.startswith("^"), chosen.removeprefix("^").split(",")
        found = [
            (name, address)
            for name, address in _up()
            if any(_named(name, address, text.strip()) for text in names) != excludes
            and (not excludes or _plain(name, address))
        ]
        if not found:
            have = ", ".join(f"{name} ({address})" for name, address in _up())
            raise ConfigError(f"{variable}={chosen!r} leaves no network interface; there are {have}")
    return found


def _up() -> Iterator[tuple[str, str]]:
    """Every address of every interface that is up."""
    state = {name: found.flags.split(",") for name, found in psutil.net_if_stats().items()}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for found in addresses:
            # Not `isup`, which is false for a moment where an interface was just switched on.
            if "up" in state.get(name, []) and found.family in (socket.AF_INET, socket.AF_INET6) and found.netmask:
                yield name, _with_prefix(found.address.partition("%")[0], found.netmask)


def _with_prefix(address: str, netmask: str) -> str:
    bits = bin(int(ip_address(netmask.partition("/")[0]))).count("1")
    return f"{address}/{bits}"


def _plain(name: str, address: str) -> bool:
    """Whether an address counts where nothing was chosen."""
    ip = ip_interface(address).ip
    return not (ip.is_loopback or ip.is_link_local or Path("/sys/class/net", name, "bridge").exists())


def _named(name: str, address: str, text: str) -> bool:
    """Whether a part of a choice means this address."""
    if name.startswith(text):
        return True
    try:
        return ip_interface(address).ip in ip_network(text, strict=False)
    except ValueError:
        return False


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
    """The rails to another process: over loopback on one network stack; else each interface with one of the other's.

    Addresses of one network belong together. What is left over then is joined in order, for routers between the networks.
    """
    if mine.stack == theirs.stack:
        return [Route(_LOOPBACK, _LOOPBACK, theirs.loopback)]
    ours, others, found = list(mine.addresses), list(theirs.addresses), list[Route]()
    for same_network in (True, False):
        for local in list(ours):
            here = ip_interface(local.address)
            for remote in others:
                there = ip_interface(remote.address)
                if here.version == there.version and (not same_network or here.network == there.network):
                    found.append(Route(local.host, remote.host, remote.port))
                    ours.remove(local)
                    others.remove(remote)
                    break
    return found
