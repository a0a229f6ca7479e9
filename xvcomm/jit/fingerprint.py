"""Fingerprints of a function that numba compiles and of everything that it references, in any file.

The fingerprint changes with the code of inlined functions and intrinsics, and with every constant that they read. It is the
same in all processes: it does not depend on addresses, hash seeds or import order.
"""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.dispatcher import Dispatcher

_KNOWN_BY_VERSION = {"llvmlite", "numba", "numpy"}
_OUTSIDE = {*_KNOWN_BY_VERSION, *sys.stdlib_module_names}
_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {np.__version__}"
_PLAIN = {bool, int, float, complex, str, bytes, slice, range, type(None), type(Ellipsis)}


def fingerprint(function: Callable[..., Any], *options: object) -> str:
    """A digest of 32 hexadecimal digits of all that determines the compiled code of `function`.

    Call it when numba compiles, not earlier: it reads globals with their value at that time.

    Args:
        function: function to be compiled.
        options: further constants that affect the result.

    Raises:
        TypeError: the function reads a global of an unsupported type.
    """
    found = hashlib.sha256(f"{_VERSIONS} {options!r}".encode())
    numbers: dict[FunctionType, int] = {}
    waiting = [_python(function)]
    while waiting:
        next_one = waiting.pop()
        if next_one in numbers:
            found.update(b"%d;" % numbers[next_one])
            continue
        numbers[next_one] = len(numbers)
        own, others = _describe(next_one)
        found.update(own)
        waiting.extend(others)
    return found.hexdigest()[:32]


def _python(function: Any) -> FunctionType:
    """The Python function inside a decorated one."""
    while not isinstance(function, FunctionType):
        function = function.__wrapped__
    return function


@cache
def _describe(function: FunctionType) -> tuple[bytes, tuple[FunctionType, ...]]:
    """A description of the function without those it references, and the functions it references."""
    others: list[FunctionType] = []
    codes = list(_codes(function.__code__))
    names = sorted({name for code in codes for name in code.co_names})
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    bound = {name: cell.cell_contents for name, cell in cells}
    bound |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    parts = [_code(code) for code in codes]
    try:
        parts += [f"{name}: {_value(value, names, others)}" for name, value in bound.items()]
        parts.append(_value((function.__defaults__, function.__kwdefaults__), names, others))
    except TypeError as problem:
        raise TypeError(f"{function.__module__}.{function.__qualname__} cannot be cached: {problem}") from None
    return "\n".join(parts).encode(), tuple(others)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The function's code object and those of nested functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _code(code: CodeType) -> str:
    constants = ["code" if isinstance(c, CodeType) else _value(c, [], []) for c in code.co_consts]
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
    return f"{code.co_name} {code.co_code.hex()} {arguments} {names} {constants}"


def _value(value: Any, names: list[str], others: list[FunctionType]) -> str:
    """A constant as text.

    Args:
        names: attribute names to read from modules and classes: all names that the function uses.
        others: functions that the value references are appended to it.
    """
    kind = type(value).__qualname__
    if type(value) in _PLAIN:
        return f"{kind} {value!r}"
    if isinstance(value, enum.Enum):
        return f"{kind} {value.name} {value.value!r}"
    if isinstance(value, tuple | list):
        return f"{kind} {[_value(item, names, others) for item in value]}"
    if isinstance(value, dict):
        return f"{kind} {[_value(item, names, others) for item in value.items()]}"
    if isinstance(value, frozenset):
        return f"{kind} {sorted(map(repr, value))}"
    if isinstance(value, np.dtype | np.generic | np.ndarray):
        return _array(value)
    if isinstance(value, types.Type | ir.Type | ir.Constant):
        return f"{kind} {value} {getattr(value, 'sig', '')}"
    return _named(value, names, others)


def _array(value: Any) -> str:
    """Describe a numpy dtype, scalar or array."""
    if isinstance(value, np.dtype):
        return f"dtype {value.descr}"
    if value.dtype.hasobject:
        raise TypeError(f"it reads Python objects in an array, {value!r}")
    return f"array {value.dtype.descr} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"


def _named(value: Any, names: list[str], others: list[FunctionType]) -> str:
    """Describe a function, class or module."""
    if isinstance(value, ModuleType):
        home, name = value.__name__, value.__name__
    else:
        home, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    if home.partition(".")[0] in _OUTSIDE and name:
        return f"{home} {name}"
    if isinstance(value, Dispatcher):
        others.append(_python(value))
        return f"compiled {value.nopython_signatures} {value.targetoptions}"
    if isinstance(value, FunctionType) or hasattr(value, "__wrapped__"):
        others.append(_python(value))
        return f"function {home} {name}"
    if isinstance(value, type | ModuleType):
        inside = [f"{n}: {_value(getattr(value, n), names, others)}" for n in names if hasattr(value, n)]
        return f"{home} {name} {inside}"
    if isinstance(value, BuiltinFunctionType):
        return f"{home} {name}"
    raise TypeError(f"it reads {value!r}; make it a number, a tuple, or an argument")
