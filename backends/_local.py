"""Copies and scaling within a GPU's memory, of fixed length, launched by compiled code on any addresses."""

from __future__ import annotations

import ctypes
import enum

from xvcomm.atomics import load, store
from xvcomm.backends._kernels import COPY_PLACES, SCALE_PLACES, Kernels, Prepared, arguments_of, first_aligned, launched
from xvcomm.calling import let_go, take_back
from xvcomm.dtype import DType
from xvcomm.jit import compiling, native


class Word(enum.IntEnum):
    """Words of a launch."""

    PREPARED = 0  # address of its words
    COUNT = 1  # elements
    ITEMSIZE = 2
    INPUT = 3  # these two: places in what the kernel takes, whose first word is the output
    HEAD = 4


_PREPARED, _COUNT, _ITEMSIZE, _INPUT, _HEAD = (8 * int(w) for w in Word)


def _launch(words: int, src: int, dst: int, stream: int, _: int) -> int:
    prepared = load(words + _PREPARED)
    arguments = arguments_of(prepared)
    store(arguments, dst)
    store(arguments + load(words + _INPUT), src)
    head = first_aligned(load(words + _COUNT), load(words + _ITEMSIZE), dst, src ^ dst)
    store(arguments + load(words + _HEAD), head)
    thread = let_go()
    code: int = launched(prepared, stream)
    take_back(thread)
    return code


with compiling():
    LAUNCH_LOCAL = native("int64(int64, int64, int64, int64, int64)", _launch)
    """Address of what launches a `LocalCall`: its address, input and output, a stream, a word that means nothing."""


class LocalCall:
    """A copy or a scaling of fixed length, as compiled code launches it.

    Attributes:
        address: what LAUNCH_LOCAL takes.
    """

    __slots__ = ("_prepared", "_words", "address")

    def __init__(self, prepared: Prepared, count: int, itemsize: int, places: tuple[int, int]) -> None:
        self._prepared = prepared
        self._words = (ctypes.c_int64 * len(Word))(prepared.address, count, itemsize, *places)
        self.address = ctypes.addressof(self._words)

    @classmethod
    def copy(cls, kernels: Kernels, nbytes: int) -> LocalCall:
        """Of so many bytes."""
        return cls(kernels.prepare_copy(nbytes), nbytes, 1, COPY_PLACES)

    @classmethod
    def scale(cls, kernels: Kernels, count: int, dtype: DType, factor: float, divisor: int) -> LocalCall:
        """See `Device.scale`."""
        return cls(kernels.prepare_scale(count, dtype, factor, divisor), count, dtype.itemsize, SCALE_PLACES)
