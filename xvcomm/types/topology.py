"""The ranks of a communicator, the hosts they run on, and the islands they form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xvcomm.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank publishes about itself when it joins.

    Attributes:
        rank: number in the communicator, 0 to size - 1.
        host: identifies the host: boot id and shared-memory namespace.
        hostname: host name for messages.
        device: device type: `host`, `cuda` or `rocm`.
        island: label of the island; ranks with equal labels form one island.
        rehearsal: whether the user gave the label; False if it was detected.
    """

    rank: int
    host: str
    hostname: str
    pid: int
    device: str
    island: str
    rehearsal: bool = False


@dataclass(frozen=True, slots=True)
class Island:
    """Ranks that one native library can join; `ranks` is in ascending order."""

    index: int
    label: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """Ranks 0 to size - 1 grouped into islands, which are ordered by their lowest rank. Hashable, as a key of cached plans.

    Attributes:
        islands: every rank is in exactly one.
        hosts: a host label for each rank.
    """

    islands: tuple[Island, ...]
    hosts: tuple[str, ...]
    _where: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        where: dict[int, tuple[int, int]] = {}
        for island in self.islands:
            for local, rank in enumerate(island.ranks):
                where[rank] = (island.index, local)
        if sorted(where) != list(range(len(self.hosts))) or sum(i.size for i in self.islands) != len(self.hosts):
            raise ArgumentError("islands must contain every rank from 0 to size - 1 exactly once")
        object.__setattr__(self, "_where", tuple(where[r] for r in range(len(where))))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.islands, self.hosts))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def homogeneous(self) -> bool:
        """Whether all ranks are in one island."""
        return len(self.islands) == 1

    @property
    def spread(self) -> bool:
        """Whether an island has ranks on several hosts."""
        return any(len({self.hosts[rank] for rank in island.ranks}) > 1 for island in self.islands)

    def island_of(self, rank: int) -> Island:
        """The island of `rank`."""
        return self.islands[self._where[rank][0]]

    def local(self, rank: int) -> int:
        """Index of `rank` within its island."""
        return self._where[rank][1]

    @classmethod
    def from_labels(cls, labels: Sequence[str], hosts: Iterable[str] | None = None) -> Topology:
        """Group ranks with equal labels into islands.

        Args:
            labels: a label for each rank, in any order: `("cuda", "rocm", "cuda")` gives the islands (0, 2) and (1,).
            hosts: a host label for each rank; by default all ranks are on one host.
        """
        members: dict[str, list[int]] = {}
        for rank, label in enumerate(labels):
            members.setdefault(label, []).append(rank)
        islands = tuple(Island(i, label, tuple(ranks)) for i, (label, ranks) in enumerate(members.items()))
        return cls(islands, tuple(hosts) if hosts is not None else ("host",) * len(labels))


def check_kinds(labels: Sequence[str], kinds: Sequence[str]) -> None:
    """Raise ArgumentError if ranks with the same label have different device types.

    Args:
        labels, kinds: island label and device type of each rank.
    """
    found: dict[str, str] = {}
    for label, kind in zip(labels, kinds, strict=True):
        if found.setdefault(label, kind) != kind:
            raise ArgumentError(
                f"island {label!r} contains ranks on {found[label]} and on {kind}, which no native library can join; "
                "give them different labels (XVCOMM_ISLAND)"
            )


def parse_islands(text: str) -> tuple[str, ...]:
    """Parse the argument of `xvcomm run --islands`: `"cuda:2,rocm:2"` gives a label for each rank, in rank order.

    Raises:
        ArgumentError: the text is not a list of `label:count`.
    """
    labels: list[str] = []
    for part in text.split(","):
        label, colon, count = part.strip().partition(":")
        if not label or (colon and not (count.isdigit() and int(count) > 0)):
            raise ArgumentError(f"islands {text!r}: expected label:count[,label:count...], for instance cuda:2,rocm:2")
        labels += [label] * (int(count) if colon else 1)
    return tuple(labels)
