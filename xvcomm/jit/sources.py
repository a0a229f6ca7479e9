"""Which source files decide what a compiled function is: its module's, and those of all modules that this one imports.

Imports are followed within xvcomm, and within the package of the function where that is another one. The result is the
same in all processes: nothing in it depends on addresses, hash seeds or the order of imports.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np

_VERSIONS = f"{numba.__version__} {llvmlite.__version__} {np.__version__}"
_IMPORT = r"^[ \t]*(?:from ((?:{0})\b[\w.]*) import (?:\(([^)]*)\)|(.*))|import ((?:{0})\b.*))"


def digest(function: Callable[..., Any], *options: object) -> str:
    """Name what a function compiles to: 32 hexadecimal digits, which change with its sources and its closure.

    Args:
        options: constants beside the function that decide what it compiles to.

    Raises:
        OSError: a source file cannot be read.
        TypeError: the function's closure or defaults hold a value of a kind that is not known here.
    """
    modules: set[str] = set()
    text = _describe(function, modules)
    sources = [_reached(module) for module in sorted(modules)]
    return hashlib.sha256(repr((_VERSIONS, options, text, sources)).encode()).hexdigest()[:32]


def _describe(value: Any, modules: set[str]) -> str:
    """A constant, or a function with its closure and defaults, as text; `modules` gets those that define functions."""
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    if isinstance(value, FunctionType):
        modules.add(value.__module__)
        bound = [_describe(cell.cell_contents, modules) for cell in value.__closure__ or ()]
        bound += [_describe(default, modules) for default in value.__defaults__ or ()]
        return f"{value.__module__}.{value.__qualname__} {bound} {value.__kwdefaults__}"
    text = repr(value)
    if " at 0x" in text:
        raise TypeError(
            f"a compiled function cannot be cached: its closure holds {text}; make it a number or an argument"
        )
    return text


@cache
def _reached(module: str) -> str:
    """Hash of the source files of a module and of what it imports, directly or through others."""
    start = getattr(sys.modules[module], "__file__", None)
    if start is None:
        raise FileNotFoundError(f"{module} has no source file")
    imports = _IMPORT.format(rf"xvcomm|{re.escape(module.partition('.')[0])}")
    waiting, found = {start}, dict[str, str]()
    while waiting:
        file = waiting.pop()
        found[file], imported = _read(file, imports)
        waiting |= imported - found.keys()
    return hashlib.sha256("".join(sorted(found.values())).encode()).hexdigest()


@cache
def _read(file: str, imports: str) -> tuple[str, set[str]]:
    """The hash of a source file, and the files of the modules that it imports by statements that match `imports`."""
    with open(file, "rb") as opened:
        source = opened.read()
    names: set[str] = set()
    for package, several, one, plain in re.findall(imports, source.decode(), re.MULTILINE):
        found = re.findall(r"[\w.]+", re.sub("#.*", "", several or one or plain))
        names.update(f"{package}.{name}" if package else name for name in found)
    return hashlib.sha256(source).hexdigest(), set(filter(None, map(_file, names)))


@cache
def _file(name: str) -> str | None:
    """The file of a module; for a name inside a module, that module's."""
    top = sys.modules.get(name.partition(".")[0])
    if top is None or top.__file__ is None:
        return None
    if not hasattr(top, "__path__"):
        return top.__file__
    base = os.path.join(os.path.dirname(top.__file__), *name.split(".")[1:])
    choices = (f"{path}{end}" for path in (base, os.path.dirname(base)) for end in (".py", "/__init__.py"))
    return next(filter(os.path.isfile, choices), None)
