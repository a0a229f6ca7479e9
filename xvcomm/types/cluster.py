"""The hosts of a job with their ranks, GPUs and network interfaces: what `xvcomm topo` draws, and writes to a file."""

from __future__ import annotations

import msgspec

FORMAT = 1


class Nic(msgspec.Struct, frozen=True):
    """A network interface that is used between hosts, or a device of InfiniBand that is used without one.

    Attributes:
        name: `eth0`; of a device without interface `mlx5_0`.
        addresses: of it, and the GIDs of its ports of InfiniBand.
        rdma: its RDMA device, `mlx5_0`; empty if it has none.
        pcie: its PCIe address; empty for software devices.
        numa_node: that it is near to; -1 if the kernel does not know.
        gigabits: in Gbit/s by its driver, of a device without interface those of its ports; 0 if that tells none.
    """

    name: str
    addresses: list[str]
    rdma: str = ""
    pcie: str = ""
    numa_node: int = -1
    gigabits: float = 0

    @property
    def is_interface(self) -> bool:
        """Whether it is a network interface, and not a device without one."""
        return self.name != self.rdma


class Place(msgspec.Struct, frozen=True):
    """A rank.

    Attributes:
        rank: its number.
        island: its label.
        device: `cuda`, `rocm` or `host`.
        pcie: address of its GPU; empty on host memory.
        nics: RDMA devices that its GPU uses alone; none where it uses all. In a file for XVCOMM_AFFINITY: that it shall use.
        distances: what lies between its GPU and each network interface, by its name.
    """

    rank: int
    island: str
    device: str
    pcie: str = ""
    nics: list[str] = []  # msgspec copies it
    distances: dict[str, str] = {}


class Host(msgspec.Struct, frozen=True):
    """A host of the job."""

    name: str
    ranks: list[Place]
    nics: list[Nic]


class Rail(msgspec.Struct, frozen=True):
    """The connections of one kind from an address of a host to one of another host.

    Attributes:
        source, target: names of the hosts.
        local, remote: the addresses.
        scheme: `tcp` or `rdma`.
        speed: bytes a second that they carried while they alone did.
        share: the same while all connections between the hosts carried; None in older files, whose `speed` it is.
    """

    source: str
    target: str
    local: str
    remote: str
    scheme: str
    speed: float
    share: float | None = None


class Cluster(msgspec.Struct, frozen=True):
    """All hosts, and the connections between them.

    Attributes:
        rehearsal: whether labels made islands or hosts.
    """

    hosts: list[Host]
    rails: list[Rail] = []
    rehearsal: bool = False
    format: int = FORMAT


_DECODER = msgspec.json.Decoder(Cluster)


def read(text: bytes) -> Cluster:
    """A topology file.

    Raises:
        ValueError: it is none, or of another version.
    """
    found = _DECODER.decode(text)
    if found.format != FORMAT:
        raise ValueError(f"the file has format {found.format}, and this version of xvcomm reads format {FORMAT}")
    return found


def write(cluster: Cluster) -> bytes:
    """The cluster as a topology file, to be read and edited by people too."""
    return msgspec.json.format(msgspec.json.encode(cluster), indent=2) + b"\n"
