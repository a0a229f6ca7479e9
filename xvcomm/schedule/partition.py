"""Division of a range of elements among ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

ALIGNMENT = 16  # bytes: the widest load of the movers, on GPUs and on the host


def grain(itemsize: int) -> int:
    """Shares are multiples of this number of elements."""
    return max(1, ALIGNMENT // itemsize)


@dataclass(frozen=True, slots=True)
class Cut:
    """A range from 0, divided into consecutive parts; part `i` goes from `offsets[i]` to `offsets[i + 1]`."""

    offsets: tuple[int, ...]

    @classmethod
    def of(cls, counts: Iterable[int]) -> Cut:
        """The division into parts of these sizes."""
        return cls(tuple(accumulate(counts, initial=0)))

    @property
    def total(self) -> int:
        """Total number of elements."""
        return self.offsets[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        """Size of each part."""
        return tuple(b - a for a, b in pairwise(self.offsets))

    def part(self, index: int) -> tuple[int, int]:
        """Start and stop of a part."""
        return self.offsets[index], self.offsets[index + 1]

    def holder(self, position: int) -> int:
        """The part that contains `position`."""
        return bisect_right(self.offsets, position) - 1

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts that share elements with `start` to `stop`, as (part, first element, one past the last)."""
        index = self.holder(start)
        while start < stop:
            upper = min(stop, self.offsets[index + 1])
            if start < upper:
                yield index, start, upper
                start = upper
            index += 1


@lru_cache(maxsize=64)
def weighted(total: int, weights: tuple[int, ...], itemsize: int) -> Cut:
    """Divide `total` elements into parts proportional to `weights`, at multiples of 16 bytes except for the end."""
    unit = grain(itemsize)
    units = -(-total // unit)
    whole = sum(weights)
    return Cut(tuple(min(total, units * upto // whole * unit) for upto in accumulate(weights, initial=0)))


def fair(total: int, parts: int, itemsize: int) -> Cut:
    """Divide `total` elements into `parts` parts whose sizes differ by at most 16 bytes; see `weighted`."""
    return weighted(total, (1,) * parts, itemsize)
