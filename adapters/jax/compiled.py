"""The handler on host memory: compiled code that runs prepared operations itself and passes others to Python.

XLA calls it with a call frame; the operation's number leads to the prepared call through a table. The addresses of the table
and of the Python function differ between processes, while compiled code is cached on disk: both are symbols that are resolved
when the code is loaded.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types

from xvcomm.adapters.jax import ffi
from xvcomm.engine.prepared import BUSY, run
from xvcomm.jit.atomics import READY, load, load_acquire, store, store_release
from xvcomm.jit.compile import brief, compiling, native
from xvcomm.jit.inline import intrinsic, register_jitable

ROOM = 1 << 16
"""Entries of the table: number and address of a prepared call. At most half are used; further operations run in Python."""

ARGUMENT, RESULT = -1, -2
"""In place of an address: the data of the first operand, and of the first result."""

_TABLE, _PYTHON = "xvcomm_jax_table", "xvcomm_jax_python"
_CALL, _SRC, _DST = 0, 8, 16
_EXTENSION, _STAGE, _ATTRS, _ARGS, _RETS = (
    8 * place for place in (ffi.EXTENSION, ffi.STAGE, ffi.ATTRS, ffi.ARGS, ffi.RETS)
)
_DATA, _VALUE, _EXECUTE = 8 * ffi.DATA, 8 * ffi.VALUE, ffi.EXECUTE
_in_python = types.ExternalFunction(_PYTHON, types.int64(types.int64, types.int64))


@intrinsic(types.int64)
def _table(builder: Any) -> Any:
    """Address of the table."""
    word = ir.IntType(64)
    known = builder.module.globals.get(_TABLE) or ir.GlobalVariable(builder.module, word, _TABLE)
    return builder.ptrtoint(known, word)


@register_jitable
def _entry(table: int, number: int) -> int:
    """Address of the entry of an operation, or of an empty entry."""
    place = number & (ROOM - 1)
    while True:
        entry = table + 16 * place
        if load_acquire(entry + 8) == 0 or load(entry) == number:
            return entry
        place = (place + 1) & (ROOM - 1)


@register_jitable
def _find(table: int, number: int) -> int:
    return load_acquire(_entry(table, number) + 8)


@register_jitable
def _where(place: int, frame: int) -> int:
    """The address that a prepared operation reads from or writes to."""
    if place == ARGUMENT:
        return load(load(load(frame + _ARGS)) + _DATA)
    if place == RESULT:
        return load(load(load(frame + _RETS)) + _DATA)
    return place


def _handle(frame: int) -> int:
    """Called by XLA; returns XLA's error, or 0."""
    if load(frame + _EXTENSION) != 0 or load(frame + _STAGE) & 0xFFFFFFFF != _EXECUTE:
        return _in_python(frame, 0)
    operation = _find(_table(), load(load(load(load(frame + _ATTRS)) + _VALUE)))
    if operation == 0:
        return _in_python(frame, 0)
    code = run(load(operation + _CALL), _where(load(operation + _SRC), frame), _where(load(operation + _DST), frame), 0)
    if code == READY:
        return 0
    return _in_python(frame, 0 if code == BUSY else 1)


def _insert(table: int, number: int, operation: int) -> None:
    entry = _entry(table, number)
    store(entry, number)
    store_release(entry + 8, operation)


with compiling():
    insert = brief("void(int64, int64, int64)")(_insert)
    find = brief("int64(int64, int64)")(_find)

_entries = np.zeros(2 * ROOM, np.int64)
_adding = threading.Lock()
_kept: dict[int, Any] = {}


def handler(function: Any) -> int:
    """Address of the handler.

    Args:
        function: C function of a frame and whether the operation has been started; called if the handler cannot continue.
    """
    binding.add_symbol(_TABLE, _entries.ctypes.data)
    binding.add_symbol(_PYTHON, ctypes.cast(function, ctypes.c_void_p).value)
    with compiling():
        return native("int64(int64)", _handle)


def add(number: int, call: int, src: int, dst: int) -> None:
    """Let the handler run an operation from now on.

    Args:
        number: attribute of its custom call.
        call: address of the prepared call.
        src, dst: addresses, or ARGUMENT or RESULT.
    """
    with _adding:
        if len(_kept) < ROOM // 2 and number not in _kept:
            operation = _kept[number] = (ctypes.c_int64 * 3)(call, src, dst)
            insert(_entries.ctypes.data, number, ctypes.addressof(operation))
