"""Calls of C functions by their address, from compiled code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

let_go = types.ExternalFunction("PyEval_SaveThread", types.voidptr())
take_back = types.ExternalFunction("PyEval_RestoreThread", types.void(types.voidptr))
"""Around a call that may take long, in code that runs with the interpreter lock: other threads of Python then go on. The
second takes what the first gave."""

_WORD = ir.IntType(64)


def _called(builder: Any, args: Any, result: Any) -> Any:
    pointer = ir.FunctionType(result, [_WORD] * (len(args) - 1)).as_pointer()
    return builder.call(builder.inttoptr(args[0], pointer), args[1:])


@intrinsic  # type: ignore[untyped-decorator]
def call_3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """A function of three words that gives a word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _called(builder, args, _WORD)

    return types.int64(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_5(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """A function of five words that gives a word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _called(builder, args, _WORD)

    return types.int64(*[types.int64] * 6), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_11(
    typingctx: Any, function: Any,
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any, k: Any,
) -> Any:  # fmt: skip
    """A function of up to eleven integers and pointers that gives an `int`; it does not see what it does not take.

    So it is in the calling conventions of x86-64 and AArch64, where each of them has a register or a slot of its own.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(_called(builder, args, ir.IntType(32)), _WORD)

    return types.int64(*[types.int64] * 12), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float of which a word is the bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typingctx: Any, value: Any) -> Any:
    """The bits of a float as a word."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORD)

    return types.int64(types.float64), generate
