"""What `xvcomm topo` finds out: where ranks, GPUs and network interfaces are, and how fast the connections between hosts are."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path
from typing import TYPE_CHECKING

from xvcomm.abc.device import Device
from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma import affinity, settings, sysfs
from xvcomm.backends.rdma.cards import open_cards
from xvcomm.backends.rdma.choice import PortChoice
from xvcomm.cli.speeds import measure
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.engine.session.equipment import choose_backend
from xvcomm.types.cluster import Cluster, Host, Nic, Place

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

NET = Path("/sys/class/net")


def place(config: Config, env: Mapping[str, str], rank: int, nics: Sequence[Nic]) -> Place:
    """Where this rank is, what lies between its GPU and the host's interfaces, and which of their devices that uses alone."""
    device = choose_backend(config).device(config)
    able = device.capabilities()
    island = config.island or able.island
    if not isinstance(device, SupportsNicMemory):
        return Place(rank, island, able.kind)
    gpu = device.bus()
    roots = {nic.name: NET if nic.is_interface else sysfs.ROOT for nic in nics}
    distances = {name: affinity.distance(gpu, name, root=root).text for name, root in roots.items()}
    return Place(rank, island, able.kind, gpu, _used(config, env, device, nics), distances)


def _used(config: Config, env: Mapping[str, str], device: Device, nics: Sequence[Nic]) -> list[str]:
    """The RDMA devices that a GPU uses alone, found out as a job does; none where it uses all, or no RDMA."""
    assert isinstance(device, SupportsNicMemory)
    addresses = {str(ip_interface(address).ip): nic.name for nic in nics for address in nic.addresses}
    cards = open_cards(config, addresses, device, env)
    if cards is None:
        return []
    with contextlib.closing(cards):
        if (given := affinity.assigned(config.affinity, device.bus(), config.host or socket.gethostname())) is not None:
            return list(dict.fromkeys(nic.rdma for nic in nics if nic.rdma in given))
        return [grades.device for grades in cards.grades] if cards.has_direct else []


def interfaces(config: Config, env: Mapping[str, str], net: Path = NET, rdma: Path = sysfs.ROOT) -> list[Nic]:
    """This host's network interfaces that are used between hosts, and devices of InfiniBand that are used without one."""
    below = {
        name: (device, port) for device in sysfs.names(rdma) for name, port in sysfs.interfaces(device, rdma).items()
    }
    addresses: dict[str, list[str]] = {}
    for transport in plugins.transports():
        if transport.usable:
            for interface in transport.load().interfaces(config, env):
                if interface.used and interface.address:
                    addresses.setdefault(interface.name, []).append(interface.address)
    gids = _gids(config, env, addresses, rdma)
    found = []
    for name, its in addresses.items():
        device, port = below.get(name, ("", 0))
        where, gid = sysfs.place(name, net), gids.get(device, {}).pop(port, "")
        speed = _gigabits(net / name)
        found.append(Nic(name, [*its, gid] if gid else its, device, where.pcie, where.numa_node, speed))
    for device, ports in gids.items():
        if ports:
            where, speed = sysfs.place(device, rdma), sum(sysfs.gigabits(device, port, rdma) for port in ports)
            found.append(Nic(device, list(ports.values()), device, where.pcie, where.numa_node, speed))
    return found


def _gids(
    config: Config, env: Mapping[str, str], addresses: Mapping[str, Sequence[str]], rdma: Path
) -> dict[str, dict[int, str]]:
    """The GIDs of the ports of InfiniBand that are used, by device and port."""
    if settings.refusal(config, env):
        return {}
    names = {str(ip_interface(address).ip): name for name, its in addresses.items() for address in its}
    choice = PortChoice.of(config, env, names)
    return {device: choice.subnet_ports(device, rdma) for device in sysfs.names(rdma)}


def _gigabits(interface: Path) -> float:
    try:
        return max(0, int((interface / "speed").read_text())) / 1000
    except (OSError, ValueError):  # virtual ones, and those that are down, tell none
        return 0


def survey(comm: Communicator, config: Config, env: Mapping[str, str], seconds: float) -> Cluster | None:
    """The cluster that the ranks of a communicator on host memory are in; None but on rank 0.

    Args:
        seconds: see `measure`; 0 measures nothing.
    """
    nics = interfaces(config, env)
    where = place(config, env, comm.rank, nics)
    mine = config.host or socket.gethostname(), where, nics, bool(config.host or config.island)
    told = comm.all_gather_object(mine)
    members: dict[str, list[int]] = {}
    for rank, host in enumerate(comm.topology.hosts):
        members.setdefault(host, []).append(rank)
    hosts = [
        Host(told[ranks[0]][0], [told[rank][1] for rank in ranks], told[ranks[0]][2]) for ranks in members.values()
    ]
    first = [ranks[0] for ranks in members.values()]
    rails = measure(comm, first, [host.name for host in hosts], seconds) if seconds else []
    found = comm.gather_object(rails)
    if found is None:
        return None
    return Cluster(hosts, list(itertools.chain.from_iterable(found)), any(rehearsal for *_, rehearsal in told))
