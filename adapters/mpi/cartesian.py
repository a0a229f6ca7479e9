"""Cartesian topologies: coordinates, neighbours, and the division of ranks among axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xvcomm.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks in row-major order.

    Attributes:
        dims: ranks along each axis.
        periods: whether each axis is periodic.
    """

    dims: tuple[int, ...]
    periods: tuple[bool, ...]

    @classmethod
    def of(cls, dims: Sequence[int], periods: Sequence[bool] | bool | None, size: int) -> Grid:
        """Create a grid of at most `size` ranks.

        Raises:
            ArgumentError: it needs more, or dims and periods differ in length.
        """
        extents = tuple(int(n) for n in dims)
        each = [bool(periods)] * len(extents) if periods is None or isinstance(periods, (bool, int)) else periods
        rings = tuple(each)
        if len(rings) != len(extents) or any(n < 1 for n in extents) or math.prod(extents) > size:
            raise ArgumentError(
                f"a grid of {extents}, periods {rings}: expected as many of both, and at most {size} ranks"
            )
        return cls(extents, tuple(bool(ring) for ring in rings))

    @property
    def size(self) -> int:
        """Number of ranks in the grid."""
        return math.prod(self.dims)

    def coordinates(self, rank: int) -> list[int]:
        """Coordinates of a rank.

        Raises:
            ArgumentError: it is not in the grid.
        """
        if not 0 <= rank < self.size:
            raise ArgumentError(f"rank {rank}: the grid {self.dims} has ranks from 0 to {self.size - 1}")
        places = []
        for extent in reversed(self.dims):
            rank, place = divmod(rank, extent)
            places.append(place)
        return places[::-1]

    def rank(self, coordinates: Sequence[int]) -> int | None:
        """The rank at given coordinates; None outside of the grid. Coordinates of periodic axes wrap around."""
        rank = 0
        for place, extent, ring in zip(coordinates, self.dims, self.periods, strict=True):
            if not ring and not 0 <= place < extent:
                return None
            rank = rank * extent + place % extent
        return rank

    def shifted(self, rank: int, axis: int, by: int) -> int | None:
        """The rank `by` positions further along an axis; None outside of the grid."""
        place = self.coordinates(rank)
        place[axis] += by
        return self.rank(place)

    def kept(self, remain: Sequence[bool]) -> Grid:
        """The grid of the axes that remain."""
        axes = [axis for axis, stays in enumerate(remain) if stays]
        return Grid(tuple(self.dims[a] for a in axes), tuple(self.periods[a] for a in axes))


def divide(ranks: int, dims: int | Sequence[int]) -> list[int]:
    """Extents whose product is `ranks`, as equal as possible, in descending order; nonzero ones are kept (MPI_Dims_create).

    Raises:
        ArgumentError: the given extents do not divide the number of ranks.
    """
    given = [0] * dims if isinstance(dims, int) else [int(n) for n in dims]
    fixed, free = math.prod(n for n in given if n), given.count(0)
    if fixed < 1 or ranks % fixed or (not free and fixed != ranks):
        raise ArgumentError(f"{ranks} ranks cannot be divided into {given}, where 0 is to be chosen")
    found = iter(_factors(ranks // fixed, free) or [])
    return [n or next(found) for n in given]


def _factors(number: int, count: int) -> list[int] | None:
    """`count` factors of a number in descending order: the lexicographically smallest such list; None if there is none."""
    if count <= 1:
        return [number] if count else ([] if number == 1 else None)
    for first in range(math.ceil(round(number ** (1 / count), 9)), number + 1):
        if number % first == 0:
            rest = _factors(number // first, count - 1)
            if rest and rest[0] <= first:
                return [first, *rest]
    return None
