"""Records that Python and compiled code share: one numpy structured dtype declares the fields for both.

    _GATE = np.dtype([("state", "i8"), ("sequence", "i8")])
    _Gate, _gate_at = python_type(_GATE), compiled_at(_GATE)

    gate = _Gate()                    # Python: gate.sequence = 3, ctypes.addressof(gate)
    gate = _gate_at(address)          # compiled code: gate.sequence = 3, address_of(gate, "state")

In compiled code an access is one load or store at a constant offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from xvcomm.jit.inline import register_jitable

_WORD = ir.IntType(64)


def python_type(dtype: np.dtype[Any]) -> type[Any]:
    """The `ctypes.Structure` of a dtype: a field takes Python a third of the time that one of a numpy record takes."""
    found: type[Any] = np.ctypeslib.as_ctypes_type(dtype)
    return found


def compiled_at(dtype: np.dtype[Any]) -> Callable[..., Any]:
    """A function for compiled code: `at(address, index=0)` gives one of the records that lie at an address.

    The record is a reference, and so is a field that is a record itself.
    """
    record, size = from_dtype(dtype), dtype.itemsize

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    @intrinsic  # type: ignore[untyped-decorator]
    def record_at(typingctx: Any, address: Any) -> Any:
        return record(types.int64), generate

    def at(address: int, index: int = 0) -> Any:
        return record_at(address + index * size)

    found: Callable[..., Any] = register_jitable(at)
    return found


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def address_of(typingctx: Any, record: Any, field: Any) -> Any:
    """The address of a record's field, from compiled code. The field's name must be a constant."""
    offset = record.offset(field.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.add(builder.ptrtoint(args[0], _WORD), _WORD(offset))

    return types.int64(record, field), generate
