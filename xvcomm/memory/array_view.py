"""What xvcomm needs to know of an array, of whatever framework."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from xvcomm.types.dtype import DType

_numbers = itertools.count(1)


class ArrayView(msgspec.Struct, eq=False, gc=False):
    """A contiguous array in memory that the view does not own.

    Attributes:
        address: of the first element, in the memory of `device`.
        shape, dtype: as usual; `count` elements, `nbytes` bytes.
        device: `host`, `cuda`, `rocm`; `index` tells which of several.
        immutable: results must go to a new array of the same kind (JAX).
        staged: the memory stands in for an array like `array`, which `finish` makes.
        array: what the user passed; keeps the memory alive.
        stream: on a device: handle of the stream that the framework works on now; None where it does not say.
        trusted: whether the framework itself owns the memory, so that the device need not check it.
        kind: number shared by the arrays of a device that differ only in memory and stream; 0 if they are not counted.
    """

    address: int
    shape: tuple[int, ...]
    dtype: DType
    count: int
    nbytes: int
    array: Any
    device: str = "host"
    index: int = 0
    immutable: bool = False
    keep: Any = None
    staged: bool = False
    stream: int | None = None
    trusted: bool = False
    kind: int = 0


def new_kind() -> int:
    """A number for `ArrayView.kind` that no arrays have yet."""
    return next(_numbers)
