"""Positions of the elements that a derived datatype selects. Pure functions; all numbers count elements of the basic type.

The size of a layout depends on its description, not on the number of elements: regular positions are ranges, which are not
expanded, and irregular ones take one number per block.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xvcomm.errors import ArgumentError

_Starts = range | NDArray[np.int64]

_FEW = 16
"""Below this number of elements per block, a list of positions takes less memory than one layout per block."""

_AT_ONCE = 1 << 16
"""Irregular positions that are computed at a time."""


class Layout(NamedTuple):
    """One element of a derived datatype.

    Attributes:
        starts: positions; all `parts` are repeated at each of them.
        parts: in the order in which they are sent; none means one basic element.
        extent: distance between consecutive elements in a buffer.
        size: number of basic elements.
        last: highest position of a basic element; -1 if there is none.
    """

    starts: _Starts
    parts: tuple[Layout, ...]
    extent: int
    size: int
    last: int

    def repeated(self, first: int, count: int) -> Layout:
        """`count` elements, the first of which begins `first` extents after the start of the buffer."""
        return _made(_progression(first * self.extent, count, self.extent), (self,))

    def pack(self, memory: NDArray[Any]) -> NDArray[Any]:
        """Copy the elements from a vector to a new vector."""
        packed = np.empty(self.size, memory.dtype)
        self._copy((), memory, packed, out=True)
        return packed

    def unpack(self, memory: NDArray[Any], x: NDArray[Any]) -> None:
        """Copy elements, possibly fewer, to their positions in a vector."""
        start = 0
        for layout in self._beginning(x.size):
            layout._copy((), memory, x[start : start + layout.size], out=False)
            start += layout.size

    def _copy(self, outer: tuple[_Starts, ...], memory: NDArray[Any], x: NDArray[Any], *, out: bool) -> None:
        """Copy the elements at each combination of `outer` between `memory` and `x`, one entry of its last axis per element."""
        if not x.size:
            return
        levels = (*outer, self.starts)
        x = x.reshape(*x.shape[:-1], len(self.starts), -1)
        if not self.parts:
            _move(levels, memory, x[..., 0], out=out)
        start = 0
        for part in self.parts:
            part._copy(levels, memory, x[..., start : start + part.size], out=out)
            start += part.size

    def _beginning(self, count: int) -> list[Layout]:
        """Layouts of the first `count` basic elements."""
        if count >= self.size:
            return [self]
        whole, rest = divmod(count, self.size // len(self.starts))
        found = [_made(self.starts[:whole], self.parts)] if whole else []
        for part in self.parts if rest else ():
            for piece in part._beginning(rest):
                found.append(_made(self.starts[whole : whole + 1], (piece,)))
            rest -= min(rest, part.size)
            if not rest:
                break
        return found


def _made(starts: _Starts, parts: tuple[Layout, ...], extent: int = 0) -> Layout:
    size = len(starts) * (sum(part.size for part in parts) if parts else 1)
    if not size:
        return Layout(range(0), (), extent, 0, -1)
    farthest = starts[-1] if isinstance(starts, range) else int(starts.max())
    return Layout(starts, parts, extent, size, farthest + max((part.last for part in parts), default=0))


BASIC = Layout(range(1), (), 1, 1, 0)


def _progression(first: int, count: int, step: int) -> _Starts:
    if not step:
        return np.full(count, first, np.int64)
    return range(first, first + count * step, step)


def _move(levels: tuple[_Starts, ...], memory: NDArray[Any], x: NDArray[Any], *, out: bool) -> None:
    """Copy between `x` and the positions in `memory` that are sums of one number of each level."""
    regular = len(levels)
    while regular and isinstance(levels[regular - 1], range):
        regular -= 1
    irregular, inner = levels[:regular], [r for r in levels[regular:] if isinstance(r, range)]
    first, item = sum(r[0] for r in inner), memory.itemsize
    # number of positions at which a pattern of the inner levels may begin
    room = memory.size - sum(r[-1] for r in inner)
    window: NDArray[Any] = np.ndarray(
        (room, *map(len, inner)), memory.dtype, memory.view(np.uint8), first * item, (item, *(r.step * item for r in inner))
    )  # fmt: skip
    if not irregular:
        if out:
            x[...] = window[0]
        else:
            window[0] = x
        return
    rows = max(1, _AT_ONCE // math.prod(map(len, irregular[1:])))
    for begin in range(0, len(irregular[0]), rows):
        places = np.zeros((), np.int64)
        for level in (irregular[0][begin : begin + rows], *irregular[1:]):
            places = np.add.outer(places, _array(level))
        if out:
            x[begin : begin + rows] = window[places]
        else:
            window[places] = x[begin : begin + rows]


def _array(starts: _Starts) -> NDArray[np.int64]:
    return np.arange(starts.start, starts.stop, starts.step) if isinstance(starts, range) else starts


def indexed(of: Layout, lengths: Any, displacements: Any) -> Layout:
    """Blocks with given lengths and displacements; a single length applies to all blocks."""
    starts = _numbers("displacements", displacements)
    counts = _numbers("blocklengths", lengths) if np.ndim(lengths) else [number("blocklength", lengths)] * len(starts)
    if len(counts) != len(starts):
        raise ArgumentError(f"{len(counts)} blocklengths and {len(starts)} displacements: expected equal numbers")
    end = max((start + count for start, count in zip(starts, counts, strict=True)), default=0)
    extent = (end - min(starts, default=0)) * of.extent
    pairs = zip(counts, starts, strict=True)
    equal: list[tuple[int, Any]] = [(count, [start for _, start in same]) for count, same in groupby(pairs, _count)]
    if len(equal) > 1 and len(equal) * _FEW > sum(counts):
        places = np.concatenate([start + np.arange(count) for start, count in zip(starts, counts, strict=True)])
        equal = [(1, places)]
    blocks = [
        _made(np.asarray(at, np.int64) * of.extent, (of.repeated(0, count) if count != 1 else of,))
        for count, at in equal
    ]
    return _made(range(1 if blocks else 0), tuple(blocks), extent)


def _count(block: tuple[int, int]) -> int:
    return block[0]


def vector(of: Layout, count: Any, length: Any, stride: Any) -> Layout:
    """`count` blocks of `length` elements that begin `stride` apart."""
    count, length, stride = number("count", count), number("blocklength", length), number("stride", stride)
    extent = ((count - 1) * stride + length) * of.extent if count else 0
    return _made(_progression(0, count, stride * of.extent), (of.repeated(0, length),), extent)


def subarray(of: Layout, sizes: Any, subsizes: Any, starts: Any, *, columns_first: bool) -> Layout:
    """A part of an array, given by sizes per dimension; its extent is that of the whole array."""
    whole, part, first = _numbers("sizes", sizes), _numbers("subsizes", subsizes), _numbers("starts", starts)
    if not len(whole) == len(part) == len(first):
        raise ArgumentError(
            f"sizes {whole}, subsizes {part}, starts {first}: expected the same number of each, one per dimension"
        )
    if any(begin + n > size for size, n, begin in zip(whole, part, first, strict=True)):
        raise ArgumentError(f"a part of {part} at {first} exceeds an array of {whole}")
    dimensions = list(zip(whole, part, first, strict=True))
    found, stride = of, of.extent
    for size, n, begin in dimensions if columns_first else reversed(dimensions):
        found = _made(_progression(begin * stride, n, stride), (found,))
        stride *= size
    return _made(range(1), (found,), stride)


def number(what: str, value: Any) -> int:
    """Validate a nonnegative integer.

    Raises:
        ArgumentError: it is not one; the text begins with `what`.
    """
    try:
        found = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what} {value!r}: expected an integer") from None
    if found < 0:
        raise ArgumentError(f"{what} {found}: must not be negative")
    return found


def _numbers(what: str, values: Sequence[Any]) -> list[int]:
    try:
        return [number(what, value) for value in values]
    except TypeError:
        raise ArgumentError(f"{what} {values!r}: expected integers") from None
