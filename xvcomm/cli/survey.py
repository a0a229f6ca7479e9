"""What `xvcomm topo` finds out: where ranks, GPUs and network interfaces are, and how fast the connections between hosts are."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma import affinity, sysfs
from xvcomm.cli.speeds import measure
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.engine.session.equipment import choose_backend
from xvcomm.types.cluster import Cluster, Host, Nic, Place

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

NET = Path("/sys/class/net")


def place(config: Config, rank: int, nics: Sequence[Nic]) -> Place:
    """Where this rank is, and what lies between its GPU and the host's network interfaces."""
    device = choose_backend(config).device(config)
    able = device.capabilities()
    island = config.island or able.island
    if not isinstance(device, SupportsNicMemory):
        return Place(rank, island, able.kind)
    gpu = device.bus()
    used, _ = affinity.nearest(
        gpu, [nic.rdma for nic in nics if nic.rdma], config.affinity, config.host or socket.gethostname()
    )
    distances = {nic.name: affinity.distance(gpu, nic.name, root=NET).text for nic in nics}
    return Place(rank, island, able.kind, gpu, used, distances)


def interfaces(config: Config, env: Mapping[str, str], net: Path = NET, rdma: Path = sysfs.ROOT) -> list[Nic]:
    """The network interfaces of this host that are used between hosts."""
    devices = {name: device for device in sysfs.names(rdma) for name in sysfs.interfaces(device, rdma)}
    addresses: dict[str, list[str]] = {}
    for transport in plugins.transports():
        if transport.usable:
            for interface in transport.load().interfaces(config, env):
                if interface.used and interface.address:
                    addresses.setdefault(interface.name, []).append(interface.address)
    found = []
    for name, its in addresses.items():
        where = sysfs.place(name, net)
        found.append(Nic(name, its, devices.get(name, ""), where.pcie, where.numa_node, _gigabits(net / name)))
    return found


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
    mine = config.host or socket.gethostname(), place(config, comm.rank, nics), nics, bool(config.host or config.island)
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
