"""What a framework says of an array by DLPack, read by compiled code, and whether that is known already."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import types

from xvcomm.jit.atomics import copy_bytes, load
from xvcomm.jit.ccall import call_11
from xvcomm.jit.compile import brief, compiling
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import address_of, compiled_at, python_type
from xvcomm.memory.dlpack import CPU, Tensor, Versioned

UNKNOWN, FAILED = -1, -2
NOWHERE = -1
"""In place of a stream's handle: host memory, or a framework that does not say on which it works."""

# Words, because they are compared as such, and Python reads plain words: two of a DLTensor's hold several of its fields.
SEEN = np.dtype([
    ("data", "i8"),  # from here to `offset` a DLTensor, whose offset is made part of the address of its data
    ("place", "i8"),  # device type and device id
    ("what", "i8"),  # number of dimensions, dtype
    ("shape", "i8"),
    ("strides", "i8"),
    ("offset", "i8"),
    ("stream", "i8"),  # or NOWHERE
    ("count", "i8"),  # of elements
    ("contiguous", "i8"),  # whether they lie one after the other
    ("flags", "i8"),  # of a capsule
])  # fmt: skip
_KNOWN, _AXES = 64, 5
_ARRAY = np.dtype([("place", "i8"), ("what", "i8"), ("stream", "i8"), ("shape", "i8", _AXES)])
_ARRAYS = np.dtype([("count", "i8"), ("first", _ARRAY, _KNOWN)])
_seen_at, _array_at, _arrays_at = map(compiled_at, (SEEN, _ARRAY, _ARRAYS))
_Arrays = python_type(_ARRAYS)
_TENSOR_BYTES, _INNER, _FLAGS = ctypes.sizeof(Tensor), Versioned.tensor.offset, Versioned.flags.offset
_PLAIN, _VERSIONED = (ctypes.create_string_buffer(name) for name in (b"dltensor", b"dltensor_versioned"))
_names = (ctypes.c_int64 * 2)(ctypes.addressof(_PLAIN), ctypes.addressof(_VERSIONED))
NAMES = ctypes.addressof(_names)
"""Address of the capsules' names, for `look`."""

_clear = types.ExternalFunction("PyErr_Clear", types.void())
_has_name = types.ExternalFunction("PyCapsule_IsValid", types.int32(types.int64, types.int64))
_pointer = types.ExternalFunction("PyCapsule_GetPointer", types.int64(types.int64, types.int64))


def _see(tensor: int, stream: int, x: int, out: int, known: int) -> int:
    """Have a framework describe an array, and say on which stream it works.

    Args:
        out: address of a `SEEN`.
        known: `Known.address`.

    Returns:
        The number of a known array that differs in its address alone, or UNKNOWN; FAILED if the framework raised something.
    """
    if call_11(tensor, x, out, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0:
        _clear()
        return FAILED
    seen = _seen_at(out)
    seen.stream, place = NOWHERE, seen.place
    if stream != 0 and place & 0xFFFFFFFF != CPU:
        code = call_11(stream, place & 0xFFFFFFFF, place >> 32, address_of(seen, "stream"), 0, 0, 0, 0, 0, 0, 0, 0)
        if code != 0:  # the framework has no streams there: the memory is not a GPU's
            _clear()
            seen.stream = NOWHERE
    return _measured(seen, known)


def _look(capsule: int, names: int, stream: int, out: int, known: int) -> int:
    """`_see` of an array that a capsule shows, whose stream somebody told; FAILED if it is none of DLPack's, or used."""
    plain, versioned, flags = load(names), load(names + 8), 0
    if _has_name(capsule, versioned) != 0:
        managed = _pointer(capsule, versioned)
        tensor, flags = managed + _INNER, load(managed + _FLAGS)
    elif _has_name(capsule, plain) != 0:
        tensor = _pointer(capsule, plain)
    else:
        return FAILED
    copy_bytes(out, tensor, _TENSOR_BYTES)
    seen = _seen_at(out)
    seen.stream, seen.flags = stream, flags
    return _measured(seen, known)


@register_jitable
def _measured(seen: Any, known: int) -> int:
    """Complete what was seen, and find it."""
    ndim, strides = seen.what & 0xFFFFFFFF, seen.strides
    seen.data += seen.offset
    count, contiguous = 1, 1
    for axis in range(ndim - 1, -1, -1):
        n = load(seen.shape + 8 * axis)
        if strides != 0 and n != 1 and load(strides + 8 * axis) != count:
            contiguous = 0
        count *= n
    seen.count, seen.contiguous = count, contiguous if count > 1 else 1
    return _find(_arrays_at(known), seen, ndim) if seen.contiguous == 1 else UNKNOWN


@register_jitable
def _find(known: Any, seen: Any, ndim: int) -> int:
    """The number of what is known as it was seen: place, dtype and shape, stream."""
    for number in range(known.count):
        entry = _array_at(address_of(known, "first"), number)
        same = entry.place == seen.place and entry.what == seen.what and entry.stream == seen.stream
        axis = 0
        while same and axis < ndim:
            same = entry.shape[axis] == load(seen.shape + 8 * axis)
            axis += 1
        if same:
            return number
    return UNKNOWN


with compiling():
    see = brief("int64(int64, int64, int64, int64, int64)")(_see)
    look = brief("int64(int64, int64, int64, int64, int64)")(_look)


class Known:
    """What arrays were seen, but for their addresses: to make that of what a framework says takes longer than to ask it.

    Attributes:
        address: of what compiled code compares.
        seen: what was made of each, by its number.
    """

    def __init__(self) -> None:
        self._arrays = _Arrays()
        self.address = ctypes.addressof(self._arrays)
        self.seen: list[Any] = []

    def full(self) -> bool:
        """Whether there is no room for more."""
        return len(self.seen) == _KNOWN

    @staticmethod
    def takes(shape: Sequence[int]) -> bool:
        """Whether arrays of this shape are known again."""
        return len(shape) <= _AXES

    def add(self, place: int, what: int, stream: int, shape: Sequence[int], made: Any) -> None:
        """Know an array from now on, of few dimensions. One thread at a time; any may look meanwhile."""
        if not self.takes(shape):
            return
        self._arrays.first[len(self.seen)] = place, what, stream, (*shape, *[0] * (_AXES - len(shape)))
        self.seen.append(made)
        self._arrays.count = len(self.seen)
