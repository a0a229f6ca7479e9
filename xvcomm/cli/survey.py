"""What `xvcomm topo` finds out: where ranks, GPUs and network interfaces are, and how fast the connections between hosts are."""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from xvcomm.abc.nic_memory import SupportsNicMemory
from xvcomm.backends.rdma import affinity, sysfs
from xvcomm.config import Config
from xvcomm.engine.session import plugins
from xvcomm.engine.session.equipment import choose_backend
from xvcomm.types.cluster import Cluster, Host, Nic, Place, Rail

if TYPE_CHECKING:
    from xvcomm.comm.communicator import Communicator

NET = Path("/sys/class/net")
_NBYTES = 16 << 20
"""Size of the messages that are timed: large ones, since a slow connection carries little of others."""
_MEET_SECONDS = 1.0
"""How long a pair of hosts sends before it is measured: connections come up meanwhile."""


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
        seconds: that each direction between two hosts is measured for; 0 measures nothing.
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


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of so many, in rounds in which each is in one pair at most."""
    circle: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], circle[::-1], strict=False)
        yield [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]


def measure(comm: Communicator, first: Sequence[int], names: Sequence[str], seconds: float) -> list[Rail]:
    """The connections from this rank's host to the others, with their speeds; all ranks call it.

    Args:
        first: the rank of each host that measures.
    """
    found: list[Rail] = []
    for pairs in rounds(len(first)):
        comm.barrier()
        for pair in pairs:
            if comm.rank in (first[pair[0]], first[pair[1]]):
                found += _pair(comm, *pair, first, names, seconds)
    return found


def _pair(
    comm: Communicator, low: int, high: int, first: Sequence[int], names: Sequence[str], seconds: float
) -> list[Rail]:
    """One direction after the other; the connections of the one in which this rank sends."""
    found: list[Rail] = []
    for source, target in ((low, high), (high, low)):
        if comm.rank == first[target]:
            _receive(comm, first[source])
            _receive(comm, first[source])
            continue
        other = first[target]
        _send(comm, other, _MEET_SECONDS)
        before = {(r.scheme, r.local, r.remote, r.number): r.sent for r in comm.rails() if r.rank == other}
        took = _send(comm, other, seconds)
        for rail in comm.rails():
            if rail.rank == other:
                sent = rail.sent - before.get((rail.scheme, rail.local, rail.remote, rail.number), 0)
                speed = sent / took
                found.append(Rail(names[source], names[target], rail.local, rail.remote, rail.scheme, speed))
    return merged(found)


def merged(rails: Sequence[Rail]) -> list[Rail]:
    """Connections between the same addresses as one, which is as fast as all of them."""
    speeds: dict[tuple[str, str, str, str, str], float] = {}
    for rail in rails:
        key = rail.source, rail.target, rail.local, rail.remote, rail.scheme
        speeds[key] = speeds.get(key, 0.0) + rail.speed
    return [Rail(*key, speed) for key, speed in speeds.items()]


def _send(comm: Communicator, other: int, seconds: float) -> float:
    """Send for some seconds; how long it took until all had arrived."""
    data, more = np.zeros(_NBYTES, np.uint8), np.ones(1, np.uint8)
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        comm.send(more, other)
        comm.send(data, other)
    comm.send(np.zeros(1, np.uint8), other)
    comm.recv(more, other)
    return time.monotonic() - begin


def _receive(comm: Communicator, other: int) -> None:
    """Receive until the other side says that nothing more comes."""
    data, more = np.empty(_NBYTES, np.uint8), np.empty(1, np.uint8)
    while comm.recv(more, other)[0]:
        comm.recv(data, other)
    comm.send(more, other)
