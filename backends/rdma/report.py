"""Which RDMA devices this host has, whether xvcomm uses each port between hosts, and what to do where it does not."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_interface
from pathlib import Path

from xvcomm.abc.transport import Interface
from xvcomm.backends.rdma import devices, settings, sysfs
from xvcomm.backends.rdma.choice import PortChoice
from xvcomm.backends.rdma.devices import Gid, Port
from xvcomm.backends.rdma.gids import flid, gid_of, partition, routed_gid, subnet_gid
from xvcomm.backends.rdma.library import REGISTERING
from xvcomm.config import Config
from xvcomm.errors import ResourceError, XvcommError
from xvcomm.types.subnets import prefix

LEAST_LOCKED = 64 << 20
"""Bytes that a process must be allowed to register, for the rings to a few ranks."""

_IPC_LOCK = 14
"""CAP_IPC_LOCK."""
_EVERY_USER = "4294967295"
_PASS_IN = "pass them in: --device=/dev/infiniband --ulimit memlock=-1 --network=host"


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why xvcomm does not use something, and what to do; the remedy is empty where the reason includes it."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class GidReport:
    """A GID of a port, and the network interface and address that it belongs to."""

    index: int
    version: str
    interface: str
    address: str


@dataclass(frozen=True, slots=True)
class PortReport:
    """A port; `mtu` is 0 where it is not known. `interfaces`: for which addresses, or as which LID, it carries between hosts."""

    number: int
    state: str
    link: str
    mtu: int
    lid: int
    gids: list[GidReport]
    interfaces: list[str]
    obstacles: list[Obstacle]


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device; used between hosts if one of its ports is. The rest is of `sysfs.Place`."""

    name: str
    pcie: str
    numa_node: int
    firmware: str
    card: str
    ports: list[PortReport]
    used: bool
    obstacles: list[Obstacle]


def examine(
    config: Config, env: Mapping[str, str], interfaces: Sequence[Interface], root: Path = sysfs.ROOT
) -> list[DeviceReport]:
    """All devices that the kernel or libibverbs knows; none if there is none, whatever else is missing.

    Args:
        interfaces: all of this host, and whether they are used between hosts.
    """
    refused = devices.refusal()
    listed = set() if refused else set(devices.names())
    found = sorted(listed | set(sysfs.names(root)))
    missing = [Obstacle(*refused)] if refused and refused != devices.NONE else []
    unwanted = settings.refusal(config, env)
    general = [*([Obstacle(unwanted, "")] if unwanted else []), *locked()]
    choice = PortChoice.of(config, env, {_host(i): i.name for i in interfaces if i.used and i.address})
    key = config.rdma_partition_key
    return [
        _device(name, name in listed, missing, general, _Ports(name, interfaces, choice, key, root)) for name in found
    ]


def _device(
    name: str, listed: bool, missing: list[Obstacle], general: list[Obstacle], examined: _Ports
) -> DeviceReport:
    obstacles, root = [*missing, *general], examined.root
    ports = sysfs.ports(name, root)
    if not missing:
        if listed:
            try:
                _open(name)
                ports = devices.ask(name).ports
            except XvcommError as error:
                obstacles.append(Obstacle(str(error), ""))
        else:
            obstacles.append(_not_listed(name, root))
    reports = [examined.report(port) for port in ports]
    where = sysfs.place(name, root)
    used = not obstacles and any(port.interfaces for port in reports)
    return DeviceReport(name, where.pcie, where.numa_node, where.firmware, where.card, reports, used, obstacles)


def _open(name: str) -> None:
    """Open a device as queue pairs do, which checks libibverbs' layout."""
    from xvcomm.backends.rdma.pairs import Domain  # loads numba, which a host without devices need not

    Domain(name).close()


def _not_listed(name: str, root: Path) -> Obstacle:
    """Why libibverbs does not list a device that the kernel has."""
    node = sysfs.node_file(name, root)
    if node is None:
        return Obstacle(f"the kernel offers {name} to no process", "modprobe ib_uverbs")
    if not node.exists():
        return Obstacle(f"{node} of {name} is missing", f"modprobe ib_uverbs; in containers {_PASS_IN}")
    if not os.access(node, os.R_OK | os.W_OK):
        return Obstacle(f"this user may not open {node} of {name}", f"chmod a+rw {node}, or udev's rules of rdma-core")
    return Obstacle(f"libibverbs has no provider for {name}", "apt-get install ibverbs-providers")


@dataclass(frozen=True, slots=True)
class _Ports:
    """Examines the ports of a device, see `examine`."""

    device: str
    interfaces: Sequence[Interface]
    choice: PortChoice
    key: int | None
    root: Path

    def report(self, port: Port) -> PortReport:
        obstacles = _unable(port)
        try:
            partition(self.device, port.number, self.key, self.root)
        except ResourceError as error:
            obstacles.append(Obstacle(str(error), ""))
        if port.link == "InfiniBand":
            return self._of_subnet(port, obstacles)
        own = [] if obstacles else self._own(port)
        if not obstacles and not own:
            what = f"no network interface has an address that belongs to port {port.number}"
            obstacles.append(Obstacle(what, "give its network interface an address"))
        if not any(interface.used for interface in own):
            obstacles += [Obstacle(f"{_named(i)} is not used: {i.reason}", "XVCOMM_NICS chooses others") for i in own]
        return _report(port, [_named(interface) for interface in own if interface.used], obstacles)

    def _of_subnet(self, port: Port, obstacles: list[Obstacle]) -> PortReport:
        """A port of InfiniBand, which needs no address."""
        gid, (used, why) = subnet_gid(port), self.choice.judge(self.device, port.number, self.root)
        if not obstacles and not used:
            obstacles = [Obstacle(f"port {port.number} is not used: {why}", "XVCOMM_NICS chooses others")]
        if gid is None or obstacles:
            return _report(port, [], obstacles)
        routed = routed_gid(port)
        over_routers = f", FLID {flid(routed.value)} from others" if routed else ""
        return _report(port, [f"LID {port.lid} of subnet {prefix(gid.address)}{over_routers}"], [])

    def _own(self, port: Port) -> list[Interface]:
        """The network interfaces' addresses that a port serves."""
        return [
            interface
            for interface in self.interfaces
            if interface.address and gid_of(port, _host(interface)) is not None
        ]


def _host(interface: Interface) -> str:
    return str(ip_interface(interface.address).ip)


def _named(interface: Interface) -> str:
    return f"{interface.name} ({_host(interface)})"


def _unable(port: Port) -> list[Obstacle]:
    """Why a port cannot be used at all."""
    obstacles = []
    if port.state != "active":
        what = "plug the cable in, and start the subnet manager" if port.link == "InfiniBand" else "plug the cable in"
        up = "" if port.link == "InfiniBand" else f", and `ip link set {_interface(port) or 'INTERFACE'} up`"
        obstacles.append(Obstacle(f"port {port.number} is {port.state}", what + up))
    if port.link == "Ethernet" and not any(gid.version == "RoCE v2" for gid in port.gids):
        remedy = "give its network interface an address; in containers --network=host"
        obstacles.append(Obstacle(f"port {port.number} has no GID of RoCE v2", remedy))
    elif not port.gids:
        obstacles.append(Obstacle(f"port {port.number} has no GID", "start the subnet manager"))
    elif port.link == "InfiniBand" and not port.lid:
        obstacles.append(Obstacle(f"port {port.number} has no LID", "start the subnet manager"))
    return obstacles


def _report(port: Port, serves: list[str], obstacles: list[Obstacle]) -> PortReport:
    gids = [_gid(gid) for gid in port.gids]
    return PortReport(port.number, port.state, port.link, port.mtu, port.lid, gids, serves, obstacles)


def _interface(port: Port) -> str:
    return next((gid.interface for gid in port.gids if gid.interface), "")


def _gid(gid: Gid) -> GidReport:
    return GidReport(gid.index, gid.version, gid.interface, gid.address)


def locked() -> list[Obstacle]:
    """Whether the limit of locked memory is too low, which counts for those without CAP_IPC_LOCK in the first user namespace."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_LOCKED or may_lock_all():
        return []
    room = f"only {soft >> 10} KiB of memory may be registered (RLIMIT_MEMLOCK), rings need {LEAST_LOCKED >> 20} MiB and more"
    return [Obstacle(room, REGISTERING)]


def may_lock_all(process: Path = Path("/proc/self")) -> bool:
    """Whether a process has CAP_IPC_LOCK in the first user namespace: then no limit counts."""
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    namespace = (process / "uid_map").read_text().split()
    return bool(int(fields["CapEff"], 16) >> _IPC_LOCK & 1) and namespace == ["0", "0", _EVERY_USER]
