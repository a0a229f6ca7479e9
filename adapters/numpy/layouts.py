"""Which elements of a buffer a derived datatype means. Pure; all numbers are elements of its basic type."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xvcomm.errors import ArgumentError


class Layout(NamedTuple):
    """One element of a derived datatype.

    Attributes:
        places: of its basic elements, in the order in which they are sent.
        extent: from one to the next in a buffer of several.
    """

    places: NDArray[np.int64]
    extent: int

    def repeated(self, starts: Any) -> NDArray[np.int64]:
        """The places of several, the first elements of which lie at `starts`, in extents."""
        places: NDArray[np.int64] = np.add.outer(np.asarray(starts, np.int64).reshape(-1) * self.extent, self.places)
        return places.reshape(-1)


BASIC = Layout(np.zeros(1, np.int64), 1)


def indexed(of: Layout, lengths: Any, displacements: Any) -> Layout:
    """Blocks of so many at each displacement; one length counts for all blocks."""
    starts = _numbers("displacements", displacements)
    counts = _numbers("blocklengths", lengths) if np.ndim(lengths) else [number("blocklength", lengths)] * len(starts)
    if len(counts) != len(starts):
        raise ArgumentError(f"{len(counts)} blocklengths and {len(starts)} displacements: expected as many of both")
    blocks = [start + np.arange(count) for start, count in zip(starts, counts, strict=True)]
    end = max((start + count for start, count in zip(starts, counts, strict=True)), default=0)
    extent = end - min(starts, default=0)
    return Layout(of.repeated(np.concatenate([np.empty(0, np.int64), *blocks])), extent * of.extent)


def vector(of: Layout, count: Any, length: Any, stride: Any) -> Layout:
    """`count` blocks of `length`, whose beginnings lie `stride` apart."""
    return indexed(of, length, np.arange(number("count", count)) * number("stride", stride))


def subarray(of: Layout, sizes: Any, subsizes: Any, starts: Any, *, columns_first: bool) -> Layout:
    """A part of an array with so many elements in each dimension; the extent is that of the whole array."""
    whole, part, first = _numbers("sizes", sizes), _numbers("subsizes", subsizes), _numbers("starts", starts)
    if not len(whole) == len(part) == len(first):
        raise ArgumentError(
            f"sizes {whole}, subsizes {part}, starts {first}: expected as many of each, one a dimension"
        )
    if any(begin + n > size for size, n, begin in zip(whole, part, first, strict=True)):
        raise ArgumentError(f"a part of {part} at {first} does not lie in an array of {whole}")
    numbers = np.arange(int(np.prod(whole))).reshape(whole, order="F" if columns_first else "C")
    chosen = numbers[tuple(slice(begin, begin + n) for n, begin in zip(part, first, strict=True))]
    return Layout(of.repeated(chosen.reshape(-1, order="F" if columns_first else "C")), numbers.size * of.extent)


def number(what: str, value: Any) -> int:
    """A whole number from 0 on.

    Raises:
        ArgumentError: it is none; says `what` it is.
    """
    try:
        found = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what} {value!r}: expected a whole number") from None
    if found < 0:
        raise ArgumentError(f"{what} {found}: must not be negative")
    return found


def _numbers(what: str, values: Sequence[Any]) -> list[int]:
    try:
        return [number(what, value) for value in values]
    except TypeError:
        raise ArgumentError(f"{what} {values!r}: expected whole numbers") from None
