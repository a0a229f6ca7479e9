"""What a framework says of an array by DLPack, read by compiled code, and whether that is known already."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from numba import types
from numba.extending import register_jitable

from xvcomm.jit.atomics import copy_bytes, load, store
from xvcomm.jit.ccall import call_11
from xvcomm.jit.compile import brief, compiling
from xvcomm.memory.dlpack import CPU, Tensor, Versioned

UNKNOWN, FAILED = -1, -2
NOWHERE = -1
"""In place of a stream's handle: host memory, or a framework that does not say on which it works."""

SEEN_WORDS = ctypes.sizeof(Tensor) // 8 + 4
_KNOWN, _AXES = 64, 5
_KNOWN_WORDS = 3 + _AXES
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
        out: of a DLTensor, whose offset is made part of its address; behind it come the stream or NOWHERE, the number of
            elements, whether they lie one after the other, and a capsule's flags.

    Returns:
        The number of a known array that differs in its address alone, or UNKNOWN; FAILED if the framework raised something.
    """
    if call_11(tensor, x, out, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0:
        _clear()
        return FAILED
    place = load(out + 8)
    store(out + 48, NOWHERE)
    if stream != 0 and place & 0xFFFFFFFF != CPU:
        code = call_11(stream, place & 0xFFFFFFFF, place >> 32, out + 48, 0, 0, 0, 0, 0, 0, 0, 0)
        if code != 0:  # the framework has no streams there: the memory is not a GPU's
            _clear()
            store(out + 48, NOWHERE)
    return _measured(out, known)


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
    store(out + 48, stream)
    store(out + 72, flags)
    return _measured(out, known)


@register_jitable
def _measured(out, known):  # type: ignore[no-untyped-def]
    """Complete what was seen at `out`, and find it."""
    ndim, shape, strides = load(out + 16) & 0xFFFFFFFF, load(out + 24), load(out + 32)
    store(out, load(out) + load(out + 40))
    count, contiguous = 1, 1
    for axis in range(ndim - 1, -1, -1):
        n = load(shape + 8 * axis)
        if strides != 0 and n != 1 and load(strides + 8 * axis) != count:
            contiguous = 0
        count *= n
    store(out + 56, count)
    store(out + 64, contiguous if count > 1 else 1)
    return _find(known, out) if load(out + 64) == 1 else UNKNOWN


@register_jitable
def _find(known, out):  # type: ignore[no-untyped-def]
    """The number of what is known as it was seen at `out`: place, dtype and shape, stream."""
    ndim, shape = load(out + 16) & 0xFFFFFFFF, load(out + 24)
    for number in range(load(known)):
        entry = known + 8 * (1 + number * _KNOWN_WORDS)
        same = load(entry) == load(out + 8) and load(entry + 8) == load(out + 16) and load(entry + 16) == load(out + 48)
        axis = 0
        while same and axis < ndim:
            same = load(entry + 24 + 8 * axis) == load(shape + 8 * axis)
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
        self._words = (ctypes.c_int64 * (1 + _KNOWN * _KNOWN_WORDS))()
        self.address = ctypes.addressof(self._words)
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
        first = 1 + len(self.seen) * _KNOWN_WORDS
        self._words[first : first + 3 + len(shape)] = [place, what, stream, *shape]
        self.seen.append(made)
        self._words[0] = len(self.seen)
