"""Functions that kernels call, and that are compiled into them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature
from typing import Any

from numba import extending, types


def register_jitable(function: Callable[..., Any]) -> Any:
    """Let compiled code call a function: numba's decorator of this name, but without an entry point for C.

    Nothing calls these entry points, and compiling them takes a sixth of a first start.
    """
    return extending.register_jitable(no_cfunc_wrapper=True)(function)


def intrinsic(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Let compiled code call a function that emits LLVM's instructions: numba's decorator of this name, for given types.

    The function gets LLVM's builder and the values of the arguments, and returns the value of the call, if it has one.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if result is types.void else value

        @wraps(emit)
        def typed(typingctx: Any, *args: Any) -> Any:
            return result(*arguments), generate

        # numba derives from it how many arguments the call takes
        names = ("typingctx", *(f"argument_{i}" for i in range(len(arguments))))
        typed.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])  # type: ignore[attr-defined]
        return extending.intrinsic(typed)

    return decorate
