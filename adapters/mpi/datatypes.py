"""MPI's datatypes: names of numpy's dtypes, and derived types, which select elements of a buffer.

Types that xvcomm does not support (extended precision) are sent as bytes, and reduced on the host. Derived types are for
messages: the selected elements are packed before they are sent, and unpacked when they are received.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from xvcomm.adapters.mpi import layouts
from xvcomm.adapters.mpi.layouts import BASIC, Layout
from xvcomm.errors import DTypeError
from xvcomm.types import dtype as dtypes

ORDER_C, ORDER_FORTRAN = 56, 57
"""Order of the elements of an array, with mpi4py's values."""


class Datatype:
    """A basic or derived datatype.

    Attributes:
        numpy: the `numpy.dtype` of its basic elements.
        name: name in MPI, `"MPI_DOUBLE"`.
        layout: positions of its basic elements; BASIC for a basic type.
    """

    def __init__(self, name: str, dtype: Any, layout: Layout = BASIC) -> None:
        self.name = name
        self.numpy = np.dtype(dtype)
        self.layout = layout

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (Datatype, (self.name, self.numpy, self.layout)) if self.derived else (Datatype, (self.name, self.numpy))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Datatype) or self.derived or other.derived:
            return self is other
        return (self.name, self.numpy) == (other.name, other.numpy)

    def __hash__(self) -> int:
        return hash((self.name, self.numpy))

    @property
    def derived(self) -> bool:
        """Whether it is a derived datatype."""
        return self.layout is not BASIC

    @property
    def size(self) -> int:
        """Bytes sent per element."""
        return self.numpy.itemsize * self.layout.size

    @property
    def extent(self) -> int:
        """Bytes from one element to the next."""
        return self.numpy.itemsize * self.layout.extent

    @property
    def typechar(self) -> str:
        """numpy's type character."""
        return self.numpy.char

    @property
    def typestr(self) -> str:
        """numpy's type string, `"<f8"`."""
        return self.numpy.str

    @cached_property
    def carried(self) -> bool:
        """Whether xvcomm supports arrays of this dtype directly."""
        try:
            dtypes.from_numpy(self.numpy)
        except DTypeError:
            return False
        return True

    def tocode(self) -> str:
        """numpy's type character."""
        return self.typechar

    def Get_size(self) -> int:
        """Bytes sent per element."""
        return self.size

    def Get_extent(self) -> tuple[int, int]:
        """Lower bound, which is always 0 here, and bytes from one element to the next."""
        return 0, self.extent

    def Get_name(self) -> str:
        """Name in MPI."""
        return self.name

    def Commit(self) -> Datatype:
        """No-op: types need no commit."""
        return self

    def Free(self) -> None:
        """No-op: types are garbage-collected."""

    def Dup(self) -> Datatype:
        """An equal datatype."""
        return Datatype(self.name, self.numpy, self.layout)

    def Create_contiguous(self, count: int) -> Datatype:
        """A type of `count` consecutive elements."""
        return self._of("contiguous", layouts.vector(self.layout, count, 1, 1))

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Datatype:
        """A type of `count` blocks that begin `stride` elements apart, for instance a column of an array in C order."""
        return self._of("vector", layouts.vector(self.layout, count, blocklength, stride))

    def Create_indexed(self, blocklengths: Any, displacements: Any) -> Datatype:
        """A type of blocks with given lengths and displacements, in elements."""
        return self._of("indexed", layouts.indexed(self.layout, blocklengths, displacements))

    def Create_indexed_block(self, blocklength: int, displacements: Any) -> Datatype:
        """A type of blocks of equal length."""
        return self._of("indexed_block", layouts.indexed(self.layout, blocklength, displacements))

    def Create_subarray(self, sizes: Any, subsizes: Any, starts: Any, order: int = ORDER_C) -> Datatype:
        """A type that selects a part of an array, given by the sizes of both and the start of the part in each dimension."""
        layout = layouts.subarray(self.layout, sizes, subsizes, starts, columns_first=order == ORDER_FORTRAN)
        return self._of("subarray", layout)

    def _of(self, how: str, layout: Layout) -> Datatype:
        return Datatype(f"{how} of {self.name}", self.numpy, layout)

    @classmethod
    def fromcode(cls, code: str) -> Datatype:
        """The type for a numpy type string: `"i"`, `"<f8"`."""
        return of(np.dtype(code))


NAMED = {
    name: Datatype("MPI_" + name, dtype)
    for name, dtype in {
        "BYTE": "u1", "PACKED": "u1", "CHAR": "i1", "SIGNED_CHAR": "b", "UNSIGNED_CHAR": "B", "SHORT": "h",
        "UNSIGNED_SHORT": "H", "INT": "i", "UNSIGNED": "I", "LONG": "l", "UNSIGNED_LONG": "L", "LONG_LONG": "q",
        "UNSIGNED_LONG_LONG": "Q", "FLOAT": "f", "DOUBLE": "d", "LONG_DOUBLE": "g", "C_BOOL": "?", "INT8_T": "i1",
        "INT16_T": "i2", "INT32_T": "i4", "INT64_T": "i8", "UINT8_T": "u1", "UINT16_T": "u2", "UINT32_T": "u4",
        "UINT64_T": "u8", "FLOAT16_T": "f2", "FLOAT32_T": "f4", "FLOAT64_T": "f8",
        "BFLOAT16_T": dtypes.BY_NAME["bfloat16"].numpy, "C_FLOAT_COMPLEX": "F", "C_DOUBLE_COMPLEX": "D",
        "C_LONG_DOUBLE_COMPLEX": "G", "AINT": "p", "OFFSET": "i8", "COUNT": "i8", "WCHAR": "i4", "CHARACTER": "i1",
        "LOGICAL": "i4", "INTEGER": "i4", "REAL": "f4", "DOUBLE_PRECISION": "f8", "COMPLEX": "F",
        "DOUBLE_COMPLEX": "D", "INTEGER1": "i1", "INTEGER2": "i2", "INTEGER4": "i4", "INTEGER8": "i8", "REAL2": "f2",
        "REAL4": "f4", "REAL8": "f8", "COMPLEX8": "F", "COMPLEX16": "D",
    }.items()
}  # fmt: skip
"""MPI's names, without the prefix."""

NAMED.update(
    {
        alias: NAMED[name]
        for alias, name in {
            "BOOL": "C_BOOL", "CXX_BOOL": "C_BOOL", "UNSIGNED_INT": "UNSIGNED", "SIGNED_SHORT": "SHORT", "SIGNED_INT": "INT",
            "SIGNED_LONG": "LONG", "SIGNED_LONG_LONG": "LONG_LONG", "SINT8_T": "INT8_T", "SINT16_T": "INT16_T",
            "SINT32_T": "INT32_T", "SINT64_T": "INT64_T", "C_COMPLEX": "C_FLOAT_COMPLEX",
            "CXX_FLOAT_COMPLEX": "C_FLOAT_COMPLEX", "CXX_DOUBLE_COMPLEX": "C_DOUBLE_COMPLEX", "F_INT": "INTEGER",
            "F_FLOAT": "REAL", "F_DOUBLE": "DOUBLE_PRECISION", "F_COMPLEX": "COMPLEX", "F_DOUBLE_COMPLEX": "DOUBLE_COMPLEX",
        }.items()
    }
)  # fmt: skip

BYTE = NAMED["BYTE"]
_C_TYPES = (
    "SIGNED_CHAR", "UNSIGNED_CHAR", "SHORT", "UNSIGNED_SHORT", "INT", "UNSIGNED", "LONG", "UNSIGNED_LONG", "LONG_LONG",
    "UNSIGNED_LONG_LONG", "FLOAT16_T", "FLOAT", "DOUBLE", "LONG_DOUBLE", "C_BOOL", "C_FLOAT_COMPLEX", "C_DOUBLE_COMPLEX",
    "C_LONG_DOUBLE_COMPLEX", "BFLOAT16_T",
)  # fmt: skip
_found = {NAMED[name].numpy.char: NAMED[name] for name in _C_TYPES}

PLAIN = frozenset(kind.numpy for kind in _found.values())
"""Dtypes that are sent without conversion."""


def of(dtype: np.dtype[Any]) -> Datatype:
    """The type of a numpy dtype; a new one if it has no name in MPI.

    Raises:
        DTypeError: the elements are Python objects, have foreign byte order, or have fields.
    """
    if dtype.hasobject or not dtype.isnative or dtype.names is not None:
        raise DTypeError(
            f"dtype {dtype} has no MPI datatype: use the lower-case methods, or send it as bytes: [buf, MPI.BYTE]"
        )
    # Different types of ml_dtypes may have the same character.
    found = _found.get(dtype.char)
    return found if found is not None and found.numpy == dtype else Datatype(f"MPI_{dtype.name.upper()}", dtype)


def resolve(spec: Any) -> Datatype:
    """The type in a buffer specification: a Datatype, or a numpy type string.

    Raises:
        DTypeError: it is neither, or a derived type.
    """
    if isinstance(spec, Datatype) and spec.derived:
        raise DTypeError(
            f"{spec}: derived datatypes are for messages; pass collectives a contiguous copy, numpy.ascontiguousarray(x)"
        )
    try:
        found = spec if isinstance(spec, Datatype) else of(np.dtype(spec))
    except TypeError:
        found = None
    if found is None or not found.size:
        raise DTypeError(f"{spec!r} is not a datatype; pass MPI.DOUBLE, or a string such as 'd' or '<f8'")
    return found
