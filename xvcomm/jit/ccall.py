"""Calls of C functions by address, from compiled code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from xvcomm.jit.inline import intrinsic

let_go = types.ExternalFunction("PyEval_SaveThread", types.voidptr())
take_back = types.ExternalFunction("PyEval_RestoreThread", types.void(types.voidptr))
"""Release and take the interpreter lock around a call that may take long. `take_back` gets the result of `let_go`."""

_WORD = ir.IntType(64)


def _called(builder: Any, function: Any, arguments: Any, result: Any) -> Any:
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


def caller(result: Any, *arguments: Any) -> Any:
    """Make a function for compiled code that calls a C function of these types: `call(address, *arguments)`.

    Args:
        result: `types.int64` or `types.void`.
    """

    @intrinsic(result, types.int64, *arguments)
    def call(builder: Any, function: Any, *arguments: Any) -> Any:
        return _called(builder, function, arguments, _WORD if result is types.int64 else ir.VoidType())

    return call


call_3 = caller(types.int64, *[types.int64] * 3)
"""Call a C function with 3 int64 arguments that returns int64."""

call_5 = caller(types.int64, *[types.int64] * 5)
"""Call a C function with up to 5 int64 arguments that returns int64; surplus ones are ignored, see `call_11`."""


@intrinsic(types.int64, *[types.int64] * 12)
def call_11(builder: Any, function: Any, *arguments: Any) -> Any:
    """Call a C function that takes up to 11 integers or pointers and returns `int`; surplus arguments are ignored.

    The calling conventions of x86-64 and AArch64 permit this: each argument has its own register or stack slot.
    """
    return builder.sext(_called(builder, function, arguments, ir.IntType(32)), _WORD)


@intrinsic(types.int64, types.float64)
def bits_of(builder: Any, value: Any) -> Any:
    """Reinterpret the bits of a float64 as an int64."""
    return builder.bitcast(value, _WORD)
