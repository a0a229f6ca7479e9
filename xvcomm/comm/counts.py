"""How many rows and elements of an array belong to each rank."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from xvcomm.errors import ArgumentError, ArrayError
from xvcomm.memory.array_view import ArrayView


def blocks(src: ArrayView, counts: Sequence[int] | None, size: int, rank: int) -> tuple[int, tuple[int, ...]]:
    """This rank's number of rows, and elements per rank, of an array that contains the blocks of all ranks."""
    if not src.shape:
        raise ArrayError("a scalar has no rows to divide; pass an array with at least one dimension")
    total = src.shape[0]
    if counts is None:
        if total % size:
            raise ArrayError(f"{total} rows are not a multiple of {size} ranks; pass counts=")
        return total // size, (src.count // size,) * size
    rows = whole("counts", counts)
    if len(rows) != size or min(rows) < 0 or sum(rows) != total:
        raise ArgumentError(f"counts {rows}: expected {size} numbers that add up to {total} rows")
    return rows[rank], in_elements(rows, src.shape)


def own_block(src: ArrayView, counts: Sequence[int] | None, size: int, rank: int) -> tuple[int, tuple[int, ...]]:
    """Total number of rows, and elements per rank, if the array contains this rank's block."""
    mine = src.shape[0] if src.shape else 1
    if counts is None:
        return mine * size, (src.count,) * size
    rows = whole("counts", counts)
    if len(rows) != size or min(rows) < 0 or rows[rank] != mine:
        raise ArgumentError(f"counts {rows}: expected {size} numbers, the one of rank {rank} being {mine}")
    return sum(rows), in_elements(rows, src.shape)


def in_elements(rows: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Convert counts of rows to counts of elements."""
    row = math.prod(shape[1:])
    return tuple(n * row for n in rows)


def whole(what: str, counts: Sequence[int]) -> tuple[int, ...]:
    """Counts as plain integers, so that a list and a numpy array of the same numbers give the same call."""
    try:
        return tuple(operator.index(n) for n in counts)
    except TypeError:
        raise ArgumentError(f"{what} {counts!r}: expected integers, one per rank") from None
