"""What rank 0 knows of the job's ranks, and which of them the parts that go by pairs take."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import msgspec

SMALL = 16
"""Jobs of up to this size are checked as a whole. In larger ones all checks run in groups, and small ones as a whole."""

GROUP = 16
"""Ranks of a group in larger jobs."""

_SAMPLED = 64
"""Ranks of a larger job, evenly over it, from which pairs are taken."""

MOST_PAIRS = 12
"""Pairs that are measured."""

MOST_HOSTS = 4
"""Hosts between which rails are tried, two by two."""

MOST_CHILDREN = 4
"""Ranks of the jobs that sections start for themselves."""


class Facts(msgspec.Struct, frozen=True):
    """What a rank tells of itself.

    Attributes:
        hostname: of its machine.
        host: its label as xvcomm has it: ranks with equal ones share memory.
        kind, device: type and name of its device.
        gpu: address of its GPU on its machine; empty on host memory.
        island: label of its island.
        rehearsal: whether labels of islands or hosts are the user's.
        asynchronous: whether its operations run asynchronously to the host.
        native: name and version of its native library.
        versions: of xvcomm, Python, and the packages of its vendor.
        pid: of its process.
        graphs: whether graphs of its device can be captured here.
        torch: why torch cannot train on its device; empty if it can.
        memory: whether bench has memory of its own for the device, which other libraries need.
        rdma: whether its machine has RDMA devices.
    """

    hostname: str
    host: str
    kind: str
    device: str
    gpu: str
    island: str
    rehearsal: bool
    asynchronous: bool
    native: str
    versions: dict[str, str]
    pid: int
    graphs: bool
    torch: str
    memory: bool
    rdma: bool


class Pair(msgspec.Struct, frozen=True):
    """Two ranks, and what lies between them."""

    a: int
    b: int
    hop: str


class Job(msgspec.Struct, frozen=True):
    """The job as all ranks know it, from rank 0.

    Attributes:
        quick: whether few sizes are enough.
        size: of the job.
        kinds: types of its devices.
        asynchronous: whether any device is.
        graphs: whether graphs can be captured on all.
        torch: why torch cannot train on all devices, or an empty text.
        memory: whether all devices have memory for other libraries.
        own_devices: whether no two ranks share a GPU.
        rdma: whether all machines have RDMA devices.
        largest: ranks of the largest island.
        machines: number of machines.
        hosts: one rank of each host, of the first few.
        pairs: that are measured, each kind of hop among them.
        every_pair: number of pairs that there are.
        children: ranks that take part in jobs of their own.
    """

    quick: bool
    size: int
    kinds: list[str]
    asynchronous: bool
    graphs: bool
    torch: str
    memory: bool
    own_devices: bool
    rdma: bool
    largest: int
    machines: int
    hosts: list[int]
    pairs: list[Pair]
    every_pair: int
    children: list[int]

    @classmethod
    def of(cls, facts: Sequence[Facts], quick: bool) -> Job:
        """The job of these ranks."""
        size = len(facts)
        first: dict[str, int] = {}
        for rank, each in enumerate(facts):
            first.setdefault(each.host, rank)
        return cls(
            quick=quick,
            size=size,
            kinds=sorted({each.kind for each in facts}),
            asynchronous=any(each.asynchronous for each in facts),
            graphs=all(each.graphs for each in facts),
            torch=next((f"rank {rank}: {each.torch}" for rank, each in enumerate(facts) if each.torch), ""),
            memory=all(each.memory for each in facts),
            own_devices=len({(each.hostname, each.gpu) for each in facts}) == size,
            rdma=all(each.rdma for each in facts),
            largest=max(Counter(each.island for each in facts).values()),
            machines=len({each.hostname for each in facts}),
            hosts=list(first.values())[:MOST_HOSTS],
            pairs=sample(facts),
            every_pair=size * (size - 1) // 2,
            children=children(facts),
        )

    @property
    def spread(self) -> bool:
        """Whether it has several hosts."""
        return len(self.hosts) > 1

    @property
    def host_only(self) -> bool:
        """Whether all ranks are on host memory, where xvcomm's own reductions round once."""
        return self.kinds == ["host"]

    def group_of(self, rank: int) -> list[int]:
        """The ranks that a rank is checked with: all of a small job; else some of all over the job, for islands and hosts
        are ranks one after the other.
        """
        if self.size <= SMALL:
            return list(range(self.size))
        groups = self.size // GROUP
        return list(range(rank % groups, self.size, groups))


def hop(a: Facts, b: Facts) -> str:
    """What lies between two ranks."""
    kinds = " and ".join(sorted({a.kind, b.kind}))
    if a.host != b.host:
        return f"between hosts, {kinds}"
    return f"{'in an island' if a.island == b.island else 'at a border'}, {kinds}"


def sample(facts: Sequence[Facts], most: int = MOST_PAIRS) -> list[Pair]:
    """Some pairs of ranks, the kinds of hops in turns; from ranks that are evenly over the job where it is large."""
    ranks = range(0, len(facts), max(1, len(facts) // _SAMPLED))
    by_hop: dict[str, list[Pair]] = {}
    for a, b in itertools.combinations({*ranks, *range(min(len(facts), 2))}, 2):
        pair = Pair(min(a, b), max(a, b), hop(facts[a], facts[b]))
        by_hop.setdefault(pair.hop, []).append(pair)
    turns = itertools.zip_longest(*by_hop.values())
    return [pair for turn in turns for pair in turn if pair is not None][:most]


def children(facts: Sequence[Facts]) -> list[int]:
    """Ranks of as many islands and hosts as a small job can have, in order."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(facts):
        by_place.setdefault((each.host, each.island), []).append(rank)
    turns = itertools.zip_longest(*by_place.values())
    return sorted([rank for turn in turns for rank in turn if rank is not None][:MOST_CHILDREN])
