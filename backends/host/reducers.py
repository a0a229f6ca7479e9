"""Element-wise reductions: a few small compiled functions per (dtype, operation), called by address.

The kernels that move data are compiled once; only these functions depend on the type. Each takes addresses and an element
count. There is a separate loop for `dst` equal to an operand: with three pointers the compiler must assume overlap and would
not vectorize.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import carray, types

from xvcomm.backends.host import codecs
from xvcomm.jit.atomics import as_pointer, copy_bytes
from xvcomm.jit.ccall import caller
from xvcomm.jit.compile import compiling, native
from xvcomm.jit.inline import register_jitable
from xvcomm.types.dtype import BY_NAME, DType, ReduceOp

BLOCK = 8192
"""Elements reduced at a time if there are more than two operands: the float32 accumulator stays in the first-level cache."""

_COMBINE = "void(int64, int64, int64, int64)"
_SCALE = "void(int64, int64, int64, float64, int64)"


@register_jitable
def _sum_low(a: Any, b: Any) -> Any:
    return a if a != a else a + b  # of two NaNs the left one, as on GPUs; the compiler may swap what is added


@register_jitable
def _prod_low(a: Any, b: Any) -> Any:
    return a if a != a else a * b


@register_jitable
def _min(a: Any, b: Any) -> Any:
    return a if (a < b or a != a) else b  # NaN wins, as in numpy and torch


@register_jitable
def _max(a: Any, b: Any) -> Any:
    return a if (a > b or a != a) else b


_OPS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: operator.add, ReduceOp.PROD: operator.mul, ReduceOp.MIN: _min, ReduceOp.MAX: _max,
    ReduceOp.BAND: operator.and_, ReduceOp.BOR: operator.or_, ReduceOp.BXOR: operator.xor,
}  # fmt: skip
# bool is stored as 0 or 1 in a byte: sum and max are "any", prod and min are "all".
_BOOL_OPS = _OPS | {
    ReduceOp.SUM: operator.or_, ReduceOp.MAX: operator.or_, ReduceOp.PROD: operator.and_, ReduceOp.MIN: operator.and_,
}  # fmt: skip
_LOW_OPS = _OPS | {ReduceOp.SUM: _sum_low, ReduceOp.PROD: _prod_low}

_CODECS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any]] = {
    "float16": (codecs.load_half, codecs.save_half, np.uint16),
    "bfloat16": (codecs.load_bfloat16, codecs.save_bfloat16, np.uint16),
    "float8_e4m3fn": (codecs.load_e4m3fn, codecs.save_e4m3fn, np.uint8),
    "float8_e4m3fnuz": (codecs.load_e4m3fnuz, codecs.save_e4m3fnuz, np.uint8),
    "float8_e5m2": (codecs.load_e5m2, codecs.save_e5m2, np.uint8),
    "float8_e5m2fnuz": (codecs.load_e5m2fnuz, codecs.save_e5m2fnuz, np.uint8),
}


def _combiner(load_a: Any, a_type: Any, load_b: Any, b_type: Any, combine: Any, save: Any, out_type: Any) -> int:
    """Compile `dst[i] = save(combine(load_a(a[i]), load_b(b[i])))`."""

    def combiner(dst: int, a: int, b: int, count: int) -> None:
        out = carray(as_pointer(dst), count, out_type)
        left = carray(as_pointer(a), count, a_type)
        right = carray(as_pointer(b), count, b_type)
        if dst == a:
            for i in range(count):
                left[i] = save(combine(load_a(left[i]), load_b(right[i])))
        elif dst == b:
            for i in range(count):
                right[i] = save(combine(load_a(left[i]), load_b(right[i])))
        else:
            for i in range(count):
                out[i] = save(combine(load_a(left[i]), load_b(right[i])))

    return native(_COMBINE, combiner)


def _scaler(load: Any, storage: Any, save: Any, out_storage: Any, number: Any) -> int:
    """Compile `dst[i] = src[i] / divisor`, or `src[i] * factor` if the divisor is 0."""

    def scaler(dst: int, src: int, count: int, factor: float, divisor: int) -> None:
        out = carray(as_pointer(dst), count, out_storage)
        values = carray(as_pointer(src), count, storage)
        if divisor == 0:
            by = number(factor)
            for i in range(count):
                out[i] = save(load(values[i]) * by)
        else:
            by = number(divisor)
            for i in range(count):
                out[i] = save(load(values[i]) / by)

    return native(_SCALE, scaler)


def _integer_scaler(number: Any) -> int:
    """The same for integers, rounding towards zero."""
    wide = np.uint64 if np.dtype(number).kind == "u" else np.int64  # the divisor may exceed the element type

    def integer_scaler(dst: int, src: int, count: int, factor: float, divisor: int) -> None:
        out = carray(as_pointer(dst), count, number)
        values = carray(as_pointer(src), count, number)
        if divisor == 0:
            by = number(factor)
            for i in range(count):
                out[i] = values[i] * by
        else:
            by = wide(divisor)
            for i in range(count):
                value = wide(values[i])
                quotient = value // by
                if value < 0 and quotient * by != value:
                    quotient += wide(1)  # round towards zero, like NCCL and C
                out[i] = number(quotient)

    return native(_SCALE, integer_scaler)


@dataclass(frozen=True, slots=True)
class Kit:
    """Addresses of the functions for one (dtype, operation).

    Attributes:
        pair: `dst = a op b`.
        first, more, last: a chain over three or more operands; the accumulator between them is float32 for low precision, so
            that the result is rounded once, at the end.
    """

    pair: int
    first: int
    more: int
    last: int


@cache
def kit(dtype: DType, op: ReduceOp) -> Kit:
    """The functions that reduce `dtype` by `op`; compiled on first use (about 100 ms, then cached on disk)."""
    with compiling():
        if dtype.low_precision:
            load, save, raw = _CODECS[dtype.name]
            f32, combine, same = np.float32, _LOW_OPS[op], codecs.same
            return Kit(
                pair=_combiner(load, raw, load, raw, combine, save, raw),
                first=_combiner(load, raw, load, raw, combine, same, f32),
                more=_combiner(same, f32, load, raw, combine, same, f32),
                last=_combiner(same, f32, load, raw, combine, save, raw),
            )
        if dtype.kind == "i" and op not in (ReduceOp.MIN, ReduceOp.MAX):
            return kit(BY_NAME[f"u{dtype.name}"], op)  # whose results have the same bits
        storage = np.uint8 if dtype.kind == "b" else dtype.numpy.type
        combine = (_BOOL_OPS if dtype.kind == "b" else _OPS)[op]
        pair = _combiner(codecs.same, storage, codecs.same, storage, combine, codecs.same, storage)
        return Kit(pair, pair, pair, pair)


@cache
def unrounded(dtype: DType, op: ReduceOp) -> Kit:
    """Like `kit`, for a low-precision dtype with a float32 result."""
    found = kit(dtype, op)
    return Kit(found.first, found.first, found.more, found.more)


@cache
def scaler(dtype: DType) -> int:
    """Address of `scale(dst, src, count, factor, divisor)` for a dtype other than bool."""
    same = codecs.same
    with compiling():
        if dtype.low_precision:
            load, save, raw = _CODECS[dtype.name]
            return _scaler(load, raw, save, raw, np.float32)
        storage = dtype.numpy.type
        if dtype.kind in "iu":
            return _integer_scaler(storage)
        real = {"complex64": "float32", "complex128": "float64"}.get(dtype.name, dtype.name)
        return _scaler(same, storage, same, storage, BY_NAME[real].numpy.type)


@cache
def widener(dtype: DType) -> int:
    """Like `scaler`, from a low-precision dtype to float32."""
    load, _, raw = _CODECS[dtype.name]
    with compiling():
        return _scaler(load, raw, codecs.same, np.float32, np.float32)


@cache
def finisher(dtype: DType) -> int:
    """Like `scaler`, from the accumulator type of `Kit`: from float32 for low precision, which is rounded once."""
    if not dtype.low_precision:
        return scaler(dtype)
    _, save, raw = _CODECS[dtype.name]
    with compiling():
        return _scaler(codecs.same, np.float32, save, raw, np.float32)


call_combine = caller(types.void, *[types.int64] * 4)
"""Call a combiner by its address: `call_combine(function, dst, a, b, count)`."""

call_scale = caller(types.void, *[types.int64] * 3, types.float64, types.int64)
"""Call a scaler by its address: `call_scale(function, dst, src, count, factor, divisor)`."""


@register_jitable
def reduce_many(
    kit: Any, dst: int, sources: Any, ways: int, count: int, itemsize: int, result_size: int, scratch: int
) -> None:
    """Reduce `ways` sources into `dst`, in order.

    Args:
        kit: (pair, first, more, last), as in `Kit`.
        sources: addresses; `dst` may be one of them.
        itemsize, result_size: bytes per element of the sources, and of `dst`.
        scratch: address of BLOCK accumulator elements.
    """
    pair, first, more, last = kit
    if ways == 1:
        copy_bytes(dst, sources[0], count * itemsize)
        return
    if ways == 2:
        call_combine(pair, dst, sources[0], sources[1], count)
        return
    for done in range(0, count, BLOCK):
        length, offset = min(BLOCK, count - done), done * itemsize
        call_combine(first, scratch, sources[0] + offset, sources[1] + offset, length)
        for i in range(2, ways - 1):
            call_combine(more, scratch, scratch, sources[i] + offset, length)
        call_combine(last, dst + done * result_size, scratch, sources[ways - 1] + offset, length)


@register_jitable
def average_many(
    kit: Any, finisher: int, dst: int, sources: Any, ways: int, count: int, itemsize: int, divisor: int, scratch: int
) -> None:
    """Reduce two or more sources, divide by `divisor`, and round once; see `reduce_many`.

    Args:
        finisher: address of the function `finisher` returns.
    """
    _, first, more, _ = kit
    for done in range(0, count, BLOCK):
        length, offset = min(BLOCK, count - done), done * itemsize
        call_combine(first, scratch, sources[0] + offset, sources[1] + offset, length)
        for i in range(2, ways):
            call_combine(more, scratch, scratch, sources[i] + offset, length)
        call_scale(finisher, dst + offset, scratch, length, 0.0, divisor)
