"""Converts buffer specifications to flat arrays for xvcomm, without copies.

A buffer specification is an array alone, or a list or tuple: `[data, type]`, `[data, count]`, `[data, count, type]`, `[data,
(count, displacement), type]`, `[data, count, displacement, type]`. Operations with separate counts for each rank take sequences
in place of both numbers. `data` is a numpy array, an object with Python's buffer protocol (`bytearray`, `array.array`, `mmap`),
or an array in host memory with DLPack or the array interface.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xvcomm.adapters.mpi import datatypes
from xvcomm.adapters.mpi.datatypes import BYTE, Datatype
from xvcomm.adapters.mpi.layouts import Layout, number
from xvcomm.errors import ArgumentError, ArrayError, DTypeError
from xvcomm.memory import array

Array = NDArray[Any]
Bytes = NDArray[np.uint8]


class _Constant:
    """A constant in place of a buffer."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> str:
        return self._name.removeprefix("MPI.")


IN_PLACE = _Constant("MPI.IN_PLACE")
BOTTOM = _Constant("MPI.BOTTOM")
"""No memory, like None: for messages without elements."""


class Block(NamedTuple):
    """The same number of elements for each of several ranks, one rank after the other.

    Attributes:
        memory: bytes from the first element on.
        kind: type of the elements.
        each: elements per rank.
    """

    memory: Bytes
    type: Datatype
    each: int

    def flat(self, blocks: int = 1) -> Array:
        """The elements of `blocks` ranks, as a vector.

        Raises:
            ArgumentError: the buffer is too small.
        """
        return _elements(self.memory, self.type, 0, self.each * blocks)


class Placed(NamedTuple):
    """Elements that a derived datatype selects from a buffer.

    Attributes:
        memory: the whole buffer, as a vector.
        layout: positions of the elements in it.
    """

    memory: Array
    layout: Layout

    def packed(self) -> Array:
        """Copy the elements to a new vector."""
        return self.layout.pack(self.memory)

    def unpack(self, x: Array) -> None:
        """Copy elements, possibly fewer, to their positions."""
        self.layout.unpack(self.memory, x)


class Blocks(NamedTuple):
    """A separate number of elements for each rank, each at its own displacement."""

    memory: Bytes
    type: Datatype
    counts: tuple[int, ...]
    displacements: tuple[int, ...]

    @property
    def packed(self) -> bool:
        """Whether the ranks' elements are contiguous, in rank order."""
        ends = np.cumsum(self.counts) - self.counts
        return all(d == end or not n for n, d, end in zip(self.counts, self.displacements, ends, strict=True))

    def flat(self) -> Array:
        """All elements of packed blocks, as a vector.

        Raises:
            ArgumentError: the buffer is too small.
        """
        return _elements(self.memory, self.type, 0, sum(self.counts))

    def part(self, rank: int) -> Array:
        """The elements of one rank, as a vector."""
        return _elements(self.memory, self.type, self.displacements[rank], self.counts[rank])

    def gathered(self) -> Array:
        """All elements in rank order, as a vector: a copy unless they are packed."""
        if self.packed:
            return self.flat()
        return np.concatenate([self.part(rank) for rank in range(len(self.counts))])

    def room(self) -> Array:
        """A vector to receive all elements in rank order, for `spread`."""
        return self.flat() if self.packed else np.empty(sum(self.counts), self.type.numpy)

    def spread(self, room: Array) -> None:
        """Copy the elements from the vector of `room` to their positions."""
        if self.packed:
            return
        start = 0
        for rank, count in enumerate(self.counts):
            self.part(rank)[...] = room[start : start + count]
            start += count


def carried(x: Array) -> Array:
    """A vector as xvcomm supports it: as bytes if xvcomm does not support its dtype."""
    return x if datatypes.of(x.dtype).carried else x.view(np.uint8)


def memory(data: Any, kind: Any = None) -> tuple[Bytes, Datatype]:
    """The bytes of an array, and the type of its elements, or the given type.

    Raises:
        ArrayError: it is not an array, not contiguous, or not in host memory.
        DTypeError: its elements cannot be sent.
    """
    if data is None or data is BOTTOM:
        return np.empty(0, np.uint8), BYTE if kind is None else datatypes.resolve(kind)
    x = data if isinstance(data, np.ndarray) else _seen(data)
    if not x.flags.c_contiguous:
        if not x.flags.f_contiguous:
            raise ArrayError(
                f"array of shape {x.shape} and strides {x.strides} is not contiguous; pass numpy.ascontiguousarray(x)"
            )
        x = x.T
    found = datatypes.of(x.dtype) if kind is None else datatypes.resolve(kind)
    if x.dtype.hasobject:
        raise DTypeError(f"dtype {x.dtype} contains Python objects: use the lower-case methods")
    return x.reshape(-1).view(np.uint8), found


def _seen(data: Any) -> Array:
    try:
        return np.asarray(memoryview(data))
    except (TypeError, ValueError, BufferError):
        found = array.view(data)
    if found.device != "host":
        raise ArrayError(
            f"the array is in {found.device} memory, but MPI's buffers must be in host memory: copy it there, or use the "
            "Communicator's own operations, which accept it"
        )
    if not found.nbytes:
        return np.empty(found.shape, found.dtype.numpy)
    raw: Any = (ctypes.c_char * found.nbytes).from_address(found.address)
    x: Array = np.frombuffer(raw, found.dtype.numpy).reshape(found.shape)
    x.flags.writeable = not found.immutable
    return _Imported.of(x, found)


class _Imported(np.ndarray[Any, Any]):
    """An array over memory of another object, which it keeps alive."""

    owner: Any

    @classmethod
    def of(cls, x: Array, owner: Any) -> _Imported:
        """Set the owner of an array's memory; views of the array keep it alive too, through their base."""
        made: _Imported = x.view(cls)
        made.owner = owner
        return made


def _split(spec: Any) -> tuple[Any, Any, Any, Any]:
    """A buffer specification as (data, counts, displacements, type), None for omitted parts."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    match len(spec):
        case 2:
            data, second = spec
            if isinstance(second, (Datatype, str)):
                return data, None, None, second
            return data, *_pair(second), None
        case 3:
            data, second, kind = spec
            return data, *_pair(second), kind
        case 4:
            return spec[0], spec[1], spec[2], spec[3]
    raise ArgumentError(
        f"a buffer of {len(spec)} parts: expected [data, type], [data, count, type] or [data, count, displacement, type]"
    )


def _pair(counts: Any) -> tuple[Any, Any]:
    """Split `(counts, displacements)`, which two sequences, or a sequence and a number, are; else it is counts alone."""
    if isinstance(counts, tuple) and len(counts) == 2:
        return counts
    return counts, None


def block(spec: Any, ranks: int = 0) -> Block:
    """Parse a specification in which every rank has the same number of elements.

    Args:
        ranks: number of ranks that share the buffer if no count is given; 0 or 1 if it belongs to one rank.

    Raises:
        ArgumentError: count or displacement do not fit the data.
        ArrayError, DTypeError: the data is not an array that can be sent.
    """
    data, count, displacement, kind = _split(spec)
    if isinstance(count, list) and len(count) == 2:
        count, displacement = count
    raw, found = memory(data, kind)
    if displacement is not None:
        start = number("displacement", displacement) * found.size
        if start > raw.size:
            raise ArgumentError(
                f"displacement {displacement} of {found}: the buffer ends after {raw.size // found.size}"
            )
        raw = raw[start:]
    if count is not None:
        return Block(raw, found, number("count", count))
    return Block(raw, found, _inferred(raw, found) // _dividing(raw, found, ranks))


def vector(spec: Any) -> Array:
    """All elements of a specification for one rank, as a vector. Raises the same as `block`."""
    if type(spec) is np.ndarray and spec.dtype in datatypes.PLAIN and spec.flags.c_contiguous:
        return spec.reshape(-1)  # the usual case, in a tenth of the time
    return block(spec).flat()


def placed(spec: Any) -> Placed | None:
    """Parse a specification with a derived datatype; None if the datatype is not derived.

    Raises:
        ArgumentError: count or displacement do not fit the data, or the count is omitted and cannot be derived.
        ArrayError, DTypeError: the data is not an array that can be sent.
    """
    if not isinstance(spec, (list, tuple)) or not (isinstance(spec[-1], Datatype) and spec[-1].derived):
        return None
    data, count, displacement, kind = _split(spec)
    raw, _ = memory(data, kind.numpy)
    if count is None:
        if not kind.extent or raw.size % kind.extent:
            raise ArgumentError(
                f"a buffer of {raw.size} bytes is not a multiple of {kind}, {kind.extent} bytes each; give a count"
            )
        count = raw.size // kind.extent
    first = 0 if displacement is None else number("displacement", displacement)
    layout = kind.layout.repeated(first, number("count", count))
    elements = raw[: raw.size // kind.numpy.itemsize * kind.numpy.itemsize].view(kind.numpy)
    if layout.last >= elements.size:
        raise ArgumentError(
            f"{count} x {kind}: element {layout.last} is beyond the buffer's {elements.size} x {kind.numpy}"
        )
    return Placed(elements, layout)


def _dividing(raw: Bytes, found: Datatype, ranks: int) -> int:
    elements = raw.size // found.size
    if ranks > 1 and elements % ranks:
        raise ArgumentError(
            f"{elements} elements of {found} are not a multiple of {ranks} ranks; give a count, or use the form with v"
        )
    return max(1, ranks)


def blocks(spec: Any, ranks: int) -> Blocks:
    """Parse a specification in which each rank has its own count.

    By default the data is divided as equally as possible, with one more element for the first ranks; displacements follow from
    the counts by default. A single number applies to every rank.

    Raises:
        ArgumentError: the number of counts or displacements differs from that of ranks, or they do not fit the data.
        ArrayError, DTypeError: the data is not an array that can be sent.
    """
    data, counts, displacements, kind = _split(spec)
    raw, found = memory(data, kind)
    if counts is None:
        each, more = divmod(_inferred(raw, found), ranks)
        rows = tuple(each + (rank < more) for rank in range(ranks))
    else:
        rows = _numbers("counts", counts, ranks)
    if displacements is None:
        places = tuple(int(end) for end in np.cumsum(rows) - rows)
    elif _is_number(displacements):
        places = tuple(number("displacement", displacements) * rank for rank in range(ranks))
    else:
        places = _numbers("displacements", displacements, ranks)
    return Blocks(raw, found, rows, places)


def _inferred(raw: Bytes, found: Datatype) -> int:
    if raw.size % found.size:
        raise ArgumentError(f"a buffer of {raw.size} bytes is not a multiple of {found}; give a count")
    return int(raw.size // found.size)


def _elements(raw: Bytes, found: Datatype, start: int, count: int) -> Array:
    if (start + count) * found.size > raw.size:
        where = f" from element {start} on" if start else ""
        raise ArgumentError(f"{count} x {found}{where}: the buffer has room for {raw.size // found.size}")
    return raw[start * found.size : (start + count) * found.size].view(found.numpy)


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, Sequence) and getattr(value, "ndim", 0) == 0


def _numbers(what: str, values: Any, ranks: int) -> tuple[int, ...]:
    if _is_number(values):
        return (number(what, values),) * ranks
    found = tuple(number(what, value) for value in values)
    if len(found) != ranks:
        raise ArgumentError(f"{what} {found}: expected {ranks} numbers, one a rank")
    return found
