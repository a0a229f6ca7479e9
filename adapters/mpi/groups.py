"""Groups of ranks, from which communicators are created."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xvcomm.adapters.mpi.pointtopoint import PROC_NULL
from xvcomm.adapters.mpi.status import UNDEFINED
from xvcomm.errors import ArgumentError


class Group:
    """An ordered list of ranks of the whole job; local to this process.

    Attributes:
        mine: this process's rank in the whole job.
    """

    def __init__(self, ranks: Sequence[int], mine: int) -> None:
        self.ranks, self.mine = tuple(ranks), mine

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group) and self.ranks == other.ranks

    def __hash__(self) -> int:
        return hash(self.ranks)

    def __bool__(self) -> bool:
        return True

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Index of this process in the group, or UNDEFINED."""
        return self.ranks.index(self.mine) if self.mine in self.ranks else UNDEFINED

    def Get_size(self) -> int:
        """Number of members."""
        return self.size

    def Get_rank(self) -> int:
        """Index of this process in the group, or UNDEFINED."""
        return self.rank

    def Incl(self, ranks: Sequence[int]) -> Group:
        """The members with these indices, in this order.

        Raises:
            ArgumentError: an index is out of range or given twice.
        """
        self._check(ranks)
        return Group([self.ranks[place] for place in ranks], self.mine)

    def Excl(self, ranks: Sequence[int]) -> Group:
        """All members except those with these indices."""
        self._check(ranks)
        return Group([rank for place, rank in enumerate(self.ranks) if place not in set(ranks)], self.mine)

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Group:
        """The members of the first group, then those of the second that are not in the first."""
        return cls([*group1.ranks, *(rank for rank in group2.ranks if rank not in group1.ranks)], group1.mine)

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Group:
        """The members of the first that are in the second."""
        return cls([rank for rank in group1.ranks if rank in group2.ranks], group1.mine)

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Group:
        """The members of the first that are not in the second."""
        return cls([rank for rank in group1.ranks if rank not in group2.ranks], group1.mine)

    def Translate_ranks(self, ranks: Sequence[int] | None = None, group: Group | None = None) -> list[int]:
        """Indices in another group of the members with these indices; UNDEFINED for those not in it.

        An index may occur several times; PROC_NULL stays PROC_NULL.

        Raises:
            ArgumentError: an index is out of range.
        """
        places = list(range(self.size) if ranks is None else ranks)
        self._check({place for place in places if place != PROC_NULL})
        target = self.ranks if group is None else group.ranks
        theirs = {rank: place for place, rank in enumerate(target)}
        return [PROC_NULL if p == PROC_NULL else theirs.get(self.ranks[p], UNDEFINED) for p in places]

    def Free(self) -> None:
        """No-op: groups are garbage-collected."""

    def _check(self, places: Collection[int]) -> None:
        if len(set(places)) != len(places) or any(not 0 <= place < self.size for place in places):
            raise ArgumentError(f"ranks {list(places)}: must be different, and from 0 to {self.size - 1}")
