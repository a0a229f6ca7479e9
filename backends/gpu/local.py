"""Copies, scaling and reductions in a GPU's memory, with fixed length, launched by compiled code on any addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from xvcomm.backends.gpu.kernels import Prepared, first_aligned, launched, prepared_at, scaling_at, terms_at
from xvcomm.jit.atomics import load
from xvcomm.jit.ccall import let_go, take_back
from xvcomm.jit.compile import compiling, native
from xvcomm.jit.inline import register_jitable
from xvcomm.jit.record import compiled_at, python_type

_CALL = np.dtype([
    ("prepared", "i8"),  # address of the `PREPARED` launch
    ("count", "i8"),  # number of elements
    ("itemsize", "i8"),
    ("scales", "i8"),  # whether the kernel argument is SCALING; otherwise TERMS
])  # fmt: skip
_Call, _call_at = python_type(_CALL), compiled_at(_CALL)


@register_jitable
def _launched_unlocked(prepared: Any, stream: int) -> Any:
    """Launch a kernel without the interpreter lock; returns the vendor's code."""
    thread = let_go()
    code = launched(prepared, stream)
    take_back(thread)
    return code


def _launch(address: int, src: int, dst: int, stream: int, _: int) -> int:
    call = _call_at(address)
    prepared = prepared_at(call.prepared)
    head = first_aligned(call.count, call.itemsize, dst, src ^ dst)
    if call.scales != 0:
        scaling = scaling_at(prepared.arguments)
        scaling.dst, scaling.src, scaling.head = dst, src, head
    else:
        terms = terms_at(prepared.arguments)
        terms.dst, terms.head, terms.srcs[0] = dst, head, src
    return int(_launched_unlocked(prepared, stream))


def _launch_reduce(address: int, srcs: int, dst: int, stream: int, _: int) -> int:
    call = _call_at(address)
    prepared = prepared_at(call.prepared)
    terms, skew = terms_at(prepared.arguments), 0
    for way in range(terms.ways):
        src = load(srcs + 8 * way)
        terms.srcs[way] = src
        skew |= src ^ dst
    terms.dst, terms.head = dst, first_aligned(call.count, call.itemsize, dst, skew)
    return int(_launched_unlocked(prepared, stream))


with compiling():
    LAUNCH_LOCAL = native("int64(int64, int64, int64, int64, int64)", _launch)
    """Address of the function that launches a copy or a scaling, of: its address, input, output, stream, an unused word."""
    LAUNCH_REDUCE = native("int64(int64, int64, int64, int64, int64)", _launch_reduce)
    """The same of a reduction, see `EnqueuedCall`."""


class LocalCall:
    """A copy, a scaling or a reduction of fixed length, launched by compiled code.

    Attributes:
        address: argument of LAUNCH_LOCAL, or of a reduction of LAUNCH_REDUCE.
    """

    __slots__ = ("_prepared", "_record", "address")

    def __init__(self, prepared: Prepared, count: int, itemsize: int, *, scales: bool = False) -> None:
        self._prepared = prepared
        self._record = _Call(prepared.address, count, itemsize, scales)
        self.address = ctypes.addressof(self._record)
