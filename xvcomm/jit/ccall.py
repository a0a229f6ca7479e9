"""Calls of C functions by address, from compiled code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

let_go = types.ExternalFunction("PyEval_SaveThread", types.voidptr())
take_back = types.ExternalFunction("PyEval_RestoreThread", types.void(types.voidptr))
"""Release and take the interpreter lock around a call that may take long. `take_back` gets the result of `let_go`."""

_WORD = ir.IntType(64)


def _called(builder: Any, args: Any, result: Any) -> Any:
    pointer = ir.FunctionType(result, [_WORD] * (len(args) - 1)).as_pointer()
    return builder.call(builder.inttoptr(args[0], pointer), args[1:])


@intrinsic  # type: ignore[untyped-decorator]
def call_3(typingctx: Any, function: Any, a: Any, b: Any, c: Any) -> Any:
    """Call a C function with 3 int64 arguments that returns int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _called(builder, args, _WORD)

    return types.int64(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_5(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
    """Call a C function with up to 5 int64 arguments that returns int64; surplus ones are ignored, see `call_11`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _called(builder, args, _WORD)

    return types.int64(*[types.int64] * 6), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_11(
    typingctx: Any, function: Any,
    a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any, j: Any, k: Any,
) -> Any:  # fmt: skip
    """Call a C function that takes up to 11 integers or pointers and returns `int`; surplus arguments are ignored.

    The calling conventions of x86-64 and AArch64 permit this: each argument has its own register or stack slot.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(_called(builder, args, ir.IntType(32)), _WORD)

    return types.int64(*[types.int64] * 12), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of(typingctx: Any, value: Any) -> Any:
    """Reinterpret the bits of a float64 as an int64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _WORD)

    return types.int64(types.float64), generate
