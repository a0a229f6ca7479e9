"""Copies, scaling and sums of two arrays in a GPU's memory, with fixed length, launched by compiled code on any addresses."""

from __future__ import annotations

import ctypes
import enum

from xvcomm.backends.gpu.kernels import (
    REDUCE_PLACES,
    SCALE_PLACES,
    Kernels,
    Prepared,
    arguments_of,
    first_aligned,
    launched,
)
from xvcomm.jit.atomics import load, store
from xvcomm.jit.ccall import let_go, take_back
from xvcomm.jit.compile import compiling, native
from xvcomm.types.dtype import DType, ReduceOp


class Word(enum.IntEnum):
    """Words of a launch."""

    PREPARED = 0  # address of the prepared launch's words
    COUNT = 1  # number of elements
    ITEMSIZE = 2
    INPUT = 3  # these three: offsets in the kernel argument, whose first word is the output
    HEAD = 4
    OUTPUT = 5  # offset of the output as an operand; 0 if it is not one


_PREPARED, _COUNT, _ITEMSIZE, _INPUT, _HEAD, _OUTPUT = (8 * int(w) for w in Word)


def _launch(words: int, src: int, dst: int, stream: int, _: int) -> int:
    prepared = load(words + _PREPARED)
    arguments = arguments_of(prepared)
    store(arguments, dst)
    store(arguments + load(words + _OUTPUT), dst)
    store(arguments + load(words + _INPUT), src)
    head = first_aligned(load(words + _COUNT), load(words + _ITEMSIZE), dst, src ^ dst)
    store(arguments + load(words + _HEAD), head)
    thread = let_go()
    code: int = launched(prepared, stream)
    take_back(thread)
    return code


with compiling():
    LAUNCH_LOCAL = native("int64(int64, int64, int64, int64, int64)", _launch)
    """Address of the function that launches a `LocalCall`. Arguments: its address, input and output, a
    stream, an unused word.
    """


class LocalCall:
    """A copy, a scaling or a reduction of fixed length, launched by compiled code.

    Attributes:
        address: argument of LAUNCH_LOCAL.
    """

    __slots__ = ("_prepared", "_words", "address")

    def __init__(self, prepared: Prepared, count: int, itemsize: int, places: tuple[int, int], output: int = 0) -> None:
        self._prepared = prepared
        self._words = (ctypes.c_int64 * len(Word))(prepared.address, count, itemsize, *places, output)
        self.address = ctypes.addressof(self._words)

    @classmethod
    def copy(cls, kernels: Kernels, nbytes: int) -> LocalCall:
        """A copy of `nbytes` bytes."""
        first, _, head = REDUCE_PLACES
        return cls(kernels.prepare_copy(nbytes), nbytes, 1, (first, head))

    @classmethod
    def reduce(
        cls, kernels: Kernels, count: int, dtype: DType, op: ReduceOp, divisor: int, *, src_first: bool
    ) -> LocalCall:
        """See `SupportsEnqueuedLocal.enqueued_reduce`."""
        first, second, head = REDUCE_PLACES
        src, dst = (first, second) if src_first else (second, first)
        return cls(kernels.prepare_reduce(count, dtype, op, divisor), count, dtype.itemsize, (src, head), dst)

    @classmethod
    def scale(cls, kernels: Kernels, count: int, dtype: DType, factor: float, divisor: int) -> LocalCall:
        """See `Device.scale`."""
        return cls(kernels.prepare_scale(count, dtype, factor, divisor), count, dtype.itemsize, SCALE_PLACES)
