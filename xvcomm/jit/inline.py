"""Functions that kernels call, and that are compiled into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import extending


def register_jitable(function: Callable[..., Any]) -> Any:
    """Let compiled code call a function: numba's decorator of this name, but without an entry point for C.

    Nothing calls these entry points, and compiling them takes a sixth of a first start.
    """
    return extending.register_jitable(no_cfunc_wrapper=True)(function)
