"""Who takes part: ranks, the hosts they run on and the islands they form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from xvcomm.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What a rank tells the others about itself when it joins.

    Attributes:
        rank: number in the communicator, 0 to size - 1.
        host: what tells hosts apart (boot id and shared-memory namespace).
        hostname: for messages.
        pid: process id on that host.
        device: kind of its memory: `host`, `cuda`, `rocm`.
        island: label of what it can join natively; equal labels form one island.
        rehearsal: whether the label was given by hand rather than found.
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
    """The ranks that one native library can join; `ranks` are in ascending order."""

    index: int
    label: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Topology:
    """Ranks 0 to size - 1 in islands, ordered by each island's lowest rank. Hashable: plans are cached by it.

    Attributes:
        islands: every rank lies in exactly one.
        hosts: a label a rank.
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
            raise ArgumentError("islands must hold every rank from 0 to size - 1 exactly once")
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
        """Whether one native library joins all ranks."""
        return len(self.islands) == 1

    def island_of(self, rank: int) -> Island:
        """The island that holds `rank`."""
        return self.islands[self._where[rank][0]]

    def local(self, rank: int) -> int:
        """Place of `rank` among the ranks of its island."""
        return self._where[rank][1]

    @classmethod
    def from_labels(cls, labels: Sequence[str], hosts: Iterable[str] | None = None) -> Topology:
        """The topology in which ranks with equal labels form an island.

        Args:
            labels: one a rank, any order: `("cuda", "rocm", "cuda")` gives the islands (0, 2) and (1,).
            hosts: one a rank; all on one host if left out.
        """
        members: dict[str, list[int]] = {}
        for rank, label in enumerate(labels):
            members.setdefault(label, []).append(rank)
        islands = tuple(Island(i, label, tuple(ranks)) for i, (label, ranks) in enumerate(members.items()))
        return cls(islands, tuple(hosts) if hosts is not None else ("host",) * len(labels))

    @classmethod
    def from_infos(cls, infos: Sequence[RankInfo]) -> Topology:
        """The topology of ranks that told about themselves, in rank order."""
        return cls.from_labels([i.island for i in infos], [i.host for i in infos])


def check_kinds(labels: Sequence[str], kinds: Sequence[str]) -> None:
    """Raise ArgumentError if an island holds ranks on unlike kinds of device; both one a rank."""
    found: dict[str, str] = {}
    for label, kind in zip(labels, kinds, strict=True):
        if found.setdefault(label, kind) != kind:
            raise ArgumentError(
                f"island {label!r} holds ranks on {found[label]} and on {kind}: no native library joins them; "
                "give them different labels (XVCOMM_ISLAND)"
            )


def parse_islands(text: str) -> tuple[str, ...]:
    """Labels in rank order from `"cuda:2,rocm:2"` (the form of `xvcomm run --islands`).

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
